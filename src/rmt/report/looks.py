"""How a group of runs looks in every figure: one hue per stream, shades and dashes for groups of the same stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rmt.report.runs import Curve, Group, dev_curve, train_curve
from rmt.report.style import stream_colour, stream_marker

#: Dashes as plotly and as matplotlib name them.
DASHES = (("solid", "-"), ("dash", "--"), ("dashdot", "-."), ("dot", ":"))
WHITE, BLACK = (255, 255, 255), (0, 0, 0)
DARK_LIFT = 0.35  # towards white on a dark page, for the same contrast


@dataclass(frozen=True)
class Look:
    """Colours on a light and on a dark ground, the dash in plotly's and in matplotlib's name, and the marker."""

    light: str
    dark: str
    dash: str
    linestyle: str
    marker: str


def looks(groups: Sequence[Group]) -> list[Look]:
    """One look per group. Groups of one stream run from a light to a dark shade, as a sweep's setting does."""
    streams = [group.stream for group in groups]
    result = []
    for index, stream in enumerate(streams):
        rank, number = streams[:index].count(stream), streams.count(stream)
        colour = stream_colour(stream)
        if number > 1:
            place = 2 * rank / (number - 1) - 1  # -1 .. 1
            colour = mix(colour, WHITE, -0.45 * place) if place < 0 else mix(colour, BLACK, 0.45 * place)
        dash, linestyle = DASHES[rank % len(DASHES)]
        result.append(Look(colour, mix(colour, WHITE, DARK_LIFT), dash, linestyle, stream_marker(stream)))
    return result


def mix(colour: str, other: tuple[int, int, int], share: float) -> str:
    """A `#rrggbb` colour moved towards another."""
    own = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(own, other, strict=True))


def late_range(groups: Sequence[Group], start: float = 0.15) -> tuple[float, float] | None:
    """The range of losses after the first steps of each run: the first steps would flatten all that matters later."""
    low, high = [], []
    for group in groups:
        for curve in (dev_curve(group), train_curve(group)):
            late = _late(curve, start)
            if late.any():
                spread = 0.0 if curve.deviation is None else curve.deviation[late]
                low.append(np.nanmin(curve.mean[late] - spread))
                high.append(np.nanmax(curve.mean[late] + spread))
    if not low or not np.isfinite([*low, *high]).all():
        return None
    pad = 0.04 * (max(high) - min(low)) or 0.1
    return float(min(low) - pad), float(max(high) + pad)


def _late(curve: Curve, start: float) -> np.ndarray:
    if not len(curve.step):
        return np.zeros(0, dtype=bool)
    return (curve.step >= start * curve.step[-1]) & np.isfinite(curve.mean)
