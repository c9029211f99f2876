"""The search of muTransfer: random trials on a small base model, whose best settings hold for larger ones.

A `Search` says what is tried: the base model and its recipe, the interval of each parameter, how many trials. The
parameters of trial n are a pure function of the seed and n. All trials share the seed of the initial values, the order
of the data and the dev windows, and the loss that counts is the dev loss at the end. `search` runs what is not finished
with as many workers as asked for (`rmt.experiments.trials`); it may be run again, or beside itself, on one folder:

    OUT/study.db       the Optuna study
    OUT/trials/0007/   a trial: config.yaml, metrics.jsonl, timing.jsonl
    OUT/best.yaml      the best, for `rmt train --config`; its base dimensions are recorded, so that wider models follow
    OUT/trials.json    what was asked for, all trials, importances
    OUT/slices.png, OUT/importance.png (and .svg)
"""

from __future__ import annotations

import json
import math
import multiprocessing
import multiprocessing.connection
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
import yaml
from rich.console import Console

from rmt.config import ModelConfig, MuP, TrainConfig
from rmt.data import TokenDataset
from rmt.errors import InputError, RunFailed, suggest
from rmt.experiments import trials
from rmt.experiments.pool import cores
from rmt.experiments.progress import Board
from rmt.train.interrupt import Interrupt
from rmt.train.run import RunConfig, write_text
from rmt.train.start import check_fit

if TYPE_CHECKING:
    from optuna import Study

#: The paper's base model and its recipe (the vocabulary is the data's).
BASE_MODEL = ModelConfig(layers=4, heads=8, head_dim=32, key_dim=32, ff_dim=1024, context=128, init="mup")
BASE_TRAIN = TrainConfig(batch_size=32, steps=5000)

#: Intervals of the log-uniform draws. The paper prints [0.1, 1] for the last four, but its winners lie outside.
SPACE = {"lr": (1e-4, 1e-1), "alpha_in": (0.1, 10.0), "alpha_attn": (0.1, 10.0), "alpha_out": (0.1, 10.0)}
SPACE["sigma"] = (0.1, 10.0)

Pruner = Literal["none", "median"]
STATES = {"COMPLETE": "finished", "FAIL": "diverged", "PRUNED": "pruned", "RUNNING": "running", "WAITING": "waiting"}
IMPORTANCE = "PED-ANOVA"  # of the methods in Optuna the one that needs no further package
GRACE_SECONDS = 60.0
LOOK_SECONDS = 1.0  # between looks at how far the trials are


@dataclass(frozen=True)
class Search:
    """What is searched, and where it is written.

    Args:
        model: the base model; its own dimensions become the base of muTransfer.
        train: the recipe of every trial, but for the learning rate.
        data: a token dataset with a dev split.
        out: the folder of the search.
        trials: how many there should be in the end.
        seed: of the draws (that of training is `train.seed`, the same for all trials).
        space: interval of each parameter; a parameter that is left out keeps its value in `model` or `train`.
        pruner: none, or median (give up a trial whose dev loss on the way is above the median of the others).
        device: default: a GPU if there is one.
    """

    model: ModelConfig
    train: TrainConfig
    data: Path
    out: Path
    trials: int = 100
    seed: int = 0
    space: dict[str, tuple[float, float]] = field(default_factory=lambda: dict(SPACE))
    pruner: Pruner = "none"
    device: str | None = None

    def __post_init__(self) -> None:
        if self.model.init != "mup":
            raise InputError(f"the search tunes muP's multipliers: model.init must be mup, not {self.model.init}.")
        if self.trials < 1:
            raise InputError(f"--trials {self.trials}: at least one is needed.")
        if self.pruner not in get_args(Pruner):
            raise InputError(f"--pruner {self.pruner}: {suggest(self.pruner, get_args(Pruner))}")
        object.__setattr__(self, "model", self.model.replace(mup=own_base(self.model)))

    def draw(self, number: int) -> dict[str, float]:
        """The parameters of a trial, each log-uniform in its interval."""
        places = np.random.default_rng([self.seed, number]).random(len(SPACE))
        values = {}
        for name, place in zip(SPACE, places, strict=True):
            if name in self.space:
                low, high = self.space[name]
                value = float(f"{low * (high / low) ** place:.4g}")  # short enough to read
                values[name] = min(max(value, low), high)
        return values

    def with_parameters(self, parameters: dict[str, float]) -> tuple[ModelConfig, TrainConfig]:
        multipliers = {name: value for name, value in parameters.items() if name != "lr"}
        model = self.model.replace(mup=self.model.mup.replace(**multipliers))
        return model, self.train.replace(lr=parameters.get("lr", self.train.lr))

    def run_config(self, parameters: dict[str, float]) -> RunConfig:
        """What a trial trains."""
        model, train = self.with_parameters(parameters)
        steps = train.total_steps(model.context)
        every = steps if self.pruner == "none" else max(1, steps // trials.PRUNER_EVALUATIONS)
        train = train.replace(steps=steps, tokens=None, eval_every=every, sample_every=0, stop_at=None)
        train = train.replace(tensorboard=False, wandb=None, on_nan="stop")
        return RunConfig(model, train, {"path": str(self.data), "fingerprint": self.fingerprint})

    @property
    def fingerprint(self) -> str:
        return TokenDataset.open(self.data).fingerprint

    def asked(self) -> dict[str, Any]:
        """What must be the same for two searches to be one."""
        return {
            "model": self.model.to_dict(),
            "train": self.train.to_dict(),
            "data": self.fingerprint,
            "seed": self.seed,
            "space": {name: list(interval) for name, interval in self.space.items()},
            "pruner": self.pruner,
        }


def own_base(model: ModelConfig) -> MuP:
    """A model as its own base: every ratio is 1, and a wider copy of it is a muTransfer."""
    return model.mup.replace(
        base_heads=model.heads,
        base_head_dim=model.head_dim,
        base_key_dim=model.key_dim,
        base_width=model.width,
        base_ff_dim=model.ff_dim,
    )


def parse_space(changes: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The default intervals with changes such as `lr=1e-3:1e-1`; `sigma=1` fixes sigma."""
    space = dict(SPACE)
    for change in changes:
        name, _, interval = change.partition("=")
        if name not in SPACE:
            raise InputError(f"--space {change}: there is no parameter {name!r}. {suggest(name, SPACE)}")
        first, _, last = interval.partition(":")
        try:
            low, high = float(first), float(last or first)
        except ValueError:
            raise InputError(f"--space {change}: write an interval such as {name}=1e-3:1e-1.") from None
        space[name] = (low, high)
        if not (0 < low <= high < math.inf):
            raise InputError(f"--space {change}: the interval must be finite and above zero, the lower end first.")
    return space


def search(wanted: Search, console: Console, *, workers: int | None = None, quiet: bool = False) -> int | None:
    """Run all trials that are not finished; returns the signal that stopped it, or None when all are done."""
    workers = workers or cores()
    threads = max(1, min(torch.get_num_threads(), cores() // workers))
    study = plan(wanted)
    context = multiprocessing.get_context("spawn")
    problems = context.SimpleQueue()
    arguments = (wanted, threads, os.getpid(), problems)
    with Interrupt() as interrupt, Board(console, wanted.out.name, quiet) as board:
        count = min(workers, len(trials.unfinished(study)))
        processes = [context.Process(target=trials.work, args=arguments) for _ in range(count)]
        for process in processes:
            process.start()
        working: list[Any] = [process.sentinel for process in processes]
        try:
            while working and interrupt.requested is None and not any(process.exitcode for process in processes):
                board.show(*progress(study))
                for ended in multiprocessing.connection.wait(working, LOOK_SECONDS):
                    working.remove(ended)
        finally:
            end(processes)
        board.show(*progress(study))
    if not trials.unfinished(study):
        return None
    if interrupt.requested is not None:
        return interrupt.requested
    raise RunFailed(problems.get() if not problems.empty() else f"a worker of {wanted.out} died: start it again.")


def end(processes: Sequence[Any]) -> None:
    """Ask workers that are still at it to end, and give them a while; their trials will be done again."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()


def plan(wanted: Search) -> Study:
    """The study with all its trials, made or found again; another search in the same folder is refused."""
    dataset = TokenDataset.open(wanted.data)
    check_fit(wanted.model, wanted.train, dataset)
    dataset.windows("dev", wanted.model.context)
    optuna = trials.import_optuna()
    try:
        (wanted.out / "trials").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {wanted.out}: {error.strerror}. Choose another --out.") from None
    with trials.locked(wanted.out):
        study = trials.open_study(wanted)
        asked, before = wanted.asked(), study.user_attrs.get("asked")
        if before is None:
            study.set_user_attr("asked", asked)
        elif found := differences(before, asked):
            raise InputError(
                f"{wanted.out} holds another search ({'; '.join(found)}): use the same settings, or another --out."
            )
        distributions = {
            name: optuna.distributions.FloatDistribution(low, high, log=True)
            for name, (low, high) in wanted.space.items()
        }
        trials.enqueue(study, wanted.draw, distributions, wanted.trials)
    return study


def differences(before: Any, after: Any, name: str = "") -> list[str]:
    """What differs, as `train.steps: 100 -> 200`."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = sorted({*before, *after})
        return [d for key in names for d in differences(before.get(key), after.get(key), f"{name}.{key}".strip("."))]
    return [] if before == after else [f"{name}: {before} -> {after}"]


def rows(study: Study) -> list[dict[str, Any]]:
    """All trials, by number."""
    return [
        {
            "number": trial.number,
            "state": STATES[trial.state.name],
            "loss": trial.value if trial.state.is_finished() else None,
            "seconds": trial.user_attrs.get("seconds"),
            **trial.params,
        }
        for trial in study.get_trials(deepcopy=False)
    ]


def progress(study: Study) -> tuple[int, int, float | None]:
    """Trials that are over, trials in all, and the lowest loss."""
    found = rows(study)
    losses = [row["loss"] for row in ranked(found)]
    over = sum(row["state"] not in ("running", "waiting") for row in found)
    return over, len(found), min(losses, default=None)


def ranked(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Finished trials, the best first."""
    return sorted((row for row in found if row["state"] == "finished"), key=lambda row: row["loss"])


def importances(study: Study) -> dict[str, float]:
    """How much each parameter decides whether a trial is among the best tenth; the shares sum to 1."""
    optuna = trials.import_optuna()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental in some versions
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: float(share) for name, share in found.items()}


def write_results(wanted: Search) -> dict[str, Any]:
    """Write best.yaml, trials.json and the figures; returns what they hold and where they are."""
    from rmt.report.tuning import importance_figure, slices_figure

    with trials.locked(wanted.out):
        study = trials.open_study(wanted)
    found = rows(study)
    best = ranked(found)[:1]
    if not best:
        raise RunFailed(f"all trials of {wanted.out} diverged: search smaller values, --space lr=1e-5:1e-3.")
    shares = importances(study)
    model, train = wanted.with_parameters({name: best[0][name] for name in wanted.space})
    head = f"# Trial {best[0]['number']} of {len(found)}, dev loss {best[0]['loss']:.4f}.\n"
    settings = {"model": model.to_dict(), "train": train.to_dict()}
    write_text(wanted.out / "best.yaml", head + yaml.safe_dump(settings, sort_keys=False))
    summary = {
        "asked": wanted.asked(),
        "best": best[0],
        "importance_method": IMPORTANCE,
        "importances": shares,
        "trials": found,
    }
    write_text(wanted.out / "trials.json", compact(summary))
    stream = wanted.model.stream
    figures = slices_figure(found, wanted.space, stream, wanted.out / "slices")
    figures += importance_figure(shares, IMPORTANCE, stream, wanted.out / "importance")
    files = [wanted.out / "best.yaml", wanted.out / "trials.json", *figures]
    return {**summary, "files": [str(path) for path in files]}


def compact(summary: dict[str, Any]) -> str:
    """JSON with one line per trial."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in summary["trials"])
    rest = json.dumps({name: value for name, value in summary.items() if name != "trials"}, indent=1)
    return f'{rest[:-2]},\n "trials": [\n{lines}\n ]\n}}\n'
