"""Residual streams side by side: equal data, equal tokens, several seeds, each stream at its own learning rate.

A comparison is a folder of ordinary runs, `OUT/STREAM/lr-0.01-seed-0`, and `plan.json`, which fixes what was decided
(the matched models) so that an interrupted comparison goes on as it began. With several learning rates, the first seed
tries all of them for every stream alike, and the other seeds use the best. The results are losses at equal tokens,
FLOPs and seconds, as mean and spread over seeds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from rmt.config import ModelConfig, TrainConfig
from rmt.data import TokenDataset
from rmt.errors import InputError, suggest
from rmt.experiments.match import Match, match_models
from rmt.experiments.pool import Job, run_pool
from rmt.report.runs import Curve, Group, dev_curve, load_run
from rmt.streams import STREAMS
from rmt.train.run import RunConfig, read_log, write_text

#: Final training losses of the paper's comparison: GPT2-small dimensions, 50,000 steps of 64 x 512 tokens.
PAPER_LOSS = {
    "vector": 3.4298,
    "matrix": 3.3598,
    "aggregation": 3.4745,
    "depthwise_lstm": 3.5473,
    "highway": 3.4078,
}


@dataclass(frozen=True)
class Comparison:
    """What is compared."""

    streams: list[str]
    base: ModelConfig
    train: TrainConfig
    data: Path
    out: Path
    seeds: int = 3
    match: Match = "dims"
    learning_rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in self.streams:
            if name not in STREAMS:
                raise InputError(f"there is no stream {name!r}. {suggest(name, STREAMS)}")
        if len(set(self.streams)) != len(self.streams) or not self.streams:
            raise InputError("--streams: name each stream once, for example matrix,vector.")
        if self.seeds < 1:
            raise InputError(f"--seeds {self.seeds}: at least one is needed.")


def compare(comparison: Comparison, console: Console, *, workers: int | None = None, quiet: bool = False) -> list[Path]:
    """Run all that is not finished yet; returns the run directories that count, one per stream and seed."""
    dataset = TokenDataset.open(comparison.data)
    models = plan(comparison)
    rates = comparison.learning_rates or (comparison.train.lr,)

    def job(stream: str, lr: float, seed: int) -> Job:
        train = comparison.train.replace(lr=lr, seed=seed, keep=1)
        out = comparison.out / stream / f"lr-{lr:g}-seed-{seed}"
        data = {"path": str(dataset.path), "fingerprint": dataset.fingerprint}
        return Job(out, RunConfig(models[stream], train, data))

    first = [job(stream, lr, 0) for lr in rates for stream in comparison.streams]
    run_pool(first, workers=workers, console=console, quiet=quiet)
    best = {stream: min(rates, key=lambda lr: final_dev_loss(job(stream, lr, 0).out)) for stream in comparison.streams}
    rest = [job(stream, best[stream], seed) for seed in range(1, comparison.seeds) for stream in comparison.streams]
    run_pool(rest, workers=workers, console=console, quiet=quiet)
    return [job(stream, best[stream], seed).out for stream in comparison.streams for seed in range(comparison.seeds)]


def plan(comparison: Comparison) -> dict[str, ModelConfig]:
    """The matched models: decided once, kept in plan.json."""
    file = comparison.out / "plan.json"
    asked = {"base": comparison.base.to_dict(), "match": comparison.match}
    if file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["asked"] != asked:
            raise InputError(f"{comparison.out} holds another comparison: choose another --out, or the same settings.")
    else:
        kept = {"asked": asked, "models": {}}
    missing = [stream for stream in comparison.streams if stream not in kept["models"]]
    if missing:
        solved = match_models(comparison.base, comparison.streams, comparison.match, comparison.train)
        kept["models"] |= {stream: solved[stream].to_dict() for stream in missing}
        comparison.out.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(kept, indent=1))
    return {stream: ModelConfig.from_dict(kept["models"][stream]) for stream in comparison.streams}


def final_dev_loss(run: Path) -> float:
    losses = [record["dev_ce"] for record in read_log(run) if "dev_ce" in record]
    if not losses:
        raise InputError(f"{run} has no dev loss: the data needs a dev split longer than one window.")
    return losses[-1] if np.isfinite(losses[-1]) else float("inf")


def results(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """A row per stream: mean and spread of the dev loss at equal tokens, FLOPs and seconds.

    The budgets are the largest that every stream has spent, so that each loss is read off, never extrapolated.
    """
    groups: dict[str, list] = {}
    for path in runs:
        run = load_run(path)
        groups.setdefault(run.config.model.stream, []).append(run)
    curves = {stream: [dev_curve(Group(stream, (run,))) for run in members] for stream, members in groups.items()}
    everything = [curve for members in curves.values() for curve in members]
    budgets = {
        price: min(getattr(curve, price)[-1] for curve in everything) for price in ("tokens", "flops", "seconds")
    }
    rows = []
    for stream, members in groups.items():
        row: dict[str, Any] = {
            "stream": stream,
            "seeds": len(members),
            "lr": members[0].config.train.lr,
            "parameters": int(members[0].cost.params),
            "non_embedding_parameters": members[0].cost.non_embedding_params,
            "flops_per_token": members[0].flops_per_token,
            "seconds_per_step": float(np.mean([curve.seconds[-1] / curve.step[-1] for curve in curves[stream]])),
            "paper_loss": PAPER_LOSS.get(stream),
        }
        for price, budget in budgets.items():
            losses = [loss_at(curve, price, budget) for curve in curves[stream]]
            row[f"loss_at_equal_{price}"] = float(np.mean(losses))
            row[f"spread_at_equal_{price}"] = float(np.std(losses, ddof=1)) if len(losses) > 1 else None
        rows.append(row)
    return sorted(rows, key=lambda row: row["loss_at_equal_tokens"])


def loss_at(curve: Curve, price: str, budget: float) -> float:
    """The loss when `budget` had been spent, between the evaluations around it."""
    return float(np.interp(budget, getattr(curve, price), curve.mean))
