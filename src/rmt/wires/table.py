"""The wiring of a matrix stream: every read against every write before it, as one exact table.

A write adds w (outer product) d to the stream, with key w and vector d; a read contracts the normalised stream with its
key r. What passes from a write to a read is therefore d times one number, r . w, and the table of these numbers is the
model's wiring. Where the norm has a gain per entry (`norm_gain: full`) the number differs per value index v:

    coupling[r, w, v] = sum over k of r[k] gain[k, v] w[k]

The table then holds its mean over v, and `spread` its standard deviation over v; `Wiring.coupling` gives all of it. A
gain per value index multiplies all sources of a read alike and stays outside the table. docs/wiring.md derives this.

Axes: R reads, W writes, K key_dim, V head_dim; P reads and N writes of, or up to, one boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rmt.config import ModelConfig
from rmt.errors import InputError
from rmt.model import LanguageModel
from rmt.streams.matrix import MatrixBoundary
from rmt.wires.slots import Bools, Edges, Level, Slot, causal, find, find_edges, grouped, read_slots, write_slots

Floats = npt.NDArray[np.float32]


class BoundaryKeys(NamedTuple):
    """The keys of one boundary, copied from the model: of its writes [K, N], of its reads [P, K]; and its gain."""

    write_KN: Tensor
    read_PK: Tensor
    gain: Tensor | None


class Blocks(NamedTuple):
    """A table at the level of heads or cores."""

    reads: list[str]
    writes: list[str]
    values: Floats
    causal: Bools


@dataclass
class Wiring:
    """The table, and the keys that it was made from.

    Args:
        config: of the model.
        reads: names of the rows.
        writes: names of the columns.
        raw: [R, W]: key inner products, with the full gain their mean over value indices; 0 where not `causal`.
        spread: [R, W]: their standard deviation over value indices; 0 unless the gain is full.
        read_norm: [R]: lengths of the read keys, with the full gain the root mean square over value indices.
        write_norm: [W]: lengths of the write keys.
        causal: [R, W]: which write comes before which read.
        boundaries: the keys.
    """

    config: ModelConfig
    reads: list[Slot]
    writes: list[Slot]
    raw: Floats
    spread: Floats
    read_norm: Floats
    write_norm: Floats
    causal: Bools
    boundaries: list[BoundaryKeys]

    @cached_property
    def normalised(self) -> Floats:
        """[R, W]: `raw` by the lengths of both keys, between -1 and 1; without a full gain it is their cosine."""
        lengths_RW = np.outer(self.read_norm, self.write_norm)
        return np.divide(self.raw, lengths_RW, out=np.zeros_like(self.raw), where=lengths_RW > 0)

    @cached_property
    def write_KW(self) -> Tensor:
        """All write keys, in the order of `writes`."""
        return torch.cat([keys.write_KN for keys in self.boundaries], dim=1)

    @cached_property
    def read_rows(self) -> list[slice]:
        """The rows of each boundary."""
        return spans([keys.read_PK.shape[0] for keys in self.boundaries])

    @cached_property
    def write_columns(self) -> list[slice]:
        """The columns of each boundary."""
        return spans([keys.write_KN.shape[1] for keys in self.boundaries])

    def coupling(self, site: int, rows: slice | Tensor | None = None) -> Tensor:
        """[P, N, V]: what the reads at a boundary (or some of them) receive of each write before, per value index."""
        return couple(self.boundaries, site, self.config.head_dim, rows)

    def edges(self, text: str) -> Edges:
        """The edges that "READ <- WRITE" names (see `rmt.wires.slots`)."""
        return find_edges(text, self.reads, self.writes)

    def read_index(self, name: str) -> int:
        return int(np.flatnonzero(find(name, self.reads, "read"))[0])

    def top_sources(self, read: str, number: int = 10) -> list[tuple[str, float, float]]:
        """The writes that a read is most aligned with, for good or ill: name, normalised and raw number."""
        row = self.read_index(read)
        order = np.argsort(-np.abs(self.normalised[row]) + 2.0 * ~self.causal[row])[:number]
        return [
            (self.writes[w].name, float(self.normalised[row, w]), float(self.raw[row, w]))
            for w in order
            if self.causal[row, w]
        ]

    def blocks(self, level: Level = "cores", values: Floats | None = None) -> Blocks:
        """The root mean square of the normalised table (or of `values`) over each pair of heads or cores."""
        squares = np.where(self.causal, (self.normalised if values is None else values) ** 2, 0.0)
        reads, read_place = grouped(self.reads, level)
        writes, write_place = grouped(self.writes, level)
        total, number = np.zeros((2, len(reads), len(writes)))
        place = np.ix_(read_place, write_place)
        np.add.at(total, place, squares)
        np.add.at(number, place, self.causal)
        mean = np.divide(total, number, out=np.zeros_like(total), where=number > 0)
        return Blocks(reads, writes, np.sqrt(mean).astype(np.float32), number > 0)

    def save(self, folder: Path) -> list[Path]:
        """Write `wiring.npz` (arrays) and `wiring.csv` (one line per edge); returns both paths."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays, lines = folder / "wiring.npz", folder / "wiring.csv"
        np.savez_compressed(
            arrays,
            reads=np.array([slot.name for slot in self.reads]),
            writes=np.array([slot.name for slot in self.writes]),
            read_site=np.array([slot.site for slot in self.reads]),
            write_site=np.array([slot.site for slot in self.writes]),
            raw=self.raw,
            normalised=self.normalised,
            spread=self.spread,
            causal=self.causal,
            read_norm=self.read_norm,
            write_norm=self.write_norm,
        )
        with open(lines, "w", encoding="utf-8", newline="") as file:
            file.write("read,write,raw,normalised,spread\n")
            names = [slot.name for slot in self.writes]
            for slot, raw, normalised, spread, seen in zip(
                self.reads, self.raw, self.normalised, self.spread, self.causal, strict=True
            ):
                cells = zip(raw.tolist(), normalised.tolist(), spread.tolist(), strict=True)
                file.writelines(
                    f"{slot.name},{name},{a:.7g},{b:.6f},{c:.6g}\n"
                    for name, (a, b, c), allowed in zip(names, cells, seen.tolist(), strict=True)
                    if allowed
                )
        return [arrays, lines]


@torch.no_grad()
def wiring(model: nn.Module) -> Wiring:
    """The wiring of a model with a matrix stream.

    Args:
        model: from `rmt.build` or `rmt.load_model(...).model`, or a transformers model of ours.

    Returns:
        The table [reads, writes], raw and normalised. `save(folder)` writes it as npz and CSV.
    """
    network = find_network(model)
    config = network.config
    reads, writes = read_slots(config), write_slots(config)
    keys = [boundary_keys(boundary) for boundary in network.stream]
    seen_RW = causal(reads, writes)
    raw, spread = np.zeros((2, len(reads), len(writes)), dtype=np.float32)
    read_norm = np.zeros(len(reads), dtype=np.float32)
    row = 0
    for site, here in enumerate(keys):
        write_KN = torch.cat([part.write_KN for part in keys[: site + 1]], dim=1)
        rows, columns = slice(row, row + len(here.read_PK)), slice(0, write_KN.shape[1])
        if here.gain is not None and here.gain.ndim == 2:
            gain_K = here.gain.mean(-1)
            mean = here.read_PK * gain_K @ write_KN
            around_VPN = (here.read_PK * (here.gain.T - gain_K)[:, None]) @ write_KN
            spread[rows, columns] = around_VPN.square_().mean(0).sqrt_().cpu().numpy()
            length = (here.read_PK**2 @ (here.gain**2).mean(-1)).sqrt()
        else:
            mean, length = here.read_PK @ write_KN, here.read_PK.norm(dim=-1)
        raw[rows, columns], read_norm[rows] = mean.cpu().numpy(), length.cpu().numpy()
        row = rows.stop
    write_norm = torch.cat([part.write_KN for part in keys], dim=1).norm(dim=0).cpu().numpy().astype(np.float32)
    return Wiring(config, reads, writes, raw, spread, read_norm, write_norm, seen_RW, keys)


def find_network(model: nn.Module) -> LanguageModel:
    """The network inside a model, if its stream is a matrix."""
    network = next((part for part in model.modules() if isinstance(part, LanguageModel)), None)
    if network is None:
        raise InputError(f"wiring is of a model made by rmt.build or rmt.load_model, not of a {type(model).__name__}.")
    if network.config.stream != "matrix":
        offer = (
            " For a transformer, `rmt wiring RUN --composition` computes its composition scores instead."
            if network.config.stream == "vector"
            else ""
        )
        raise InputError(
            "wiring is for matrix streams, where reads and writes have keys; this model's stream is "
            f"{network.config.stream!r}.{offer}"
        )
    return network


def boundary_keys(boundary: nn.Module) -> BoundaryKeys:
    assert isinstance(boundary, MatrixBoundary)
    written: list[Tensor] = [boundary.store.keys_KR]
    if hasattr(boundary, "store_position"):
        written.append(boundary.store_position.keys_KR)
    kind = torch.promote_types(written[0].dtype, torch.float32)
    gain = boundary.norm.gain
    return BoundaryKeys(
        torch.cat(written, dim=1).detach().to(kind, copy=True),
        boundary.retrieve.keys_RK.detach().to(kind, copy=True),
        None if gain is None else gain.detach().to(kind, copy=True),
    )


def couple(keys: list[BoundaryKeys], site: int, head_dim: int, rows: slice | Tensor | None = None) -> Tensor:
    here = keys[site]
    read_PK = here.read_PK if rows is None else here.read_PK[rows]
    write_KN = torch.cat([part.write_KN for part in keys[: site + 1]], dim=1)
    if here.gain is None or here.gain.ndim == 1:
        c_PNV = (read_PK @ write_KN)[:, :, None].expand(-1, -1, head_dim)
        return c_PNV if here.gain is None else c_PNV * here.gain
    read_PVK = read_PK[:, None, :] * here.gain.T
    return (read_PVK @ write_KN).transpose(1, 2)


def spans(sizes: list[int]) -> list[slice]:
    ends = np.cumsum([0, *sizes]).tolist()
    return [slice(start, end) for start, end in pairwise(ends)]
