"""Runs made small enough to commit: a few kilobytes each, and still run directories that every reader understands.

Kept are the configuration, all evaluations, the training loss as means over stretches of the run, and a few readings of
the clock. Left out are weights, samples, and where things lay on the machine. `rmt report`, the tables and the figures
take a compact run like any other.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rmt.errors import InputError
from rmt.report.runs import find_runs
from rmt.train.run import RunConfig, read_log, write_text

STRETCHES = 50  # of the training loss
CLOCK_READINGS = 10
DIGITS = 7


def compact(source: Path, target: Path) -> list[Path]:
    """Copy all runs below `source` to the same places below `target`, compactly; returns the copies."""
    if target.resolve() == source.resolve() or source.resolve() in target.resolve().parents:
        raise InputError(f"--compact {target}: choose a folder outside of {source}.")
    runs = find_runs([source])
    copies = [compact_run(run, target / run.relative_to(source)) for run in runs]
    environments = [path for path in (run / "environment.json" for run in runs) if path.is_file()]
    if environments:
        kept = {key: value for key, value in json.loads(environments[0].read_text()).items() if key != "command"}
        write_text(target / "environment.json", json.dumps(kept, indent=1) + "\n")
    return copies


def compact_run(run: Path, target: Path) -> Path:
    config = RunConfig.load(run / "config.yaml")
    data = {**config.data, "path": Path(config.data["path"]).name}
    target.mkdir(parents=True, exist_ok=True)
    dataclasses.replace(config, data=data).save(target / "config.yaml")
    metrics = read_log(run)
    steps = [record for record in metrics if "ce" in record]
    evaluations = [record for record in metrics if "dev_ce" in record]
    records = sorted([*stretches(steps), *evaluations], key=lambda record: record["step"])
    write_lines(target / "metrics.jsonl", records)
    timing = read_log(run, "timing")
    readings = {round(index) for index in np.linspace(0, len(timing) - 1, CLOCK_READINGS)} if timing else set()
    write_lines(target / "timing.jsonl", [timing[index] for index in sorted(readings)])
    return target


def stretches(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps in equal stretches: the last record of each, with the means of its losses."""
    result = []
    for indices in np.array_split(np.arange(len(steps)), min(STRETCHES, len(steps)) or 1):
        members = [steps[index] for index in indices]
        if members:
            means = {key: float(np.mean([record[key] for record in members])) for key in ("ce", "loss")}
            result.append(members[-1] | means)
    return result


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(shortened(record)) + "\n" for record in records))


def shortened(record: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value for key, value in record.items()}
