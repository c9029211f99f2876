"""Figures of the sweeps, from their analysed results (plain data): no run directory is needed to draw them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from rmt.report.style import GREY, new_figure, savefig, stream_colour, stream_marker, stream_name, styled


def residual_size_figure(result: dict[str, Any], out_stem: Path) -> list[Path]:
    """Dev loss against the size of the residual stream: the paper's figure 6, to `out_stem` with .png and .svg.

    Pale points are single seeds; the line joins their means, with 95 % intervals where there are several.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    models = [item for item in result["models"] if item["stream"] == "matrix"]
    transformer = next((item for item in result["models"] if item["stream"] == "vector"), None)
    sizes = [item["stream_size"] for item in models]
    means = [item["dev_loss"] for item in models]
    with styled():
        figure, (axes,) = new_figure(size=(6.4, 4.0))
        colour = stream_colour("matrix")
        style: Any = {"color": colour, "marker": stream_marker("matrix"), "label": stream_name("matrix"), "zorder": 3}
        if all(item["dev_loss_interval"] for item in models):
            margins = [item["dev_loss_interval"][1] - item["dev_loss"] for item in models]
            axes.errorbar(sizes, means, yerr=margins, capsize=3, elinewidth=1.2, **style)
            for item in models:
                axes.plot([item["stream_size"]] * item["seeds"], item["dev_losses"], ".", color=colour, alpha=0.35)
        else:
            axes.plot(sizes, means, **style)
        if transformer:
            draw_transformer(axes, transformer)
        if any(item["paper_loss"] is not None for item in models):
            known = [item for item in models if item["paper_loss"] is not None]
            x, y = [item["stream_size"] for item in known], [item["paper_loss"] for item in known]
            axes.plot(x, y, color=GREY, marker="x", linestyle="--", linewidth=1.2, label="RMT, the paper")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set(xlabel="residual stream size (numbers per token)", ylabel="dev loss (nats per token)")
        axes.legend()
        return savefig(figure, out_stem.with_name(out_stem.name + ".png"))


def draw_transformer(axes: Any, item: dict[str, Any]) -> None:
    """Its loss as a line across, with a point at the size of its own stream."""
    colour = stream_colour("vector")
    axes.axhline(item["dev_loss"], color=colour, linestyle="--", linewidth=1.4)
    if item["dev_loss_interval"]:
        axes.axhspan(*item["dev_loss_interval"], color=colour, alpha=0.12, linewidth=0)
    label = f"{stream_name('vector')} (stream {item['stream_size']:,})"
    axes.plot([item["stream_size"]], [item["dev_loss"]], stream_marker("vector"), color=colour, label=label, zorder=3)


#: Panels of the scaling laws: a field of a point, and the title of its axis.
SCALING_PANELS = {
    "flops": "training FLOPs",
    "non_embedding_parameters": "non-embedding parameters",
    "tokens": "training tokens",
}


def scaling_laws_figure(result: dict[str, Any], out_stem: Path) -> list[Path]:
    """Loss against FLOPs, parameters and tokens with the fitted laws, to `out_stem` with .png and .svg.

    Strong points and lines: the runs at the ratio of tokens to parameters at which the laws were fitted. Pale points:
    other ratios.
    """
    from matplotlib.lines import Line2D

    with styled():
        figure, panels = new_figure(1, len(SCALING_PANELS), size=(10.8, 3.5))
        for axes, (field, title) in zip(panels, SCALING_PANELS.items(), strict=True):
            for stream in ("matrix", "vector"):
                draw_law(axes, result, field, stream)
            logarithmic(axes)
            axes.set_xlabel(title)
        panels[0].set_ylabel("dev loss (nats per token)")
        handles = [
            Line2D([], [], color=stream_colour(name), marker=stream_marker(name), label=stream_name(name))
            for name in ("matrix", "vector")
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=2)
        return savefig(figure, out_stem.with_name(out_stem.name + ".png"))


def draw_law(axes: Any, result: dict[str, Any], field: str, stream: str) -> None:
    style: Any = {"color": stream_colour(stream), "marker": stream_marker(stream), "linestyle": "none"}
    for is_main in (False, True):
        points = [p for p in result["points"] if p["stream"] == stream and (p["ratio"] == result["ratio"]) == is_main]
        x, y = [p[field] for p in points], [p["dev_loss"] for p in points]
        axes.plot(x, y, **style, alpha=1.0 if is_main else 0.3, markersize=5 if is_main else 4)
        if is_main and field in result["laws"]:
            law = result["laws"][field][stream]
            line = np.geomspace(min(x), max(x), 50)
            axes.plot(line, law["E"] + law["A"] * line ** -law["exponent"], color=stream_colour(stream), linewidth=1.4)


def logarithmic(axes: Any) -> None:
    """A logarithmic axis with few labels, also where it spans little more than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    subs = (1.0,) if high / low > 300 else (1.0, 3.0)

    def label(value: float, _: int) -> str:
        exponent = math.floor(math.log10(value) + 1e-9)
        digit = round(value / 10.0**exponent)
        return f"$10^{{{exponent}}}$" if digit == 1 else f"${digit}\\cdot 10^{{{exponent}}}$"

    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(label))
