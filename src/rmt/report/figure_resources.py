"""Parameters and FLOPs against the size of the residual stream: the paper's Figure 1, from exact counts.

All dimensions are GPT2-medium's. The transformer's stream is widened through `width`, with heads and feed-forward
neurons held fixed; the RMT's through `key_dim`, with head_dim fixed at 64.
"""

from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter, MultipleLocator

from rmt.config import ModelConfig, preset
from rmt.report.style import new_figure, savefig, stream_colour, stream_marker, stream_name, styled
from rmt.theory.accounting import Count, count

SIZES = tuple(range(512, 8193, 512))


def resources(sizes: tuple[int, ...] = SIZES) -> dict[str, list[Count]]:
    """The counts behind the figure, for each stream and stream size."""
    return {stream: [count(resized(stream, size)) for size in sizes] for stream in ("vector", "matrix")}


def resized(stream: str, size: int) -> ModelConfig:
    """GPT2-medium with a residual stream of `size` numbers per token and nothing else changed."""
    if stream == "vector":
        return preset("transformer-405m").replace(width=size)
    medium = preset("rmt-305m")
    return medium.replace(key_dim=size // medium.head_dim)


def draw_resources(path: Path) -> list[Path]:
    """Draw the figure to `path` (PNG, and SVG beside it)."""
    with styled():
        figure, (left, right) = new_figure(1, 2, size=(9.6, 3.9))
        for stream, counts in resources().items():
            sizes = [counted.config.stream_size for counted in counts]
            style: Any = {"color": stream_colour(stream), "marker": stream_marker(stream), "label": stream_name(stream)}
            left.plot(sizes, [counted.params / 1e6 for counted in counts], **style)
            right.plot(sizes, [counted.flops.per_example / 1e12 for counted in counts], **style)
        left.set(title="Parameters (millions)")
        right.set(title="Forward FLOPs per example (TFLOPs)")
        left.legend()
        for axes in (left, right):
            axes.set(xlabel="residual stream size (numbers per token)", ylim=(0, None), xlim=(0, SIZES[-1] * 1.03))
            axes.xaxis.set_major_locator(MultipleLocator(2048))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        return savefig(figure, path)
