"""Does the best learning rate stay where it is when the model grows? Loss against learning rate at several widths.

Wider means more heads, a larger key dimension and more feed-forward neurons by one factor, at the same head dimension:
what the table of muTransfer scales. The runs are ordinary ones, `OUT/STREAM-mup/width-2/lr-0.01-seed-0`, so that an
interrupted sweep goes on where it stopped.
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
from rmt.errors import InputError
from rmt.experiments.pool import Job, run_pool
from rmt.train.run import RunConfig, read_log, write_text


def widen(model: ModelConfig, factor: int) -> ModelConfig:
    """The same model with `factor` times the heads, key dimension and neurons; the head dimension stays."""
    return model.replace(
        heads=factor * model.heads,
        kv_heads=None if model.kv_heads is None else factor * model.kv_heads,
        key_dim=factor * model.key_dim,
        width=None if model.width is None else factor * model.width,
        ff_dim=factor * model.ff_dim,
    )


@dataclass(frozen=True)
class Transfer:
    """What is trained: every model at every width, learning rate and seed.

    Args:
        models: base models with `init: mup`, their base dimensions set and their multipliers tuned, one per stream.
        train: the recipe of each, but for the learning rate.
        data: a token dataset with a dev split.
        out: the folder of the runs.
        widths: factors of the base model.
        learning_rates: of every model and width.
        seeds: runs per point.
        standard: train all of it a second time without muP, for contrast.
    """

    models: Sequence[ModelConfig]
    train: Sequence[TrainConfig]
    data: Path
    out: Path
    widths: Sequence[int]
    learning_rates: Sequence[float]
    seeds: int = 1
    standard: bool = False

    def __post_init__(self) -> None:
        for model in self.models:
            if model.init != "mup" or model.mup.base_heads is None:
                raise InputError("the configuration has no base dimensions of muP: give the best.yaml of `rmt tune`.")
        if len({model.stream for model in self.models}) != len(self.models):
            raise InputError("--config: give one file per stream.")
        if len(self.learning_rates) < 2:
            raise InputError("--lr: give at least two learning rates, for example 5e-3,1e-2,2e-2.")
        if not self.widths or min(self.widths) < 1:
            raise InputError("--widths: give whole factors of the base model, for example 1,2,4.")
        if self.seeds < 1:
            raise InputError(f"--seeds {self.seeds}: at least one is needed.")


def transfer(wanted: Transfer, console: Console, *, workers: int | None = None, quiet: bool = False) -> dict[str, Any]:
    """Run what is not finished; returns the curves, which also go to `OUT/transfer.json`."""
    dataset = TokenDataset.open(wanted.data)
    data = {"path": str(wanted.data), "fingerprint": dataset.fingerprint}
    curves: list[dict[str, Any]] = []
    jobs: dict[tuple[int, float, int], Job] = {}
    for model, train in zip(wanted.models, wanted.train, strict=True):
        for init in ("mup", "lecun") if wanted.standard else ("mup",):
            for width in wanted.widths:
                folder = wanted.out / f"{model.stream}-{init}" / f"width-{width}"
                wide = widen(model, width).replace(init=init)
                for lr in wanted.learning_rates:
                    for seed in range(wanted.seeds):
                        recipe = one_run(train, wide, lr, seed)
                        job = Job(folder / f"lr-{lr:g}-seed-{seed}", RunConfig(wide, recipe, data))
                        jobs[len(curves), lr, seed] = job
                dims = {name: getattr(wide, name) for name in ("heads", "head_dim", "key_dim", "ff_dim")}
                curves.append({"stream": model.stream, "init": init, "width": width, "dims": dims})
    order = sorted(jobs.values(), key=lambda job: -job.config.model.heads)  # the long ones first
    run_pool(order, workers=workers, console=console, quiet=quiet)
    for index, curve in enumerate(curves):
        losses = {
            lr: [final_loss(jobs[index, lr, seed].out) for seed in range(wanted.seeds)] for lr in wanted.learning_rates
        }
        means = {lr: float(np.mean(found)) for lr, found in losses.items()}
        curve["losses"] = {f"{lr:g}": found for lr, found in losses.items()}
        curve["best_lr"] = min(means, key=means.__getitem__)
        curve["best_loss"] = means[curve["best_lr"]]
    summary = {"widths": list(wanted.widths), "learning_rates": list(wanted.learning_rates), "curves": curves}
    write_text(wanted.out / "transfer.json", json.dumps(summary, indent=1) + "\n")
    return summary


def one_run(train: TrainConfig, model: ModelConfig, lr: float, seed: int) -> TrainConfig:
    """A recipe that measures and never fails: a rate that is too high shows as a high loss."""
    steps = train.total_steps(model.context)
    train = train.replace(steps=steps, tokens=None, lr=lr, seed=seed, eval_every=steps, checkpoint_every=steps, keep=1)
    return train.replace(sample_every=0, tensorboard=False, on_nan="skip", skip_limit=steps + 1)


def final_loss(run: Path) -> float:
    losses = [record["dev_ce"] for record in read_log(run) if "dev_ce" in record]
    if not losses:
        raise InputError(f"{run} has no dev loss: the data needs a dev split longer than one window.")
    return losses[-1] if np.isfinite(losses[-1]) else float("inf")
