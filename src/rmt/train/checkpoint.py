"""Checkpoints that appear whole or not at all, are checked when read, and never contain code.

A checkpoint is a folder `checkpoints/step-00000250/` of a run:

    model.safetensors      weights by parameter name
    optimizer.safetensors  AdamW's moments and counters as `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`; torch's RNG
    state.json             step, losses so far, configuration, data fingerprint, RNG of Python and numpy,
                           and the sha256 of the other files

It is written to a temporary folder, synced, renamed, and only then named by the pointer file `checkpoints/latest`
(and `checkpoints/best`). The snapshot is copied in memory and written by a background thread, so that training waits
for the copy only. Tensors are stored by parameter name and whole, so a checkpoint does not depend on how many
processes wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rmt.errors import InputError

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors")
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass
class Snapshot:
    """All of a training state, copied: tensors per file, and what goes to `state.json`."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def take_snapshot(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Snapshot:
    """Copy weights, moments and random states to memory of their own."""
    weights = {name: copy(parameter) for name, parameter in model.named_parameters()}
    moments = {"rng/cpu": torch.get_rng_state()}
    for index in range(torch.cuda.device_count()):
        moments[f"rng/cuda{index}"] = torch.cuda.get_rng_state(index)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            moments[f"{key}/{name}"] = copy(value)
    state = {"format": FORMAT, "step": step, **state, "rng": {"python": random.getstate(), "numpy": numpy_state()}}
    return Snapshot(step, {"model.safetensors": weights, "optimizer.safetensors": moments}, state)


def copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def numpy_state() -> list:
    name, keys, *rest = np.random.get_state(legacy=True)
    return [name, np.asarray(keys).tolist(), *rest]


def seed_everything(seed: int) -> None:
    """Every random state that a checkpoint holds, set from one number."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def restore(snapshot: Snapshot, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a loaded checkpoint back: weights, moments, random states."""
    weights, moments = (snapshot.tensors[name] for name in FILES)
    expected, found = dict(model.named_parameters()), set(weights)
    if set(expected) != found:
        odd = sorted(set(expected) ^ found)[0]
        raise InputError(f"the checkpoint's weights are not this model's: {odd!r} is in one of them only.")
    with torch.no_grad():
        for name, parameter in expected.items():
            if parameter.shape != weights[name].shape:
                shapes = f"{list(weights[name].shape)}, the model's {list(parameter.shape)}"
                raise InputError(f"the checkpoint's {name} has shape {shapes}: the configuration has changed.")
            parameter.copy_(weights[name])
            values = {key: moments[f"{key}/{name}"] for key in MOMENTS if f"{key}/{name}" in moments}
            if values:
                optimizer.state[parameter] = {
                    key: value.clone() if key == "step" else value.to(parameter.device, copy=True)
                    for key, value in values.items()
                }
    torch.set_rng_state(moments["rng/cpu"])
    for index in range(torch.cuda.device_count()):
        if f"rng/cuda{index}" in moments:
            torch.cuda.set_rng_state(moments[f"rng/cuda{index}"], index)
    version, internal, gauss = snapshot.state["rng"]["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = snapshot.state["rng"]["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write one checkpoint below `folder` and return its path. On failure nothing of it remains."""
    final = folder / f"step-{snapshot.step:08d}"
    temporary = folder / f".writing-{final.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        files = {}
        for name, tensors in snapshot.tensors.items():
            save_file(tensors, temporary / name)
            files[name] = {"sha256": digest(temporary / name), "bytes": (temporary / name).stat().st_size}
        text = json.dumps({**snapshot.state, "files": files}, indent=1)
        (temporary / "state.json").write_text(text, encoding="utf-8")
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        sync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def read(path: Path) -> Snapshot:
    """Read one checkpoint, checking every file against its sha256 first."""
    state = read_state(path)
    tensors = {}
    for name in FILES:
        expected = state["files"].get(name)
        file = path / name
        if expected is None or not file.is_file():
            raise InputError(f"{file} is missing: the checkpoint is incomplete.")
        if file.stat().st_size != expected["bytes"] or digest(file) != expected["sha256"]:
            raise InputError(f"{file} is damaged: its content does not match the recorded sha256.")
        try:
            tensors[name] = load_file(file)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} cannot be read: {error}.") from None
    return Snapshot(state["step"], tensors, state)


def read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise InputError(f"{path} has checkpoint format {state['format']}; this version reads {FORMAT}.")
        assert isinstance(state["step"], int)
        assert isinstance(state["files"], dict)
    except OSError as error:
        raise InputError(f"{path / 'state.json'} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path / 'state.json'} is damaged: it is not a checkpoint's record.") from None
    return state


def listing(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def newest(folder: Path) -> tuple[Snapshot | None, list[str]]:
    """The newest undamaged checkpoint, and a line for each damaged one that was passed over."""
    problems: list[str] = []
    for path in reversed(listing(folder)):
        try:
            return read(path), problems
        except InputError as error:
            problems.append(str(error))
    return None, problems


def clean(folder: Path) -> None:
    """Remove what a killed process left half-written."""
    for path in folder.glob(".writing-*"):
        shutil.rmtree(path, ignore_errors=True)


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point(folder: Path, pointer: str, target: Path) -> None:
    """Make the file `pointer` name a checkpoint, atomically."""
    temporary = folder / f".{pointer}-{os.getpid()}"
    temporary.write_text(target.name + "\n", encoding="utf-8")
    sync(temporary)
    temporary.rename(folder / pointer)
    sync(folder)


def pointed(folder: Path, pointer: str) -> Path | None:
    file = folder / pointer
    if not file.is_file():
        return None
    target = folder / file.read_text(encoding="utf-8").strip()
    return target if target.is_dir() else None


class Saver:
    """Writes snapshots in the background, one at a time, and keeps the last few and the best."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, snapshot: Snapshot, best: bool = False) -> None:
        """Start writing; waits first for a write that is still under way."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(snapshot, best), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until the last write is on disk; raises what it failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            if isinstance(failure, OSError):
                raise InputError(f"the checkpoint could not be written: {failure.strerror or failure}.") from failure
            raise failure

    def _write(self, snapshot: Snapshot, best: bool) -> None:
        try:
            path = write(self.folder, snapshot)
            if best:
                point(self.folder, "best", path)
            point(self.folder, "latest", path)
            for old in self._outdated():
                shutil.rmtree(old)
        except BaseException as error:
            self._failure = error

    def _outdated(self) -> Iterator[Path]:
        kept = {pointed(self.folder, "best"), *listing(self.folder)[-self.keep :]}
        return (path for path in listing(self.folder) if path not in kept)
