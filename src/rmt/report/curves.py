"""Loss curves as figures: one run's, and several runs' against tokens, training FLOPs and seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rmt.report.looks import Look, late_range, looks
from rmt.report.runs import Group, dev_curve, find_runs, group_runs, load_run, load_runs, train_curve
from rmt.report.style import new_figure, savefig, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What a loss can be paid in: a field of `Curve`, and the title of its axis.
PRICES = {"tokens": "training tokens", "flops": "training FLOPs", "seconds": "training time"}
TIME_UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
FIRST_SHARE = 0.1  # the logarithmic axes start at this share of the run
LEGEND_CHARACTERS = 120  # that fit above three panels
PANEL_INCHES = (3.6, 3.3)


def loss_curve(run: Path) -> Path:
    """Draw one run's training loss and its dev evaluations to `loss.png` in the run directory."""
    group = group_runs([load_run(run)])
    with styled():
        figure, (axes,) = new_figure()
        factor, title = unit(group, "tokens")
        draw(axes, group[0], looks(group)[0], "tokens", factor)
        limit_loss(axes, group)
        axes.set_xlim(left=0)
        axes.set(xlabel=title, ylabel="cross-entropy (nats per token)", title=run.resolve().name)
        axes.legend(handles=line_kinds(axes))
        path = run / "loss.png"
        figure.savefig(path, metadata={"Software": None})
    return path


def comparison_figure(runs: Sequence[Path], out_stem: Path) -> list[Path]:
    """Draw the losses of several runs against tokens, FLOPs and seconds, to `out_stem` with .png and .svg.

    Args:
        runs: run directories, or folders of them. Runs that differ only by seed become one curve with a band of one
            standard deviation.
        out_stem: the files' common path, without an ending.
    """
    groups = group_runs(load_runs(find_runs(runs)))
    with styled():
        figure, panels = new_figure(1, len(PRICES), (PANEL_INCHES[0] * len(PRICES), PANEL_INCHES[1]))
        styles = looks(groups)
        for axes, price in zip(panels, PRICES, strict=True):
            if axes is not panels[0]:
                axes.sharey(panels[0])
                axes.tick_params(labelleft=False)
            factor, title = unit(groups, price)
            for group, look in zip(groups, styles, strict=True):
                draw(axes, group, look, price, factor, with_train=len(groups) <= 2)
            logarithmic(axes, groups, price, factor)
            axes.set_xlabel(title)
        panels[0].set_ylabel("cross-entropy (nats per token)")
        limit_loss(panels[0], groups)
        add_legend(figure, groups, styles)
        return savefig(figure, out_stem.with_name(out_stem.name + ".png"))


def draw(axes: Axes, group: Group, look: Look, price: str, factor: float, *, with_train: bool = True) -> None:
    """The training loss as a thin pale line, the dev loss as a strong one with its points.

    Args:
        axes: where to draw.
        group: whose losses.
        look: in which colour and dash.
        price: against what, a key of `PRICES`.
        factor: the unit of that axis.
        with_train: draw the training loss too; it is always drawn where there is no dev loss.
    """
    train, dev = train_curve(group), dev_curve(group)
    colour, has_dev = look.light, bool(len(dev.step))
    if with_train or not has_dev:
        alpha = 0.45 if has_dev else 1.0
        axes.plot(getattr(train, price) / factor, train.mean, color=colour, alpha=alpha, linewidth=1.0)
    if has_dev:
        x = getattr(dev, price) / factor
        axes.plot(
            x, dev.mean, color=colour, linestyle=look.linestyle, linewidth=1.6, marker=look.marker, markersize=3.5
        )
        if dev.deviation is not None:
            low, high = dev.mean - dev.deviation, dev.mean + dev.deviation
            axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def unit(groups: Sequence[Group], price: str) -> tuple[float, str]:
    """What to divide a price by so that the axis has small numbers, and the axis's title with that unit."""
    largest = largest_price(groups, price)
    if price == "seconds":
        factor, name = next(((f, n) for f, n in TIME_UNITS if largest >= 2 * f), TIME_UNITS[-1])
        return factor, f"{PRICES[price]} ({name})"
    exponent = 3 * int(math.log10(largest) // 3) if largest >= 1 else 0
    names = {0: "", 3: " (thousands)", 6: " (millions)", 9: " (billions)"}
    is_named = price == "tokens" and exponent in names
    return 10.0**exponent, PRICES[price] + (names[exponent] if is_named else f" ($10^{{{exponent}}}$)")


def largest_price(groups: Sequence[Group], price: str) -> float:
    ends = [getattr(train_curve(group), price)[-1:] for group in groups]
    return float(np.nanmax(np.concatenate([*ends, [0.0]])))


def logarithmic(axes: Axes, groups: Sequence[Group], price: str, factor: float) -> None:
    """Equal ratios at equal distances: what one stream saves is a horizontal shift."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    end = largest_price(groups, price) / factor
    if end <= 0:
        return
    axes.set_xscale("log")
    axes.set_xlim(FIRST_SHARE * end, 1.05 * end)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def limit_loss(axes: Axes, groups: Sequence[Group]) -> None:
    """Show the range of losses in which runs differ."""
    if bounds := late_range(groups):
        axes.set_ylim(*bounds)


def line_kinds(axes: Axes) -> list:
    """Legend entries of one run: which line is which."""
    lines = axes.get_lines()
    for line, name in zip(lines, ("train (running mean)", "dev"), strict=False):
        line.set_label(name)
    return list(lines)


def add_legend(figure: Figure, groups: Sequence[Group], styles: Sequence[Look]) -> None:
    """One legend above the panels: the groups, then what a pale and a strong line mean."""
    from matplotlib.lines import Line2D

    handles = []
    for group, look in zip(groups, styles, strict=True):
        seeds = f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else ""
        style = {
            "color": look.light,
            "linestyle": look.linestyle,
            "linewidth": 1.6,
            "marker": look.marker,
            "markersize": 3.5,
        }
        handles.append(Line2D([], [], label=group.label + seeds, **style))  # type: ignore[arg-type]
    if len(groups) <= 2 and any(len(dev_curve(group).step) for group in groups):
        handles.append(Line2D([], [], color="0.35", marker="o", markersize=3.5, linewidth=1.6, label="dev"))
        handles.append(Line2D([], [], color="0.35", alpha=0.5, linewidth=1.0, label="train"))
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), LEGEND_CHARACTERS // (longest + 6)))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns)
