"""Draws docs/images/memory.png and .svg: what it means to store two vectors in a memory and to retrieve one of them.

The numbers in the picture are real: the keys are orthonormal, so the vector that comes out is the one that went in.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from rmt.report.style import BLACK, BLUE, GREEN, GREY, PURPLE, VERMILION, new_figure, savefig, styled

CELL = 0.34
SHADES = LinearSegmentedColormap.from_list("shades", [VERMILION, "#FFFFFF", BLUE])


def grid(axes: Axes, values: np.ndarray, left: float, top: float, edge: str, label: str, below: str = "") -> None:
    """A matrix of coloured cells with a coloured frame, a label above it and its shape below."""
    rows, columns = values.shape
    for row in range(rows):
        for column in range(columns):
            corner = (left + column * CELL, top - (row + 1) * CELL)
            colour = SHADES(0.5 + 0.5 * float(np.clip(values[row, column], -1, 1)))
            axes.add_patch(_box(corner, CELL, CELL, facecolor=colour, edgecolor="#BBBBBB", linewidth=0.6))
    axes.add_patch(_box((left, top - rows * CELL), columns * CELL, rows * CELL, facecolor="none", edgecolor=edge))
    middle = left + columns * CELL / 2
    axes.text(middle, top + 0.1, label, ha="center", va="bottom", color=edge, fontsize=10, fontweight="bold")
    axes.text(middle, top - rows * CELL - 0.1, below, ha="center", va="top", color=GREY, fontsize=8.5)


def _box(corner, width, height, linewidth=1.8, **style):
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, linewidth=linewidth, **style)


def sign(axes: Axes, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=15, color=BLACK)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops=dict(arrowstyle="-|>", color=BLACK, linewidth=1.4))


def draw(path: Path) -> list[Path]:
    keys = np.array([[0.5, 0.5, 0.5, 0.5], [0.5, -0.5, 0.5, -0.5]])  # orthonormal
    data = np.array([[0.9, -0.6, 0.2, 1.0, -0.9, 0.4], [-0.3, 0.8, -1.0, 0.5, 0.7, -0.8]])
    memory = sum(np.outer(key, vector) for key, vector in zip(keys, data, strict=True))
    with styled():
        figure, (axes,) = new_figure(size=(11.4, 4.4))
        axes.set(xlim=(0, 13.2), ylim=(-0.1, 5.0), aspect="equal")
        axes.axis("off")
        axes.text(0.1, 4.9, "store", fontsize=13, fontweight="bold", va="top")
        axes.text(8.6, 4.9, "retrieve", fontsize=13, fontweight="bold", va="top")
        for index, (top, colour) in enumerate(((4.0, PURPLE), (1.75, GREEN))):
            key, vector = keys[index][:, None], data[index][None]
            grid(axes, key, 0.35, top, colour, f"key $w_{index + 1}$", "$D_k$" if index else "")
            sign(axes, 1.05, top - 2 * CELL, "⊗")
            grid(axes, vector, 1.4, top - 1.5 * CELL, colour, f"data $d_{index + 1}$", "$D_v$" if index else "")
            arrow(axes, (3.6, top - 2 * CELL), (5.2, 2.42 - 0.4 * index))
        axes.text(4.75, 3.0, "add", ha="center", fontsize=9.5, color=GREY)
        grid(axes, memory, 5.35, 2.9, BLACK, "memory $X$ of one token", "$D_k \\times D_v$")
        axes.text(6.37, 0.85, "$X = w_1 \\otimes d_1 + w_2 \\otimes d_2$", ha="center", fontsize=10.5)
        grid(axes, keys[:1].T, 8.75, 2.9, PURPLE, "key $r$", "$D_k$")
        arrow(axes, (7.55, 2.9 - 2 * CELL), (8.6, 2.9 - 2 * CELL))
        arrow(axes, (9.25, 2.9 - 2 * CELL), (10.3, 2.9 - 2 * CELL))
        grid(axes, keys[:1] @ memory, 10.45, 2.9 - 1.5 * CELL, PURPLE, "data $r \\cdot X$", "$D_v$")
        axes.text(10.9, 0.85, "with $r = w_1$: out comes $d_1$", ha="center", fontsize=10.5)
        return savefig(figure, path)


if __name__ == "__main__":
    for file in draw(Path(__file__).with_name("memory")):
        print(file.name)
