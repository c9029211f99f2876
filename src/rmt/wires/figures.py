"""The wiring as figures for papers: the map of a model, its load, what cuts did, a transformer's composition scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rmt.report.style import BLUE, GREY, VERMILION, new_figure, savefig, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from rmt.wires.composition import Composition
    from rmt.wires.findings import Findings

MOST_LABELS = 26


def draw_map(findings: Findings, path: Path) -> list[Path]:
    """The map at the level of cores, beside it all slots (PNG, and SVG beside it)."""
    table = findings.table
    blocks = table.blocks("cores")
    with styled():
        figure, (left, right) = new_figure(1, 2, size=(11.5, 5.2))
        values = np.where(blocks.causal, blocks.values, np.nan)
        random = table.config.key_dim**-0.5
        names = [short(name) for name in blocks.reads], [short(name) for name in blocks.writes]
        image = heat(left, values, *names, cmap="RdBu_r", vmin=0, vmax=2 * random)
        figure.colorbar(image, ax=left, shrink=0.8, label=f"fit of keys (unrelated keys: {random:.2f})")
        left.set(title=f"{findings.name}: layers", xlabel="written by", ylabel="read by")
        values = np.where(table.causal, table.normalised, np.nan)
        limit = float(np.nanmax(np.abs(values))) or 1.0
        image = right.imshow(values, aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
        figure.colorbar(image, ax=right, shrink=0.8, label="normalised")
        core_ticks(right, [slot.core for slot in table.reads], "y")
        core_ticks(right, [slot.core for slot in table.writes], "x")
        right.set(title="every read against every write", xlabel="write", ylabel="read")
        right.grid(False)
        return savefig(figure, path)


def draw_load(findings: Findings, path: Path) -> list[Path]:
    """Interference and effective rank of the write keys by depth, beside those of random keys."""
    rows = findings.load
    places = range(len(rows))
    with styled():
        figure, (left, right) = new_figure(1, 2, size=(9.6, 3.6))
        for axes, what in ((left, "interference"), (right, "effective_rank")):
            axes.plot(places, [getattr(row, what) for row in rows], color=BLUE, marker="o", label=findings.name)
            random = [getattr(row, f"{what}_random") for row in rows]
            axes.plot(places, random, color=GREY, linestyle="--", label="random keys")
            axes.set_xticks(places, [short(row.core) for row in rows], rotation=90, fontsize=8)
            axes.set(xlabel="core that reads", ylim=(0, None))
        least = [row.interference_least for row in rows]
        left.plot(places, least, color=GREY, linestyle=":", label="least possible")
        left.set_title("Interference: mean squared cosine of write keys")
        right.set_title("Effective rank of write keys")
        left.legend()
        return savefig(figure, path)


def draw_effects(findings: Findings, path: Path) -> list[Path]:
    """What cutting edges does to the loss, largest first."""
    effects = findings.ranking.effects if findings.ranking is not None else findings.cuts[2] if findings.cuts else []
    with styled():
        figure, (axes,) = new_figure(size=(6.4, 1.0 + 0.24 * len(effects)))
        changes = [effect.change for effect in effects]
        axes.barh(range(len(effects)), changes, color=[BLUE if change >= 0 else VERMILION for change in changes])
        axes.set_yticks(range(len(effects)), [effect.edges.replace("<-", "←") for effect in effects], fontsize=8)
        axes.invert_yaxis()
        axes.set_xscale("symlog", linthresh=0.01)
        axes.set(title=f"{findings.name}: loss change when an edge is cut", xlabel="nats per token")
        axes.grid(axis="y", visible=False)
        return savefig(figure, path)


def heat(axes: Axes, values: np.ndarray, rows: Sequence[str], columns: Sequence[str], **colours: Any) -> Any:
    axes.grid(False)
    image = axes.imshow(values, aspect="auto", interpolation="nearest", **colours)
    for set_ticks, names, turn in ((axes.set_yticks, rows, 0), (axes.set_xticks, columns, 90)):
        step = max(1, -(-len(names) // MOST_LABELS))
        set_ticks(range(0, len(names), step), list(names)[::step], fontsize=8, rotation=turn)
    return image


def core_ticks(axes: Axes, cores: Sequence[str], axis: str) -> None:
    """One label in the middle of each core's slots."""
    names = list(dict.fromkeys(cores))
    places = [float(np.mean([i for i, core in enumerate(cores) if core == name])) for name in names]
    step = max(1, -(-len(names) // MOST_LABELS))
    labels = [short(name) for name in names][::step]
    if axis == "x":
        axes.set_xticks(places[::step], labels, fontsize=8, rotation=90)
    else:
        axes.set_yticks(places[::step], labels, fontsize=8)


def short(core: str) -> str:
    """`layer3.attention` as `3 attn`."""
    return core.removeprefix("layer").replace(".attention", " attn").replace(".ff", " ff").replace("unembedding", "out")


def draw_composition(found: Composition, path: Path, name: str) -> list[Path]:
    """Composition scores, one panel per input of the later head."""
    scores = torch.where(found.scores > 0, found.scores, float("nan")).numpy()
    with styled():
        figure, panels = new_figure(1, 3, size=(12, 4.2))
        for place, (axes, role) in enumerate(zip(panels, ("query", "key", "value"), strict=True)):
            rows = [read.removesuffix(f".{role}").removeprefix("layer") for read in found.reads[place::3]]
            columns = [write.removeprefix("layer") for write in found.writes]
            top = float(np.nanmax(scores)) if np.isfinite(scores).any() else 1.0
            image = heat(axes, scores[place::3], rows, columns, cmap="viridis", vmin=0, vmax=top)
            axes.set(title=f"{name}: {role} composition", xlabel="written by head", ylabel="read by head")
        figure.colorbar(image, ax=panels[-1], shrink=0.8)
        return savefig(figure, path)
