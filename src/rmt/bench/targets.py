"""What is asked of the figures: each target, where its figure is found in a result, and the judgement.

A target is asked of one shape with all its layers; for other shapes the figure is shown and not judged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rmt.bench.memory import POLICIES, named
from rmt.bench.step import ONE_SEQUENCE

Result = dict[str, Any]

#: Seconds of one step on 1 x 512 tokens of the authors' JAX code for rmt-134m, on the CPU of benchmarks/results.
AUTHORS_SECONDS = 5.7


@dataclass(frozen=True)
class Target:
    """`find` returns the figure, or None where the run has not measured it."""

    figure: str
    part: str
    shape: str
    bound: float
    find: Callable[[Result], float | None]
    form: Literal["ratio", "percent", "more", "times"] = "ratio"
    at_least: bool = False

    def judge(self, result: Result) -> dict[str, Any]:
        try:
            value = self.find(result)
        except KeyError:
            value = None
        shape = result["shape"]
        asked = shape["name"] == self.shape and result["all_layers"]
        met = None
        if value is not None and asked:
            met = value >= self.bound if self.at_least else value <= self.bound
        return {
            "figure": self.figure,
            "part": self.part,
            "asked_of": self.shape,
            "bound": self.bound,
            "at_least": self.at_least,
            "form": self.form,
            "value": value,
            "met": met,
        }


def ratio(part: str, row: str, base: str) -> Callable[[Result], float | None]:
    return lambda result: result[part]["rows"][row]["ratios"][base]["median"]


def medium_step(result: Result) -> float | None:
    return ratio("step", "native", "stock")(result) if result["shape"]["name"] == "medium" else None


def share_of_peak(result: Result) -> float | None:
    return result["step"]["share_of_gemm_peak"]["native"]["median"]


def wider_step(result: Result) -> float | None:
    narrow = result["shape"]["key_dim"]
    return result["keydim"]["rows"][str(2 * narrow)]["ratios"][str(narrow)]["median"] - 1


def wider_memory(times: int) -> Callable[[Result], float | None]:
    def find(result: Result) -> float | None:
        rows, wide = result["memory"]["rows"], times * result["shape"]["key_dim"]
        return rows[f"key_dim {wide}"]["measured"] / rows[result["best"]]["measured"] - 1

    return find


def memory_ratio(result: Result) -> float | None:
    rows = result["memory"]["rows"]
    return rows[result["best"]]["measured"] / rows["stock"]["measured"]


def memory_error(result: Result) -> float | None:
    """Of the prediction, the largest over all recompute policies of both streams."""
    rows = result["memory"]["rows"]
    names = [named(row, policy) for row in (result["best"], "vector") for policy in POLICIES]
    return max(abs(rows[name]["predicted / measured"] - 1) for name in names if name in rows)


def faster_than_the_authors(result: Result) -> float | None:
    # Their figure is the wall-clock time of one model.
    if result["shape"]["name"] != "small" or not result["all_layers"] or result["step"]["how"]["clock"] != "wall":
        return None
    return AUTHORS_SECONDS / result["step"]["rows"][ONE_SEQUENCE]["seconds"]["median"]


TARGETS = (
    Target("RMT, portable / stock, layers", "stack", "small", 0.82, ratio("stack", "portable", "stock")),
    Target("RMT, native / stock, layers", "stack", "small", 0.70, ratio("stack", "native", "stock")),
    Target("RMT / our own transformer, layers", "stack", "small", 0.76, ratio("stack", "native", "vector")),
    Target("RMT / stock, whole step", "step", "small", 0.76, ratio("step", "native", "stock")),
    Target("RMT / stock, whole step", "step", "medium", 0.72, medium_step),
    Target("share of GEMM peak, whole step", "step", "small", 0.85, share_of_peak, "percent", at_least=True),
    Target("step time when key_dim doubles", "keydim", "small", 0.06, wider_step, "more"),
    Target("peak memory when key_dim doubles", "memory", "small", 0.06, wider_memory(2), "more"),
    Target("peak memory at four times key_dim", "memory", "small", 0.12, wider_memory(4), "more"),
    Target("peak memory, RMT / stock", "memory", "small", 0.85, memory_ratio),
    Target("peak memory predicted, largest error", "memory", "small", 0.10, memory_error, "percent"),
    Target("decoding, RMT / transformers' GPT-2", "decode", "small", 0.77, ratio("decode", "native", "gpt2")),
    Target("step, faster than the authors' JAX code", "step", "small", 2.2, faster_than_the_authors, "times", True),
)


def judge(result: Result) -> list[dict[str, Any]]:
    return [target.judge(result) for target in TARGETS]
