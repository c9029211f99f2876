"""Run directories as the report reads them: found on disk, loaded into arrays, grouped by what they repeat.

A run that is still in progress is an ordinary run with fewer lines. Runs that differ by nothing but the seed are one
`Group`: one curve with a spread, one row in the table. A group is labelled by its stream and by the settings that set
it apart from the other groups of that stream, so a label says why two curves differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rmt.errors import InputError, suggest
from rmt.report.style import stream_name
from rmt.theory.accounting import Count, count
from rmt.train.run import RunConfig, read_log

Floats = np.ndarray

STEP_FIELDS = ("step", "tokens", "loss", "ce", "lr", "grad_norm")
EVALUATION_FIELDS = ("step", "tokens", "dev_ce", "dev_accuracy")
TIMING_FIELDS = ("step", "seconds", "tokens_per_second", "peak_share")

#: The loss of single steps is noisy: curves and the table show its mean over this share of the run.
SMOOTHING_SHARE = 0.02
LARGEST_LABEL = 3  # settings in a label; groups that differ in more are told apart by the runs' names


@dataclass(frozen=True)
class Run:
    """One run. `steps`, `evaluations` and `timing` map the names of the log's fields to arrays."""

    path: Path
    name: str
    config: RunConfig
    steps: dict[str, Floats]
    evaluations: dict[str, Floats]
    timing: dict[str, Floats]
    samples: str
    environment: dict[str, Any]

    @cached_property
    def cost(self) -> Count:
        return count(self.config.model)

    @property
    def flops_per_token(self) -> int:
        """Forward and backward."""
        return self.cost.flops.training_per_token

    @property
    def step(self) -> int:
        """Steps done so far."""
        return int(self.steps["step"][-1]) if len(self.steps["step"]) else 0

    @property
    def total_steps(self) -> int:
        return self.config.train.total_steps(self.config.model.context)

    @property
    def tokens(self) -> int:
        return int(self.steps["tokens"][-1]) if len(self.steps["tokens"]) else 0

    @property
    def step_tokens(self) -> int:
        return self.config.train.batch_size * self.config.model.context

    @cached_property
    def smooth_ce(self) -> Floats:
        return smooth(self.steps["ce"])

    def seconds_at(self, steps: Floats) -> Floats:
        """Training seconds when each of `steps` was done; NaN where the clock has not said."""
        known, seconds = self.timing["step"], self.timing["seconds"]
        if not len(known):
            return np.full(len(steps), np.nan)
        return np.interp(steps, known, seconds, right=np.nan)

    @property
    def dev_ce(self) -> float | None:
        """Of the last evaluation."""
        return _last(self.evaluations["dev_ce"])

    @property
    def train_ce(self) -> float | None:
        """Mean of the last steps."""
        return _last(self.smooth_ce)


@dataclass(frozen=True)
class Group:
    """Runs that differ only by seed."""

    label: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def stream(self) -> str:
        return self.first.config.model.stream


@dataclass(frozen=True)
class Curve:
    """A loss against the three things it can be paid in: the mean over a group's runs, and the spread between them.

    `deviation` is the sample standard deviation, or None for a single run.
    """

    step: Floats
    tokens: Floats
    flops: Floats
    seconds: Floats
    mean: Floats
    deviation: Floats | None


def dev_curve(group: Group) -> Curve:
    return mean_curve(group, [(run.evaluations["step"], run.evaluations["dev_ce"]) for run in group.runs])


def train_curve(group: Group) -> Curve:
    return mean_curve(group, [(run.steps["step"], run.smooth_ce) for run in group.runs])


def lr_curve(group: Group) -> Curve:
    return mean_curve(group, [(run.steps["step"], run.steps["lr"]) for run in group.runs])


def grad_norm_curve(group: Group) -> Curve:
    return mean_curve(group, [(run.steps["step"], smooth(run.steps["grad_norm"])) for run in group.runs])


def mean_curve(group: Group, series: Sequence[tuple[Floats, Floats]]) -> Curve:
    """Mean and spread at the steps that all runs have."""
    step = series[0][0]
    for other, _ in series[1:]:
        step = np.intersect1d(step, other)
    values = np.array([value[np.isin(at, step)] for at, value in series])
    tokens = step * group.first.step_tokens
    return Curve(
        step=step,
        tokens=tokens,
        flops=tokens * group.first.flops_per_token,
        seconds=np.mean([run.seconds_at(step) for run in group.runs], axis=0),
        mean=values.mean(axis=0),
        deviation=values.std(axis=0, ddof=1) if len(series) > 1 else None,
    )


def smooth(values: Floats) -> Floats:
    """A running mean over `SMOOTHING_SHARE` of the run, skipping NaN.

    The window is symmetric where it can be, also at the start, so that a falling curve is not shifted; at the end it
    looks back only, so that the last value is a mean too.
    """
    n = len(values)
    width = max(1, round(n * SMOOTHING_SHARE))
    known = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    amount = np.concatenate([[0], np.cumsum(known)])
    index = np.arange(n)
    left = np.minimum(index, width - 1)
    right = np.minimum(n - 1 - index, left)
    first, last = index - left, index + right + 1
    inside = amount[last] - amount[first]
    return np.where(inside > 0, (total[last] - total[first]) / np.maximum(inside, 1), np.nan)


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Run directories among `paths` and in the folders among them, each once, in the order given."""
    found: dict[Path, Path] = {}
    for path in paths:
        for run in _runs_under(path):
            found.setdefault(run.resolve(), run)
    if not found:
        raise InputError("there is no run to report: name a run directory, or a folder of them.")
    return list(found.values())


def _runs_under(path: Path) -> list[Path]:
    if not path.exists():
        names = [item.name for item in path.parent.iterdir() if item.is_dir()] if path.parent.is_dir() else []
        near = suggest(path.name, names)
        hint = f" {near}" if near.startswith("Did") else ""
        raise InputError(f"there is no run directory {path}.{hint}")
    if path.is_file():
        raise InputError(f"{path} is a file: name the run directory that holds config.yaml and metrics.jsonl.")
    if is_run(path):
        return [path]
    runs = sorted({file.parent for file in path.rglob("metrics.jsonl") if is_run(file.parent)}, key=_natural)
    if not runs:
        raise InputError(f"{path} is not a run directory (no config.yaml with metrics.jsonl), and holds none.")
    return runs


def is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and (path / "metrics.jsonl").is_file()


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts `dk-8` before `dk-16`."""
    text, parts, digits = str(path), [], ""
    for character in text + "\0":
        if character.isdigit():
            digits += character
            continue
        if digits:
            parts.append((int(digits), ""))
            digits = ""
        parts.append((0, character))
    return parts


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Load run directories; each gets the shortest end of its path that tells it from the others as its name."""
    resolved = [path.resolve() for path in paths]
    depth = 1
    while depth < 8 and len({path.parts[-depth:] for path in resolved}) < len(set(resolved)):
        depth += 1
    return [load_run(path, "/".join(full.parts[-depth:])) for path, full in zip(paths, resolved, strict=True)]


def load_run(path: Path, name: str | None = None) -> Run:
    if not is_run(path):
        raise InputError(f"{path} is not a run directory: it needs config.yaml and metrics.jsonl.")
    metrics = _read_log(path, "metrics")
    return Run(
        path=path,
        name=name or path.resolve().name,
        config=RunConfig.load(path / "config.yaml"),
        steps=_columns(metrics, "ce", STEP_FIELDS, path),
        evaluations=_columns(metrics, "dev_ce", EVALUATION_FIELDS, path),
        timing=_columns(_read_log(path, "timing"), "seconds", TIMING_FIELDS, path),
        samples=_text(path / "samples.txt"),
        environment=_environment(path / "environment.json"),
    )


def _read_log(path: Path, name: str) -> list[dict[str, Any]]:
    try:
        records = read_log(path, name)
    except (ValueError, OSError) as error:
        raise InputError(f"{path / name}.jsonl cannot be read ({error}): mend or remove the line.") from None
    if not all(isinstance(record, dict) for record in records):
        raise InputError(f"{path / name}.jsonl cannot be read: each line must be a record in braces.")
    return records


def _columns(records: list[dict[str, Any]], mark: str, names: Sequence[str], path: Path) -> dict[str, Floats]:
    """The records that have the field `mark`, as one array per name."""
    rows = [record for record in records if mark in record]
    try:
        return {
            name: np.array([np.nan if row.get(name) is None else float(row[name]) for row in rows]) for name in names
        }
    except (TypeError, ValueError) as error:
        raise InputError(f"the logs of {path} cannot be read: {error}.") from None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _environment(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(_text(path) or "{}")
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}.") from None
    return values if isinstance(values, dict) else {}


def _last(values: Floats) -> float | None:
    return float(values[-1]) if len(values) else None


def settings(run: Run) -> dict[str, Any]:
    """All settings of a run as `section.key`, the fingerprint for the data."""
    flat: dict[str, Any] = {}
    for section in ("model", "train"):
        for key, value in getattr(run.config, section).to_dict().items():
            if isinstance(value, dict):
                flat |= {f"{section}.{key}.{inner}": item for inner, item in value.items()}
            else:
                flat[f"{section}.{key}"] = value
    return flat | {"data.fingerprint": run.config.data.get("fingerprint")}


def differing(runs: Sequence[Run]) -> list[str]:
    """The settings that are not the same in all runs."""
    everything = [settings(run) for run in runs]
    return [key for key in everything[0] if any(values[key] != everything[0][key] for values in everything)]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs that differ only by seed, together; in the order of their first run."""
    members: dict[str, list[Run]] = {}
    for run in runs:
        values = settings(run)
        del values["train.seed"]
        members.setdefault(repr(values), []).append(run)
    together = list(members.values())
    return [Group(_label(group, together), tuple(group)) for group in together]


def _label(group: list[Run], groups: list[list[Run]]) -> str:
    stream = group[0].config.model.stream
    same_stream = [other[0] for other in groups if other[0].config.model.stream == stream]
    keys = [key for key in differing(same_stream) if key != "train.seed"]
    label = stream_name(stream)
    if not keys:
        return label
    if len(keys) > LARGEST_LABEL or "data.fingerprint" in keys:
        return f"{label} ({group[0].name})"
    values = settings(group[0])
    shown = (f"{key.rpartition('.')[2]} {values[key]}" for key in keys)
    return f"{label} ({', '.join(shown)})"
