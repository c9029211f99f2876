"""What is checked and set up before the first step: do data, recipe and processes fit, may this run be resumed?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from rmt.config import ModelConfig, TrainConfig
from rmt.data import TokenDataset
from rmt.errors import InputError, RunFailed
from rmt.train import checkpoint
from rmt.train.distributed import ALONE, World
from rmt.train.run import RunConfig, RunDirectory


@contextlib.contextmanager
def full_disk_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
        raise RunFailed(
            f"the run in {path} cannot go on: {what}. Its checkpoints are safe: mend this, then go on with --resume."
        ) from error


def check_fit(model: ModelConfig, train: TrainConfig, dataset: TokenDataset, world: World = ALONE) -> None:
    if dataset.vocab_size > model.vocab_size:
        raise InputError(
            f"the data has a vocabulary of {dataset.vocab_size}, the model of {model.vocab_size}: "
            f"set model.vocab_size to {dataset.vocab_size}, or prepare the data with a smaller tokenizer."
        )
    dataset.windows("train", model.context)  # refuses a corpus shorter than one window
    steps = train.total_steps(model.context)
    if train.stop_at is not None and train.stop_at > steps:
        raise InputError(f"train.stop_at = {train.stop_at} lies behind the last step, {steps}: make it smaller.")
    if train.batch_size % world.size:
        raise InputError(f"train.batch_size = {train.batch_size} cannot be divided among {world.size} processes.")


def check_resumable(run: RunDirectory, config: RunConfig, resume: bool) -> None:
    if not run.config_file.exists():
        if checkpoint.listing(run.checkpoints):
            raise InputError(f"{run.path} has checkpoints but no config.yaml: put it back, or choose another --out.")
        return
    if not resume:
        raise InputError(f"{run.path} holds a run already: add --resume to go on with it, or choose another --out.")
    differences = config.differences(RunConfig.load(run.config_file))
    if differences:
        raise InputError(
            f"{run.path} was started with other settings ({'; '.join(differences)}): "
            "resume with the same, or start a new run."
        )


def find_device(device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def deterministic(train: TrainConfig) -> Iterator[None]:
    """Same inputs, same bits, where the configuration asks for it; the former settings come back afterwards."""
    before = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if train.compile:
            torch.use_deterministic_algorithms(True)  # tells the compiler too, and imports it: seconds
        else:
            torch.set_deterministic_debug_mode("error")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
