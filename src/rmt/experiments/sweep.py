"""What the sweeps share: named models with their recipes, trained at one or several learning rates and seeds.

A sweep is a list of `Member`s and a folder of ordinary runs, `OUT/NAME/lr-0.02-seed-0`. With several learning rates the
first seed tries all of them for every model alike, and the other seeds use the best. What came out is read into rows
of plain data, one per run, and everything else (tables, tests, fits, figures) is computed from those rows: keep the
rows and the result can be computed again without the runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from rmt.config import ModelConfig, TrainConfig
from rmt.data import TokenDataset
from rmt.errors import InputError
from rmt.experiments.pool import Job, run_pool
from rmt.report.runs import load_run
from rmt.train.run import RunConfig, write_text
from rmt.train.start import check_fit

Row = dict[str, Any]


@dataclass(frozen=True)
class Member:
    """One model of a sweep and how it is trained."""

    name: str
    model: ModelConfig
    train: TrainConfig

    @property
    def steps(self) -> int:
        return self.train.total_steps(self.model.context)

    @property
    def tokens(self) -> int:
        """Seen in training: whole steps."""
        return self.steps * self.train.batch_size * self.model.context


@dataclass(frozen=True)
class Effort:
    """How much is run, and where: what the commands ask for besides the models.

    Args:
        data: token dataset.
        out: folder of the runs.
        seeds: runs per model.
        learning_rates: tried for every model with the first seed (none: each member's own).
        workers: runs at a time (None: as many as there are GPUs, or else cores).
        processes: of each run, started by torchrun if there are several.
        quiet: show no progress.
    """

    data: Path
    out: Path
    seeds: int = 1
    learning_rates: tuple[float, ...] = ()
    workers: int | None = None
    processes: int = 1
    quiet: bool = False

    def __post_init__(self) -> None:
        for name in ("seeds", "workers", "processes"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"--{name} {getattr(self, name)}: at least one is needed.")

    def rates(self, member: Member) -> tuple[float, ...]:
        return self.learning_rates or (member.train.lr,)


def run_sweep(members: Sequence[Member], effort: Effort, console: Console) -> list[Row]:
    """Run all that is not finished yet, and read the rows of all runs: the first seed's at every learning rate, the
    other seeds' at the best."""
    dataset = TokenDataset.open(effort.data)
    if dataset.tokens("dev") <= max(member.model.context for member in members):
        raise InputError(f"{effort.data} has no dev split longer than one window: prepare it with --dev.")
    for member in members:
        check_fit(member.model, member.train, dataset)

    def run(chosen: list[tuple[Member, float, int]]) -> list[Row]:
        jobs = []
        for member, lr, seed in chosen:
            train = member.train.replace(lr=lr, seed=seed, keep=1)
            data = {"path": str(dataset.path), "fingerprint": dataset.fingerprint}
            folder = effort.out / member.name / f"lr-{lr:g}-seed-{seed}"
            jobs.append(Job(folder, RunConfig(member.model, train, data)))
        run_pool(jobs, console=console, workers=effort.workers, processes=effort.processes, quiet=effort.quiet)
        return [read_row(job.out, member.name) for job, (member, _, _) in zip(jobs, chosen, strict=True)]

    first = run([(member, lr, 0) for member in members for lr in effort.rates(member)])
    best = best_rates(first)
    return first + run([(member, best[member.name], seed) for seed in range(1, effort.seeds) for member in members])


def read_row(path: Path, name: str) -> Row:
    """What one run was and what came of it."""
    run = load_run(path)
    model = run.config.model
    return {
        "name": name,
        "run": f"{name}/{path.name}",
        "stream": model.stream,
        "layers": model.layers,
        "heads": model.heads,
        "head_dim": model.head_dim,
        "key_dim": model.key_dim if model.stream == "matrix" else None,
        "stream_size": model.stream_size,
        "parameters": int(run.cost.params),
        "non_embedding_parameters": run.cost.non_embedding_params,
        "tokens": run.tokens,
        "steps": run.step,
        "flops": run.cost.flops.training(run.tokens),
        "flops_without_logits": run.cost.flops.training(run.tokens, logits=False),
        "seconds": round(float(run.timing["seconds"][-1]), 3),
        "lr": run.config.train.lr,
        "seed": run.config.train.seed,
        "dev_loss": run.dev_ce,
        "train_loss": run.train_ce,
        "curve": np.stack([run.evaluations["tokens"], run.evaluations["dev_ce"]], axis=1).tolist(),
    }


def best_rates(rows: Sequence[Row]) -> dict[str, float]:
    """The learning rate with the lowest dev loss of the first seed, for each name."""
    best: dict[str, Row] = {}
    for row in rows:
        if row["seed"] == 0 and (row["name"] not in best or loss(row) < loss(best[row["name"]])):
            best[row["name"]] = row
    return {name: row["lr"] for name, row in best.items()}


def counted(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows that count, those at the best learning rate, by name and in the order of seeds."""
    best = best_rates(rows)
    kept = sorted((row for row in rows if row["lr"] == best[row["name"]]), key=lambda row: row["seed"])
    return {name: [row for row in kept if row["name"] == name] for name in best}


def loss(row: Row) -> float:
    value = row["dev_loss"]
    return value if value is not None and math.isfinite(value) else math.inf


def save_results(path: Path, rows: Sequence[Row], analysis: dict[str, Any]) -> Path:
    """Rows and what was computed from them, as JSON."""
    write_text(path, json.dumps({"rows": list(rows), "analysis": analysis}, indent=1) + "\n")
    return path
