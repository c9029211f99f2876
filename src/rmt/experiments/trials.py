"""One search, many workers: an Optuna study in SQLite that holds all trials from the start, and the runs they become.

All trials are put into the study before the first one starts, so what is tried does not depend on who tries it. A
worker claims a trial by taking the lock of its run directory, `OUT/trials/0007`. The kernel drops that lock when the
worker dies, however it dies: a trial that the study calls running but whose lock is free is somebody's unfinished work,
and the next worker does it again from its first step. SQLite cannot lock rows, so everything that writes to the study
does so under one more lock, `OUT/.lock`. Any number of workers and commands on one machine may share a search.

A trial is an ordinary run without what only long runs need. One whose loss is not finite has failed, and is finished.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rmt.data import TokenDataset
from rmt.errors import InputError, RunFailed
from rmt.train.interrupt import Interrupt
from rmt.train.log import Mirror
from rmt.train.loop import Trainer
from rmt.train.run import RunConfig, RunDirectory
from rmt.train.start import deterministic, find_device, full_disk_explained
from rmt.train.view import SilentView

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

    from rmt.experiments.tune import Search

SQLITE_TIMEOUT = 120.0  # seconds that a reader may wait for a writer
POLL_SECONDS = 0.5  # between looks at the study where there is nothing to claim
PRUNER_EVALUATIONS = 5  # per trial, where the pruner decides on them


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise InputError("a search needs Optuna: `pip install residual-matrix-transformer[tune]`.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Only one process at a time, of all that work on the search in `out`."""
    with open(out / ".lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def open_study(search: Search) -> Study:
    """The study in `OUT/study.db`, made if it is not there. Hold the lock."""
    optuna = import_optuna()
    from sqlalchemy.exc import SQLAlchemyError

    file = search.out / "study.db"
    try:
        waiting = {"connect_args": {"timeout": SQLITE_TIMEOUT}}
        storage = optuna.storages.RDBStorage(f"sqlite:///{file}", engine_kwargs=waiting)
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{file} cannot be read ({reason}): put it back, or choose another --out.") from None
    pruner = optuna.pruners.MedianPruner() if search.pruner == "median" else optuna.pruners.NopPruner()
    sampler = optuna.samplers.RandomSampler(seed=search.seed)
    return optuna.create_study(
        storage=storage, study_name="rmt", direction="minimize", sampler=sampler, pruner=pruner, load_if_exists=True
    )


def enqueue(study: Study, draw: Callable[[int], dict[str, float]], distributions: Any, trials: int) -> None:
    """Put trials in until there are `trials`. Hold the lock; interrupted, it goes on with the next number."""
    optuna = import_optuna()
    for number in range(len(study.get_trials(deepcopy=False)), trials):
        waiting = optuna.trial.create_trial(
            state=optuna.trial.TrialState.WAITING, params=draw(number), distributions=distributions
        )
        study.add_trial(waiting)


def unfinished(study: Study) -> list[FrozenTrial]:
    """Trials that are running, or seem to be, then trials that wait; each in order."""
    found = [trial for trial in study.get_trials(deepcopy=False) if not trial.state.is_finished()]
    return sorted(found, key=lambda trial: (trial.state.name != "RUNNING", trial.number))


@dataclass
class Claim:
    """A trial that belongs to this process for as long as its run directory is open."""

    trial: Trial
    directory: RunDirectory


def claim(study: Study, out: Path) -> Claim | None:
    """The next trial that nobody works on, or None."""
    optuna = import_optuna()
    with locked(out):
        for found in unfinished(study):
            folder = out / "trials" / f"{found.number:04d}"
            if found.state.name == "RUNNING":
                try:
                    directory = RunDirectory(folder)
                except InputError:  # another worker has it
                    continue
                return Claim(optuna.trial.Trial(study, found._trial_id), directory)
            directory = RunDirectory(folder)
            trial = study.ask()  # the first that waits, which is this one
            assert trial.number == found.number
            return Claim(trial, directory)
    return None


class TrialRun(Trainer):
    """An ordinary run without checkpoints, samples, figure and measured peak; it may be given up half-way."""

    parent: int  # the process that started this worker
    report: Callable[[int, float], None] | None = None

    def final_loss(self) -> float | None:
        """Train to the end; returns the dev loss, or None where a signal came before."""
        self.restore()
        self.begin()
        self.repeat(self.steps)
        return self.dev_ce if self.step >= self.steps and not self.evaluation_due else None

    def begin(self) -> None:
        self.directory.write("config.yaml", self.config.to_yaml())
        self.peak, self.flops_per_token = None, 0
        self.mirror = Mirror(self.directory.path, tensorboard=False, wandb=None, config={}, step=0)

    def save(self) -> None:
        """Nothing: a trial is short, and one that is interrupted starts again."""

    def must_stop(self) -> bool:
        """Also when the command that started this worker was killed."""
        return super().must_stop() or os.getppid() != self.parent

    def evaluate(self) -> None:
        super().evaluate()
        if self.report is not None and self.dev_ce is not None and not self.evaluation_due:
            self.report(self.step, self.dev_ce)


def perform(mine: Claim, study: Study, search: Search, dataset: TokenDataset, interrupt: Interrupt) -> bool:
    """Train a claimed trial and tell the study; False where it was interrupted."""
    optuna = import_optuna()
    trial, state = mine.trial, optuna.trial.TrialState
    config: RunConfig = search.run_config(trial.params)
    steps = config.train.total_steps(config.model.context)
    began = time.monotonic()

    def report(step: int, loss: float) -> None:
        with locked(search.out), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a trial that is done again reports again
            trial.report(loss, step)
            if step < steps and trial.should_prune():
                raise optuna.TrialPruned

    def tell(state: Any, loss: float | None = None) -> None:
        with locked(search.out):
            trial.set_user_attr("seconds", round(time.monotonic() - began, 2))
            trial.set_user_attr("process", os.getpid())
            study.tell(trial, loss, state)

    with mine.directory, deterministic(config.train), full_disk_explained(mine.directory.path):
        run = TrialRun(config, dataset, mine.directory, find_device(search.device), SilentView(), interrupt)
        run.parent = os.getppid()
        if search.pruner != "none":
            run.report = report
        try:
            loss = run.final_loss()
        except RunFailed:  # the loss or a gradient was not finite
            tell(state.FAIL)
            return True
        except optuna.TrialPruned:
            tell(state.PRUNED)
            return True
        if loss is None:
            return False
        tell(*((state.COMPLETE, loss) if math.isfinite(loss) else (state.FAIL, None)))
        return True


def work(search: Search, threads: int, parent: int, problems: Any) -> None:
    """A worker process: claims and trains until every trial is finished, or until it is asked to stop."""
    torch.set_num_threads(threads)
    with Interrupt() as interrupt:
        try:
            dataset = TokenDataset.open(search.data)
            with locked(search.out):
                study = open_study(search)
            while interrupt.requested is None and os.getppid() == parent:
                mine = claim(study, search.out)
                if mine is not None:
                    if not perform(mine, study, search, dataset, interrupt):
                        return
                elif unfinished(study):  # others are at work; should they die, their trials are free again
                    time.sleep(POLL_SECONDS)
                else:
                    return
        except (InputError, RunFailed) as error:
            problems.put(str(error))
            raise SystemExit(1) from None
