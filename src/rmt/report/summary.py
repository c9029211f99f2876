"""What came out, as numbers and as sentences: the table of a report and its headline.

A row is plain data with raw numbers (`rmt report --json`); `cells` turns it into what people read. The headline is
computed: it names whichever model came out ahead, what it cost, and what it saved at equal loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rmt.report.runs import Curve, Group, Run, dev_curve, train_curve

Row = dict[str, Any]


def run_row(run: Run) -> Row:
    """One run's line of the table."""
    speed = _median(run.timing["tokens_per_second"])
    return {
        "run": run.name,
        "stream": run.config.model.stream,
        "seed": run.config.train.seed,
        "parameters": int(run.cost.params),
        "non_embedding_parameters": run.cost.non_embedding_params,
        "training_flops_per_token": run.flops_per_token,
        "dev_loss": run.dev_ce,
        "train_loss": run.train_ce,
        "tokens": run.tokens,
        "step": run.step,
        "steps": run.total_steps,
        "ms_per_step": None if speed is None else 1000 * run.step_tokens / speed,
        "tokens_per_second": speed,
        "peak_share": _median(run.timing["peak_share"]),
    }


def group_row(group: Group) -> Row:
    """One group's line: the means over its runs; losses with their spread, at the last step that all runs have."""
    rows = [run_row(run) for run in group.runs]
    row = {"model": group.label, **rows[0], "run": ", ".join(row["run"] for row in rows), "seeds": len(rows)}
    del row["seed"]
    for key in ("ms_per_step", "tokens_per_second", "peak_share"):
        row[key] = _mean([one[key] for one in rows])
    for key in ("tokens", "step"):
        row[key] = min(one[key] for one in rows)
    for key, curve in (("dev_loss", dev_curve(group)), ("train_loss", train_curve(group))):
        row[key] = float(curve.mean[-1]) if len(curve.mean) else None
        has_spread = curve.deviation is not None and len(curve.deviation) > 0
        row[f"{key}_deviation"] = float(curve.deviation[-1]) if has_spread else None  # type: ignore[index]
    return row


def _median(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def cells(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The table for people: column titles and formatted values, without columns that say nothing."""
    named = any(row["seeds"] == 1 and row["run"] != row["model"] for row in rows)
    several = any(row["seeds"] > 1 for row in rows)
    columns: dict[str, Callable[[Row], str]] = {"model": lambda row: row["model"]}
    if several:
        columns["runs"] = lambda row: f"{row['seeds']} seeds" if row["seeds"] > 1 else row["run"]
    elif named:
        columns["run"] = lambda row: row["run"]
    columns |= {
        "stream": lambda row: row["stream"],
        "dev loss": lambda row: loss_text(row["dev_loss"], row["dev_loss_deviation"]),
        "train loss": lambda row: loss_text(row["train_loss"], row["train_loss_deviation"]),
        "parameters": lambda row: quantity(row["parameters"]),
        "non-embedding parameters": lambda row: quantity(row["non_embedding_parameters"]),
        "training FLOPs per token": lambda row: quantity(row["training_flops_per_token"]),
        "tokens": lambda row: quantity(row["tokens"]),
        "steps": _progress,
        "ms per step": lambda row: number(row["ms_per_step"]),
        "tokens per second": lambda row: quantity(row["tokens_per_second"]),
        "share of peak": lambda row: "–" if row["peak_share"] is None else f"{100 * row['peak_share']:.0f} %",
    }
    return [{title: form(row) for title, form in columns.items()} for row in rows]


def _progress(row: Row) -> str:
    return str(row["steps"]) if row["step"] >= row["steps"] else f"{row['step']} of {row['steps']}"


def quantity(value: float | None) -> str:
    """Three digits and a unit: 1.64 M."""
    if value is None or not math.isfinite(value):
        return "–"
    for factor, unit in ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * factor:
            return f"{number(value / factor)} {unit}"
    return number(value)


def number(value: float | None) -> str:
    """Three significant digits, and all those before the point."""
    if value is None or not math.isfinite(value):
        return "–"
    digits = 3 - len(str(int(abs(value)))) if abs(value) >= 1 else 3
    return f"{value:.{max(0, digits)}f}"


def loss_text(value: float | None, deviation: float | None = None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.3f}" if deviation is None else f"{value:.3f} ± {deviation:.3f}"


def headline(groups: Sequence[Group]) -> list[str]:
    """What came out, in sentences: the first is the result, the others what it cost and how sure it is."""
    rows = [group_row(group) for group in groups]
    kind = "dev_loss" if all(row["dev_loss"] is not None for row in rows) else "train_loss"
    if any(row[kind] is None or not math.isfinite(row[kind]) for row in rows):
        missing = [row["model"] for row in rows if row[kind] is None or not math.isfinite(row[kind])]
        return [f"No loss to compare yet: {', '.join(missing)} has none."]
    order = sorted(range(len(groups)), key=lambda index: rows[index][kind])
    is_finished = all(run.step >= run.total_steps for group in groups for run in group.runs)
    opening = "" if is_finished else "So far, "
    if len(groups) == 1:
        return [
            _capital(f"{opening}{_the(rows[0])} reached a {_words(kind)} of {_loss(rows[0], kind)} {_after(rows)}.")
        ]
    if len(groups) == 2 and not is_finished and rows[0]["step"] != rows[1]["step"]:
        return _midway(groups, kind)
    if len(groups) == 2:
        best, other = (groups[index] for index in order)
        return [_capital(opening + _pair(rows[order[0]], rows[order[1]], kind)), *_details(best, other, kind)]
    best_row, next_row, last_row = (rows[order[place]] for place in (0, 1, -1))
    sentences = [
        _capital(
            f"{opening}of {len(groups)} models, {_the(best_row)} reached the lowest {_words(kind)}, "
            f"{_loss(best_row, kind)}; next came {_the(next_row)} with {_loss(next_row, kind)}; "
            f"the highest was {_the(last_row)}'s {_loss(last_row, kind)}."
        )
    ]
    leaders = [next((index for index in order if rows[index]["stream"] == name), None) for name in ("matrix", "vector")]
    if None not in leaders:
        first, second = sorted((index for index in leaders if index is not None), key=order.index)
        pair = _pair(rows[first], rows[second], kind)
        sentences += [f"RMT and transformer, each at its best: {pair}", *_details(groups[first], groups[second], kind)]
    return sentences


def _midway(groups: Sequence[Group], kind: str) -> list[str]:
    """Two models of which one has seen more tokens: compared where both have been."""
    states = [f"{_the(row)} at step {row['step']} of {row['steps']}" for row in map(group_row, groups)]
    sentences = [f"Not finished: {_listed(states)}."]
    curves = [dev_curve(group) if kind == "dev_loss" else train_curve(group) for group in groups]
    common = np.intersect1d(curves[0].tokens, curves[1].tokens)
    if len(common):
        losses = [float(curve.mean[curve.tokens == common[-1]][0]) for curve in curves]
        values = [f"the {group.label}'s {loss:.3f}" for group, loss in zip(groups, losses, strict=True)]
        sentences.append(f"After {quantity(common[-1])} tokens, {_words(kind)}: {_listed(values)}.")
    return sentences


def _pair(best: Row, other: Row, kind: str) -> str:
    if f"{best[kind]:.3f}" == f"{other[kind]:.3f}":
        return f"{_the(best)} and {_the(other)} came out level at a {_words(kind)} of {_loss(best, kind)}."
    return (
        f"{_the(best)} came out ahead: {_words(kind)} {_loss(best, kind)}, "
        f"against {_the(other)}'s {_loss(other, kind)}, {_after([best, other])}."
    )


def _details(best: Group, other: Group, kind: str) -> list[str]:
    """Cost per token and step, spread, and what the better one saved on the way to the other's final loss."""
    first, second = group_row(best), group_row(other)
    cost = [change(first["training_flops_per_token"], second["training_flops_per_token"], "FLOPs per token", "fewer")]
    if first["ms_per_step"] and second["ms_per_step"]:
        cost.append(change(first["ms_per_step"], second["ms_per_step"], "time per step", "less"))
    cost.append(change(first["parameters"], second["parameters"], "parameters", "fewer"))
    sentences = [f"Compared with {_the(second)}, {_the(first)} used {_listed(cost)}."]
    deviations = [row[f"{kind}_deviation"] for row in (first, second) if row[f"{kind}_deviation"] is not None]
    if deviations:
        gap = abs(first[kind] - second[kind])
        relation = "larger" if gap > 2 * max(deviations) else "not larger"
        sentences.append(
            f"The difference, {gap:.3f}, is {relation} than twice the spread between seeds ({max(deviations):.3f})."
        )
    curve_of = dev_curve if kind == "dev_loss" else train_curve
    if (saved := saving(curve_of(best), curve_of(other))) is not None:
        words = [change(share, 1.0, what, less) for what, (share, less) in saved.items()]
        sentences.append(_capital(f"{_the(first)} reached {_the(second)}'s final loss with {_listed(words)}."))
    return sentences


def saving(best: Curve, other: Curve) -> dict[str, tuple[float, str]] | None:
    """What `best` had spent when it first reached the final loss of `other`, as shares of what that one spent.

    Interpolated between evaluations. None where it had reached that loss before its first evaluation, or not at all.
    """
    if not len(best.step) or not len(other.step) or not np.isfinite(best.mean).all():
        return None
    target = other.mean[-1]
    reached = np.flatnonzero(best.mean <= target)
    if not len(reached) or reached[0] == 0:
        return None
    after = int(reached[0])
    high, low = best.mean[after - 1], best.mean[after]
    part = (high - target) / (high - low)
    result = {}
    for field, what, less in (("tokens", "tokens", "fewer"), ("flops", "FLOPs", "fewer"), ("seconds", "time", "less")):
        values = getattr(best, field)
        share = (values[after - 1] + part * (values[after] - values[after - 1])) / getattr(other, field)[-1]
        if np.isfinite(share):
            result[what] = (float(share), less)
    return result


def change(value: float, reference: float, what: str, less: str) -> str:
    """`31 % fewer FLOPs`, `12 % more time`, `the same parameters`."""
    percent = 100 * (value / reference - 1)
    if abs(percent) < 0.5:
        return f"the same {what}"
    return f"{abs(percent):.0f} % {less if percent < 0 else 'more'} {what}"


def _the(row: Row) -> str:
    return f"the {row['model']}"


def _loss(row: Row, kind: str) -> str:
    return loss_text(row[kind], row[f"{kind}_deviation"])


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _after(rows: Sequence[Row]) -> str:
    tokens = [quantity(row["tokens"]) for row in rows]
    if len(rows) == 1:
        return f"after {tokens[0]} tokens"
    if rows[0]["tokens"] == rows[1]["tokens"]:
        return f"after the same {tokens[0]} tokens"
    return f"after {tokens[0]} and {tokens[1]} tokens"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
