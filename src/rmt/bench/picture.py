"""One training step as a bar for each model: where its time goes. Drawn from a result file, measured or kept."""

import json
from pathlib import Path
from typing import Any

from rmt.bench.profile import PARTS
from rmt.errors import InputError
from rmt.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW, new_figure, savefig, styled

NAMES = {"stock": "stock transformer", "vector": "our transformer"}
COLOURS = {
    "gemm": SKY,
    "attention": ORANGE,
    "boundary": BLUE,
    "norm": PURPLE,
    "activation": GREEN,
    "loss": YELLOW,
    "clipping": "#7F5539",
    "optimizer": VERMILION,
    "other": GREY,
}
LABELS = {"gemm": "matrix products", "boundary": "matrix stream", "loss": "loss (ours: with logits)"}


def read_result(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"bench: cannot read {path}: {error.strerror}.") from None
    except ValueError:
        raise InputError(f"bench: {path} is not JSON: give a file that `rmt bench --json FILE` wrote.") from None
    if not isinstance(result, dict) or "targets" not in result:
        raise InputError(f"bench: {path} is not a result: give a file that `rmt bench --json FILE` wrote.")
    return result


def scaled(seconds: dict[str, float], row: dict[str, Any]) -> dict[str, float]:
    """The shares of one profiled step, of the row's median time: a single step may have been disturbed."""
    factor = row["seconds"]["median"] / sum(seconds.values())
    return {kind: factor * value for kind, value in seconds.items()}


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """Draw the profiles of the step to `path` (PNG, and SVG beside it)."""
    profiles = result.get("step", {}).get("profile")
    if not profiles:
        raise InputError("bench: this result has no profile of a step: measure with `--what step`.")
    profiles = {row: scaled(seconds, result["step"]["rows"][row]) for row, seconds in profiles.items()}
    with styled():
        figure, (axes,) = new_figure(size=(8.6, 0.75 * len(profiles) + 1.9))
        rows = list(reversed(profiles))
        left = [0.0] * len(rows)
        for part in sorted(PARTS, key=list(COLOURS).index):
            widths = [profiles[row][part] for row in rows]
            if max(widths) < 0.002 * max(sum(profile.values()) for profile in profiles.values()):
                continue
            axes.barh(
                range(len(rows)), widths, left=left, color=COLOURS[part], label=LABELS.get(part, part), height=0.6
            )
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, total in enumerate(left):
            axes.text(total, place, f" {total:.2f} s", va="center")
        axes.set_yticks(range(len(rows)), [NAMES.get(row, f"RMT, {row}") for row in rows])
        shape = result["shape"]
        axes.set(
            title=f"One training step, {shape['name']}, {shape['batch']} x {shape['context']} tokens",
            xlabel="seconds",
            xlim=(0, 1.1 * max(left)),
        )
        axes.grid(visible=False, axis="y")
        figure.legend(loc="outside lower center", ncols=5)
        return savefig(figure, path)
