"""Figures of `rmt tune`: loss against each parameter, importances, learning-rate transfer, the coordinate check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from rmt.report.looks import BLACK as DARK
from rmt.report.looks import WHITE, mix
from rmt.report.style import (
    BLACK,
    COLOURS,
    OTHER_COLOURS,
    new_figure,
    savefig,
    stream_colour,
    stream_marker,
    stream_name,
    styled,
)

PARAMETRISATIONS = {"mup": "muP", "lecun": "standard"}

#: How parameters are called on the axes.
LABELS = {
    "lr": "learning rate",
    "alpha_in": r"$\alpha_{in}$ (embeddings)",
    "alpha_attn": r"$\alpha_{attn}$ (attention logits)",
    "alpha_out": r"$\alpha_{out}$ (output logits)",
    "sigma": r"$\sigma$ (initial std)",
}
PANEL_INCHES = (2.5, 2.9)
HIGHEST = 0.9  # the quantile of the losses up to which they are drawn; what lies above stands on the upper edge


def slices_figure(
    trials: Sequence[dict[str, Any]], space: dict[str, tuple[float, float]], stream: str, stem: Path
) -> list[Path]:
    """Every trial's loss against each of its parameters, the best marked; diverged trials as crosses on top."""
    over = [trial for trial in trials if trial["state"] in ("finished", "pruned", "diverged")]
    finished = [trial for trial in over if trial["state"] == "finished"]
    losses = np.array([trial["loss"] for trial in finished])
    best = finished[int(losses.argmin())]
    top = max(float(np.quantile(losses, HIGHEST)), best["loss"] + 1e-3)
    pad = 0.05 * (top - best["loss"])
    colour = stream_colour(stream)
    with styled():
        figure, panels = new_figure(1, len(space), (PANEL_INCHES[0] * len(space), PANEL_INCHES[1]))
        for axes, (name, (low, high)) in zip(panels, space.items(), strict=True):
            inside = [trial for trial in finished if trial["loss"] <= top]
            above = [trial for trial in over if trial not in inside]
            axes.scatter([t[name] for t in inside], [t["loss"] for t in inside], s=14, color=colour, alpha=0.55, lw=0)
            axes.scatter([t[name] for t in above], [top + pad] * len(above), s=12, marker="x", color=colour, alpha=0.5)
            axes.scatter([best[name]], [best["loss"]], s=90, marker="*", color=BLACK, zorder=3)
            axes.set_xscale("log")
            axes.set_xlim(low / 1.1, high * 1.1)
            axes.set_ylim(best["loss"] - pad, top + 2 * pad)
            axes.set_xlabel(LABELS[name])
            if axes is not panels[0]:
                axes.tick_params(labelleft=False)
        panels[0].set_ylabel("dev loss (nats per token)")
        panels[0].set_title(f"{stream_name(stream)}: {len(over)} trials, star: the best, crosses: beyond the axis")
        return savefig(figure, stem.with_name(stem.name + ".png"))


def importance_figure(shares: dict[str, float], method: str, stream: str, stem: Path) -> list[Path]:
    """A bar per parameter."""
    names = list(reversed(shares))
    with styled():
        figure, (axes,) = new_figure(size=(5.2, 2.6))
        axes.barh([LABELS[name] for name in names], [shares[name] for name in names], color=stream_colour(stream))
        axes.set_xlim(0, 1)
        axes.grid(visible=False, axis="y")
        axes.set(xlabel=f"importance ({method})", title=stream_name(stream))
        return savefig(figure, stem.with_name(stem.name + ".png"))


def transfer_figure(curves: Sequence[dict[str, Any]], stem: Path) -> list[Path]:
    """The loss against the learning rate, a line per width, a panel per stream and parametrisation."""
    panels = list(dict.fromkeys((curve["stream"], curve["init"]) for curve in curves))
    with styled():
        figure, axes_list = new_figure(1, len(panels), (3.6 * len(panels), 3.3))
        for axes, (stream, init) in zip(axes_list, panels, strict=True):
            lines = [curve for curve in curves if (curve["stream"], curve["init"]) == (stream, init)]
            for index, curve in enumerate(lines):
                rates = [float(rate) for rate in curve["losses"]]
                losses = [float(np.mean(found)) for found in curve["losses"].values()]
                colour = shade(stream_colour(stream), index, len(lines))
                axes.plot(rates, losses, color=colour, marker=stream_marker(stream), label=f"width x {curve['width']}")
                axes.scatter([curve["best_lr"]], [curve["best_loss"]], s=110, marker="*", color=colour, zorder=3)
            axes.set_xscale("log")
            axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
            axes.minorticks_off()
            axes.set(xlabel=LABELS["lr"], title=f"{stream_name(stream)}, {PARAMETRISATIONS[init]}")
            axes.legend()
        best = min(curve["best_loss"] for curve in curves)
        finite = [loss for curve in curves for found in curve["losses"].values() for loss in found if np.isfinite(loss)]
        top = float(np.quantile(finite, HIGHEST))
        for axes in axes_list:
            axes.set_ylim(best - 0.05 * (top - best), top + 0.05 * (top - best))
        axes_list[0].set_ylabel("dev loss (nats per token)")
        return savefig(figure, stem.with_name(stem.name + ".png"))


def shade(colour: str, index: int, number: int) -> str:
    """From a light shade to a dark one."""
    place = 2 * index / (number - 1) - 1 if number > 1 else 0.0
    return mix(colour, WHITE, -0.5 * place) if place < 0 else mix(colour, DARK, 0.5 * place)


def coordinates_figure(rows: Sequence[dict[str, Any]], steps: int, stem: Path) -> list[Path]:
    """Sizes inside the model against its width: after the steps (dotted: before), and how far they moved."""
    streams = list(dict.fromkeys(row["stream"] for row in rows))
    quantities = list(dict.fromkeys(row["quantity"] for row in rows))
    colours = dict(zip(quantities, (*COLOURS.values(), *OTHER_COLOURS), strict=False))
    columns = [(moment, init) for moment in ("end", "change") for init in PARAMETRISATIONS]
    with styled():
        figure, panels = new_figure(len(streams), len(columns), (2.9 * len(columns), 2.6 * len(streams) + 0.7))
        for index, axes in enumerate(panels):
            stream, (moment, init) = streams[index // len(columns)], columns[index % len(columns)]
            for row in rows:
                if (row["stream"], row["init"]) != (stream, init):
                    continue
                widths, colour = [int(width) for width in row["end"]], colours[row["quantity"]]
                axes.plot(widths, list(row[moment].values()), color=colour, marker="o", markersize=3.5, linewidth=1.5)
                if moment == "end":
                    axes.plot(widths, list(row["start"].values()), color=colour, linestyle=":", linewidth=1.2)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            shared = [row for row in rows if row["stream"] == stream]  # muP and standard, for the eye to compare
            drawn = ("start", "end") if moment == "end" else ("change",)
            plain_logarithmic(axes, [size for row in shared for one in drawn for size in row[one].values()])
            if index % 2:
                axes.tick_params(labelleft=False)
            if index < len(columns):
                what = f"after {steps} steps (dotted: 0)" if moment == "end" else f"change in {steps} steps"
                axes.set_title(f"{PARAMETRISATIONS[init]}: {what}", fontsize=10)
            if index % len(columns) == 0:
                axes.set_ylabel(f"{stream_name(stream)}\nmean absolute value")
            if index >= len(panels) - len(columns):
                axes.set_xlabel("width, relative to the base")
        handles = [Line2D([], [], color=colours[name], label=name) for name in quantities]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
        return savefig(figure, stem.with_name(stem.name + ".png"))


def plain_logarithmic(axes: Axes, sizes: Sequence[float]) -> None:
    """A logarithmic vertical axis around these sizes, with 0.2, 0.5, 1, 2, 5 written out."""
    axes.set_yscale("log")
    axes.set_ylim(min(size for size in sizes if size > 0) / 1.3, max(sizes) * 1.3)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
