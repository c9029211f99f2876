"""What `rmt wiring` found out about one model, before it becomes a page, a figure, files or a printed table."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rmt.wires.cut import Effect, Ranking
from rmt.wires.load import Crosstalk, Load, crosstalk
from rmt.wires.table import Wiring
from rmt.wires.trace import Lens, Trace

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Lines = list[tuple[str, ...]]

LENS_TOP = 5
MOST_SHARES = 4_000_000  # tokens x reads x writes that text.npz holds one by one; for more, sums only


class Followed:
    """A text and its trace: what passed over the wires at each token. There is one row, so B is left out."""

    def __init__(self, seen: Trace, tokenizer: Tokenizer) -> None:
        self.seen, self.tokenizer = seen, tokenizer
        self.tokens = [self.word(one) for one in seen.ids_BT[0].tolist()]
        self.predicted = seen.logits_BTW[0].argmax(-1)
        self.followed = seen.ids_BT[0].roll(-1)  # of the last token: nothing, see `lens.target`

    def word(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False)

    @cached_property
    def total_shares(self) -> np.ndarray:
        """[R, W] over the whole text."""
        return self.seen.total_shares().numpy()

    @cached_property
    def core_shares(self) -> np.ndarray:
        """[T, C reading, C writing]."""
        return self.seen.core_shares()[0].cpu().numpy()

    @cached_property
    def lens(self) -> Lens:
        return self.seen.lens(LENS_TOP)

    @cached_property
    def crosstalk(self) -> list[Crosstalk]:
        return crosstalk(self.seen)

    def attribution(self, ids_T: torch.Tensor) -> np.ndarray:
        """[T, W]: what each write gave to the logit of one token id per position."""
        return self.seen.attribution(ids_T[None])[0].float().cpu().numpy()

    def save(self, path: Path) -> Path:
        """Shares of what was read, attributions of the predicted token and of the next, and the lens, as npz."""
        table = self.seen.table
        arrays: dict[str, Any] = {
            "tokens": np.array(self.tokens),
            "ids": self.seen.ids_BT[0].cpu().numpy(),
            "reads": np.array([slot.name for slot in table.reads]),
            "writes": np.array([slot.name for slot in table.writes]),
            "share_of_text": self.total_shares,
            "core_share": self.core_shares,
            "predicted": self.predicted.cpu().numpy(),
            "attribution_predicted": self.attribution(self.predicted),
            "attribution_followed": self.attribution(self.followed),
            "lens_after": np.array(self.lens.after),
            "lens_ids": self.lens.ids[:, 0].cpu().numpy(),
            "lens_probability": self.lens.probability[:, 0].cpu().numpy(),
            "lens_followed": self.lens.target[:, 0].cpu().numpy(),
        }
        if len(self.tokens) * len(table.reads) * len(table.writes) <= MOST_SHARES:
            share_TRW = np.zeros((len(self.tokens), len(table.reads), len(table.writes)), dtype=np.float32)
            for row, slot in enumerate(table.reads):
                share_TN = self.seen.shares(slot.name)[0].float().cpu().numpy()
                share_TRW[:, row, : share_TN.shape[1]] = share_TN
            arrays["share"] = share_TRW
        np.savez_compressed(path, **arrays)
        return path


@dataclass
class Findings:
    """The table of one model, its load (now, and at each checkpoint), and what else was asked for."""

    name: str
    step: int | None
    table: Wiring
    load: list[Load]
    history: list[tuple[int, list[Load]]] = field(default_factory=list)
    text: Followed | None = None
    cuts: tuple[float, int, list[Effect]] | None = None
    ranking: Ranking | None = None

    @property
    def random(self) -> float:
        """The root mean square cosine of unrelated keys."""
        return self.table.config.key_dim**-0.5

    def summary(self) -> str:
        """Two sentences for the top of the page and the terminal."""
        table, last = self.table, self.load[-1]
        strongest = np.abs(table.normalised).max()
        step = "" if self.step is None else f" at step {self.step}"
        return (
            f"{self.name}{step}: {len(table.reads):,} reads and {len(table.writes):,} writes are joined by "
            f"{int(table.causal.sum()):,} edges; the strongest has {strongest:.2f}, where unrelated keys have "
            f"{self.random:.2f} (root mean square). At the end {last.writes} vectors share {table.config.key_dim} key "
            f"dimensions, {last.writes_per_key_dim:.1f} each; their keys overlap {describe_overlap(last)}."
        )

    def effect_tables(self) -> list[tuple[str, tuple[str, ...], Lines]]:
        """Title, header and lines of what cuts did, for the terminal and the page."""
        tables: list[tuple[str, tuple[str, ...], Lines]] = []
        if self.cuts is not None:
            loss, tokens, effects = self.cuts
            lines: Lines = [(one.edges, str(one.number), f"{one.change:+.5f}") for one in effects]
            title = f"Loss without these edges (with them {loss:.4f} nats per token, over {tokens:,} tokens)"
            tables.append((title, ("edge", "key pairs", "loss change"), lines))
        if self.ranking is not None:
            found = self.ranking
            lines = [(one.edges, f"{one.estimate:+.5f}", f"{one.change:+.5f}") for one in found.effects]
            title = (
                f"Which connections matter: loss change when one is cut (uncut {found.loss:.4f} nats per token, over "
                f"{found.tokens:,} tokens). Of {found.candidates:,} edges between {found.level} the "
                f"{len(found.effects)} with the largest estimates (gradient and its square) were cut exactly; rank "
                f"correlation of estimate and exact change {found.agreement:.2f}"
            )
            tables.append((title, ("edge", "estimate", "loss change"), lines))
        return tables


def describe_overlap(last: Load) -> str:
    ratio = last.interference / last.interference_random
    if 0.95 <= ratio <= 1.05:
        return "about as much as random ones"
    return f"{abs(1 - ratio):.0%} {'less' if ratio < 1 else 'more'} than random ones"


def top_edges(table: Wiring, number: int) -> list[dict[str, Any]]:
    """The edges with the largest normalised numbers, either sign."""
    size = np.where(table.causal, np.abs(table.normalised), -1.0)
    order = np.argsort(-size, axis=None)[:number]
    return [
        {
            "read": table.reads[r].name,
            "write": table.writes[w].name,
            "normalised": float(table.normalised[r, w]),
            "raw": float(table.raw[r, w]),
            "spread": float(table.spread[r, w]),
        }
        for r, w in zip(*np.unravel_index(order, size.shape), strict=True)
        if table.causal[r, w]
    ]
