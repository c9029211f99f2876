"""Checkpoints that appear whole or not at all, are checked when read, and never contain code.

A checkpoint is a folder `checkpoints/step-00000250/` of a run:

    model.safetensors      weights by parameter name
    optimizer.safetensors  AdamW's moments and counters as `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`; torch's RNG
    state.json             step, losses so far, configuration, data fingerprint, RNG of Python and numpy
    SHA256SUMS             of the other three (`sha256sum -c SHA256SUMS` checks them too)

It is written to a temporary folder, synced, renamed, and only then named by the pointer file `checkpoints/latest`
(and `checkpoints/best`). The snapshot is copied in memory and written by a background thread, so that training waits
for the copy only. Tensors are stored by parameter name and whole, and process 0 reads and writes them for all, so a
checkpoint does not depend on how many processes wrote it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rmt.errors import InputError, RunFailed
from rmt.train.distributed import ALONE, World, whole
from rmt.train.storage import digest, parse_sums, render_sums, sync, write_bytes, write_tensors, write_text

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors")
STATE, SUMS = "state.json", "SHA256SUMS"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass
class Snapshot:
    """All of a training state, copied: tensors per file, and what goes to `state.json`."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def take_snapshot(
    step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], world: World = ALONE
) -> Snapshot | None:
    """Copy weights, moments and random states to memory of their own: of process 0, the others get None."""
    weights: dict[str, Tensor] = {}
    moments = {f"rng/{name}": value for name, value in random_states(model).items()}
    for name, parameter in model.named_parameters():
        put(weights, name, parameter, world)
        for key, value in optimizer.state.get(parameter, {}).items():
            put(moments, f"{key}/{name}", value, world)
    if not world.first:
        return None
    state = {"format": FORMAT, "step": step, **state, "rng": {"python": random.getstate(), "numpy": numpy_state()}}
    return Snapshot(step, dict(zip(FILES, (weights, moments), strict=True)), state)


def put(tensors: dict[str, Tensor], name: str, tensor: Tensor, world: World) -> None:
    full = whole(tensor.detach())  # all processes take part
    if world.first:
        tensors[name] = full.to("cpu", copy=True).contiguous()


def random_states(model: nn.Module) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(kind: str, value: Tensor, model: nn.Module) -> None:
    if kind == "cpu":
        torch.set_rng_state(value)
    else:
        torch.cuda.set_rng_state(value, next(model.parameters()).device)


def numpy_state() -> list:
    name, keys, *rest = np.random.get_state(legacy=True)
    return [name, np.asarray(keys).tolist(), *rest]


def seed_everything(seed: int) -> None:
    """Every random state that a checkpoint holds, set from one number."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def check_fits(snapshot: Snapshot, model: nn.Module) -> None:
    """Refuse the weights of another model."""
    weights = snapshot.tensors[FILES[0]]
    expected = dict(model.named_parameters())
    if odd := sorted(set(expected) ^ set(weights)):
        raise InputError(f"the checkpoint's weights are not this model's: {odd[0]!r} is in one of them only.")
    for name, parameter in expected.items():
        if parameter.shape != weights[name].shape:
            shapes = f"{list(weights[name].shape)}, the model's {list(parameter.shape)}"
            raise InputError(f"the checkpoint's {name} has shape {shapes}: the configuration has changed.")


def restore(
    snapshot: Snapshot | None, model: nn.Module, optimizer: torch.optim.Optimizer, world: World = ALONE
) -> dict[str, Any]:
    """Put a checkpoint back: weights, moments, random states. Process 0 has the snapshot; all get its `state`."""
    weights, moments = (snapshot.tensors[name] for name in FILES) if snapshot is not None else ({}, {})
    state = world.share(snapshot.state if snapshot is not None else None)
    held = set(world.share(sorted(moments)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            world.fill(parameter, weights.get(name))
            for key in MOMENTS:
                full = f"{key}/{name}"
                if full in held:
                    shape_of = parameter if key != "step" else torch.zeros((), device=parameter.device)
                    value = torch.zeros_like(shape_of)
                    world.fill(value, moments.get(full))
                    optimizer.state[parameter][key] = value
        for kind, value in random_states(model).items():
            if f"rng/{kind}" in held:
                world.fill(value, moments.get(f"rng/{kind}"))
                set_random_state(kind, value, model)
    version, internal, gauss = state["rng"]["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["rng"]["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    return state


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write one checkpoint below `folder` and return its path. On failure nothing of it remains."""
    final = folder / f"step-{snapshot.step:08d}"
    temporary = folder / f".writing-{final.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        sums = [(name, write_tensors(temporary / name, tensors)) for name, tensors in snapshot.tensors.items()]
        text = json.dumps(snapshot.state, indent=1)
        sums.append((STATE, write_bytes(temporary / STATE, text.encode())))
        write_bytes(temporary / SUMS, render_sums(sums).encode())
        sync(temporary)
        if final.exists():  # a damaged one: an undamaged one is never written twice
            remove(final)
        temporary.rename(final)
        sync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def remove(path: Path) -> None:
    """Delete a checkpoint; whoever looks sees it whole or not at all."""
    aside = path.with_name(f".removing-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside)


def clean(folder: Path) -> None:
    """Remove what a killed process left half-written or half-deleted."""
    for path in (*folder.glob(".writing-*"), *folder.glob(".removing-*")):
        shutil.rmtree(path, ignore_errors=True)
    for pointer in ("latest", "best"):
        for path in folder.glob(f".{pointer}-*"):
            path.unlink(missing_ok=True)


def verify(path: Path) -> None:
    """Check every file of a checkpoint against its sha256; names the first that is wrong."""
    try:
        text = (path / SUMS).read_bytes().decode("ascii", errors="replace")
    except OSError as error:
        raise InputError(f"{path / SUMS} cannot be read: {error.strerror}. The checkpoint is incomplete.") from None
    recorded, found = parse_sums(text), []
    for name in (*FILES, STATE):
        try:
            found.append((name, digest(path / name)))
        except OSError as error:
            raise InputError(f"{path / name} cannot be read: {error.strerror}. The checkpoint is incomplete.") from None
        if recorded.get(name) != found[-1][1]:
            raise InputError(f"{path / name} does not have its sha256 of {path / SUMS}: one of the two is damaged.")
    if text != render_sums(found):
        raise InputError(f"{path / SUMS} is damaged.")


def read(path: Path) -> Snapshot:
    """Read one checkpoint, checking every file first. Nothing in it can run code: safetensors and JSON are data."""
    verify(path)
    state = read_state(path)
    tensors = {}
    for name in FILES:
        try:
            tensors[name] = load_file(path / name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path / name} cannot be read: {error}.") from None
    return Snapshot(state["step"], tensors, state)


def read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        form, step = state["format"], state["step"]
    except OSError as error:
        raise InputError(f"{path / STATE} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path / STATE} is damaged: it is not a checkpoint's record.") from None
    if form != FORMAT or not isinstance(step, int):
        raise InputError(f"{path} has checkpoint format {form}; this version reads {FORMAT}.")
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


def point(folder: Path, pointer: str, target: Path) -> None:
    """Make the file `pointer` name a checkpoint, atomically."""
    write_text(folder / pointer, target.name + "\n")


def pointed(folder: Path, pointer: str) -> Path | None:
    try:
        target = folder / (folder / pointer).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return target if target.is_dir() and target.parent == folder and target.name.startswith("step-") else None


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

    def mark(self, step: int, best: bool) -> None:
        """Set the pointers to a checkpoint that is there already."""
        self.wait()
        path = self.folder / f"step-{step:08d}"
        if best:
            point(self.folder, "best", path)
        point(self.folder, "latest", path)

    def wait(self) -> None:
        """Until the last write is on disk; raises what it failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what a write in the background has failed with, if it has."""
        if self._failure is None:
            return
        failure, self._failure = self._failure, None
        if isinstance(failure, OSError):
            raise RunFailed(
                f"a checkpoint could not be written to {self.folder}: {failure.strerror or failure}. "
                "Earlier checkpoints are safe: make room, then go on with --resume."
            ) from failure
        raise failure

    def _write(self, snapshot: Snapshot, best: bool) -> None:
        lower_priority()
        try:
            path = write(self.folder, snapshot)
            if best:
                point(self.folder, "best", path)
            point(self.folder, "latest", path)
            for old in self._outdated():
                remove(old)
        except BaseException as error:
            self._failure = error

    def _outdated(self) -> Iterator[Path]:
        kept = {pointed(self.folder, "best"), *listing(self.folder)[-self.keep :]}
        return (path for path in listing(self.folder) if path not in kept)


def lower_priority() -> None:
    """Let training go before this thread where they compete for a core (on Linux, where threads have priorities)."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + 5))
