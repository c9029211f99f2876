"""How every figure of the product looks, so that a reader knows a stream by its colour on every page.

Colours are from the Okabe-Ito palette, which colour-blind readers can tell apart; each stream also has its own marker,
so that figures survive black-and-white print. `savefig` writes PNG and SVG with the same content each time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rmt.errors import InputError
from rmt.streams import STREAMS

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, YELLOW, BLACK, GREY = "#E69F00", "#56B4E9", "#F0E442", "#222222", "#8A8A8A"

NAMES = {"matrix": "RMT", "vector": "transformer"}
COLOURS = {
    "matrix": BLUE,
    "vector": VERMILION,
    "highway": GREEN,
    "depthwise_lstm": PURPLE,
    "aggregation": ORANGE,
    "hyper": SKY,
}
MARKERS = {"matrix": "o", "vector": "s"}
OTHER_COLOURS = (BLACK, GREY, "#7F5539", "#6A4C93", "#3A5A40")
OTHER_MARKERS = "^Dv<>Pp*"

SETTINGS: Any = {
    "figure.dpi": 120,
    "savefig.dpi": 200,
    "savefig.bbox": "tight",
    "svg.hashsalt": "rmt",  # the same figure is the same file
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.0,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw inside `with styled():` and leave the user's matplotlib settings alone."""
    with matplotlib.rc_context(SETTINGS):
        yield


def new_figure(rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.4, 4.0)) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row, without pyplot: nothing stays open, no window is needed."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def stream_name(stream: str) -> str:
    return NAMES.get(stream, stream.replace("_", " "))


def stream_colour(stream: str) -> str:
    """The colour of a stream, the same in every figure."""
    if stream in COLOURS:
        return COLOURS[stream]
    return OTHER_COLOURS[others().index(stream) % len(OTHER_COLOURS)] if stream in others() else GREY


def stream_marker(stream: str) -> str:
    if stream in MARKERS:
        return MARKERS[stream]
    known = [name for name in STREAMS if name not in MARKERS]
    return OTHER_MARKERS[known.index(stream) % len(OTHER_MARKERS)] if stream in known else "."


def others() -> list[str]:
    return [name for name in STREAMS if name not in COLOURS]


def savefig(figure: Figure, path: Path | str) -> list[Path]:
    """Write a figure as PNG and as SVG beside it; returns both paths. `path` may end in .png, .svg or nothing."""
    path = Path(path)
    if path.suffix not in ("", ".png", ".svg"):
        raise InputError(f"cannot draw {path}: figures are .png and .svg files.")
    png, svg = path.with_suffix(".png"), path.with_suffix(".svg")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with styled():
            figure.savefig(png, metadata={"Software": None})
            figure.savefig(svg, metadata={"Date": None, "Creator": None})
    except OSError as error:
        raise InputError(f"cannot write {png}: {error.strerror}.") from None
    return [png, svg]
