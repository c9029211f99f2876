"""The paper's section 4.4 and figure 6: does a larger residual stream help when nothing else changes?

One matrix-stream model is trained with several key dimensions. The cores, the data, the steps and, to a few per cent,
parameters and FLOPs stay the same; only the stream grows. A mirrored transformer at the same settings tells where its
stream, whose size is its width, would lie. One declaration at two scales: the paper's (GPT2-small dimensions, streams
of 384 to 4096 numbers, 50,000 steps of 64 x 512 tokens) and a tiny one for a CPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rmt.config import ModelConfig, TrainConfig
from rmt.errors import InputError
from rmt.experiments.match import mirror
from rmt.experiments.statistics import CONFIDENCE, mean_and_interval, t_quantile
from rmt.experiments.sweep import Member, Row, counted, save_results
from rmt.experiments.variants import Scale

KEY_DIMS: dict[Scale, tuple[int, ...]] = {"tiny": (2, 4, 8, 16, 32, 64), "paper": (6, 12, 24, 32, 48, 64)}
#: The paper's dev losses by key_dim; for the transformer its text gives a training loss of 3.43.
PAPER_LOSS = {6: 3.6186, 12: 3.4303, 24: 3.3748, 32: 3.3728, 48: 3.3632, 64: 3.3542}
TRANSFORMER = "transformer"
MOST_ENUMERATED = 8  # sizes up to which all orders are counted for the trend test


def declare(
    model: ModelConfig, train: TrainConfig, key_dims: Sequence[int], *, transformer: bool = True
) -> list[Member]:
    """A model per key dimension, and the mirrored transformer."""
    if len(set(key_dims)) != len(key_dims) or not key_dims or min(key_dims) < 1:
        raise InputError("--key-dims: name each size once, for example 4,8,16.")
    found = [
        Member(f"key_dim-{size}", model.replace(stream="matrix", width=None, key_dim=size), train)
        for size in sorted(key_dims)
    ]
    return found + ([Member(TRANSFORMER, mirror(model, "vector"), train)] if transformer else [])


def analyse(rows: Sequence[Row], scale: Scale = "tiny") -> dict[str, Any]:
    """All that is said about the runs: a line per model, the trend, the steps between neighbours, the transformer.

    The 95 % intervals take the spread between seeds to be the same for all models, so that few seeds suffice to know
    it. The trend is tested with Page's test: each seed is a block in which the models are ranked by loss, and p is the
    probability that ranks in random order would agree as well with the order of the sizes. With one seed it is an
    exact test of Spearman's correlation.
    """
    groups = counted(rows)
    spread, freedom = pooled_spread([losses(runs) for runs in groups.values()])
    lines = [line(runs, spread, freedom, scale) for runs in groups.values()]
    sizes = sorted((item for item in lines if item["stream"] == "matrix"), key=lambda item: item["stream_size"])
    transformer = next((item for item in lines if item["stream"] == "vector"), None)
    means = [item["dev_loss"] for item in sizes]
    seeds = min(item["seeds"] for item in sizes)
    table_SK = np.array([losses(groups[item["name"]])[:seeds] for item in sizes]).T
    result: dict[str, Any] = {
        "models": sizes + ([transformer] if transformer else []),
        "spread_between_seeds": spread,
        "is_monotone": all(later < earlier for earlier, later in itertools.pairwise(means)),
        "trend_p": page_trend(table_SK) if len(sizes) > 1 else None,
        "neighbours": [
            neighbour(left, right, table_SK[:, i], table_SK[:, i + 1])
            for i, (left, right) in enumerate(itertools.pairwise(sizes))
        ],
    }
    if len(sizes) > 1:
        result["smallest_to_largest"] = neighbour(sizes[0], sizes[-1], table_SK[:, 0], table_SK[:, -1])
    result["statement"] = statement(result, sizes, transformer)
    return result


def losses(runs: Sequence[Row]) -> list[float]:
    return [row["dev_loss"] for row in runs]


def line(runs: Sequence[Row], spread: float | None, freedom: int, scale: Scale) -> dict[str, Any]:
    first, values = runs[0], losses(runs)
    mean = float(np.mean(values))
    margin = None if spread is None else t_quantile(CONFIDENCE, freedom) * spread / math.sqrt(len(values))
    paper = PAPER_LOSS.get(first["key_dim"]) if scale == "paper" and first["stream"] == "matrix" else None
    return {
        **{key: first[key] for key in ("name", "stream", "key_dim", "stream_size", "parameters", "lr", "tokens")},
        "flops_per_token": first["flops"] / first["tokens"],
        "seeds": len(values),
        "dev_losses": values,
        "dev_loss": mean,
        "dev_loss_spread": float(np.std(values, ddof=1)) if len(values) > 1 else None,
        "dev_loss_interval": None if margin is None else [mean - margin, mean + margin],
        "train_loss": float(np.mean([row["train_loss"] for row in runs])),
        "seconds_per_step": float(np.mean([row["seconds"] / row["steps"] for row in runs])),
        "paper_loss": paper,
    }


def neighbour(left: dict[str, Any], right: dict[str, Any], before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    """The change from one size to the next, seed by seed: both models saw the same tokens in the same order."""
    mean, margin = mean_and_interval((after - before).tolist())
    return {
        "from": left["key_dim"],
        "to": right["key_dim"],
        "change": mean,
        "interval": None if margin is None else [mean - margin, mean + margin],
    }


def pooled_spread(groups: Sequence[Sequence[float]]) -> tuple[float | None, int]:
    """Standard deviation between seeds, common to all groups, and its degrees of freedom."""
    freedom = sum(len(values) - 1 for values in groups)
    if freedom == 0:
        return None, 0
    squares = sum(float(np.sum((np.array(values) - np.mean(values)) ** 2)) for values in groups)
    return math.sqrt(squares / freedom), freedom


def page_trend(table_SK: np.ndarray) -> float:
    """One-sided p of Page's trend test that losses fall from the first column to the last.

    Args:
        table_SK: losses, a row per seed and a column per size in growing order.
    """
    seeds, sizes = table_SK.shape
    place = np.arange(1, sizes + 1)
    ranks_SK = np.argsort(np.argsort(-table_SK, axis=1), axis=1) + 1  # the largest loss has rank 1
    observed = int((ranks_SK * place).sum())
    if sizes > MOST_ENUMERATED:
        mean = seeds * sizes * (sizes + 1) ** 2 / 4
        deviation = math.sqrt(seeds * sizes**2 * (sizes + 1) * (sizes**2 - 1) / 144)
        return 0.5 * math.erfc((observed - 0.5 - mean) / deviation / math.sqrt(2))
    orders = np.array(list(itertools.permutations(place)))
    one = np.bincount((orders * place).sum(axis=1)) / len(orders)  # of one seed, over all orders
    probability = one
    for _ in range(seeds - 1):
        probability = np.convolve(probability, one)
    return float(min(1.0, probability[observed:].sum()))


def statement(result: dict[str, Any], sizes: list[dict[str, Any]], transformer: dict[str, Any] | None) -> str:
    """What came out, in sentences."""
    small, large = sizes[0], sizes[-1]
    if len(sizes) == 1:
        sentences = [f"With a stream of {small['stream_size']} numbers the RMT reached {small['dev_loss']:.4f}."]
    else:
        more = f"{large['stream_size'] / small['stream_size']:.0f}"
        change = result["smallest_to_largest"]
        margin = "" if change["interval"] is None else f" ± {change['interval'][1] - change['change']:.4f}"
        cost = 100 * (large["flops_per_token"] / small["flops_per_token"] - 1)
        size = 100 * (large["parameters"] / small["parameters"] - 1)
        sentences = [
            f"A stream {more} times as large changed the dev loss by {change['change']:+.4f}{margin} "
            f"(from {small['dev_loss']:.4f} to {large['dev_loss']:.4f}), for {size:.1f} % more parameters and "
            f"{cost:.1f} % more FLOPs per token."
        ]
        rises = [item for item in result["neighbours"] if item["change"] >= 0]
        if result["is_monotone"]:
            sentences.append("The loss fell with every increase.")
        else:
            where = ", ".join(f"key_dim {item['from']} to {item['to']} ({item['change']:+.4f})" for item in rises)
            sentences.append(f"It is not monotone: the loss did not fall from {where}.")
        seeds = f"{small['seeds']} seed" + ("s" if small["seeds"] > 1 else "")
        sentences.append(f"Page's trend test, {seeds}: p = {result['trend_p']:.2g}.")
    if transformer is not None:
        same = min(sizes, key=lambda item: abs(math.log(item["stream_size"] / transformer["stream_size"])))
        better = [item for item in sizes if item["dev_loss"] < transformer["dev_loss"]]
        passed = f"from key_dim {better[0]['key_dim']} on" if better and better == sizes[-len(better) :] else ""
        outcome = f"The RMT is below it {passed}" if passed else f"{len(better)} of {len(sizes)} RMTs are below it"
        sentences.append(
            f"The mirrored transformer, with a stream of {transformer['stream_size']}, reached "
            f"{transformer['dev_loss']:.4f}; the RMT with a stream of {same['stream_size']}, {same['dev_loss']:.4f}. "
            f"{outcome}."
        )
    return " ".join(sentences)


def readable(result: dict[str, Any]) -> list[dict[str, str]]:
    """The table for people."""

    def loss(item: dict[str, Any]) -> str:
        spread = item["dev_loss_spread"]
        return f"{item['dev_loss']:.4f}" + ("" if spread is None else f" ± {spread:.4f}")

    def interval(item: dict[str, Any]) -> str:
        found = item["dev_loss_interval"]
        return "–" if found is None else f"{found[0]:.4f} to {found[1]:.4f}"

    lines = []
    for item in result["models"]:
        cells = {
            "model": "RMT" if item["stream"] == "matrix" else "transformer",
            "key_dim": "–" if item["key_dim"] is None else str(item["key_dim"]),
            "stream": f"{item['stream_size']:,}",
            "parameters": f"{item['parameters']:,}",
            "MFLOPs/token": f"{item['flops_per_token'] / 1e6:.3f}",
            "lr": f"{item['lr']:g}",
            "s/step": f"{item['seconds_per_step']:.3f}",
            "dev loss": loss(item),
            "95 % interval": interval(item),
        }
        if any(other["paper_loss"] is not None for other in result["models"]):
            cells["paper"] = "–" if item["paper_loss"] is None else f"{item['paper_loss']:.4f}"
        lines.append(cells)
    return lines


def write(result: dict[str, Any], rows: Sequence[Row], out: Path) -> list[Path]:
    """Figures, the rows with what was computed from them, and the page, for a folder of runs."""
    from rmt.report.page import write_report
    from rmt.report.sweeps import residual_size_figure

    figures = residual_size_figure(result, out / "residual-size")
    runs = [out / row["run"] for same in counted(rows).values() for row in same]
    title = "The size of the residual stream"
    page = write_report(
        runs, out / "report.html", title=title, introduction=result["statement"], table=readable(result)
    )
    return [page, *figures, save_results(out / "results.json", rows, result)]
