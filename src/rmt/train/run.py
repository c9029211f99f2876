"""A run directory: everything one training run leaves behind, and the lock that lets only one process write it.

config.yaml        the resolved configuration: model, train, data
metrics.jsonl      one line per step and per evaluation; a pure function of configuration and data
timing.jsonl       what the clock said: seconds and tokens per second (differs from run to run)
environment.json   versions, git commit, machine
samples.txt        text sampled during training
faults/            a record of each step that was not allowed to change the weights
checkpoints/       see rmt.train.checkpoint
loss.png, events*  the loss curve; TensorBoard's files
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import yaml

from rmt.config import ModelConfig, TrainConfig, read_yaml
from rmt.errors import InputError
from rmt.train.storage import write_text

#: Settings of a finished or interrupted run that may be changed on resume: they do not alter the result.
FREE_ON_RESUME = {
    "stop_at",
    "keep",
    "checkpoint_every",
    "eval_every",
    "eval_tokens",
    "sample_every",
    "on_nan",
    "skip_limit",
    "parallel",
    "tensorboard",
    "wandb",
}


@dataclass(frozen=True)
class RunConfig:
    """What a run was asked to do, as written to config.yaml."""

    model: ModelConfig
    train: TrainConfig
    data: dict[str, Any]  # path and fingerprint

    def save(self, path: Path) -> None:
        write_text(path, self.to_yaml())

    def to_yaml(self) -> str:
        values = {"model": self.model.to_dict(), "train": self.train.to_dict(), "data": self.data}
        return yaml.safe_dump(values, sort_keys=False)

    @classmethod
    def load(cls, path: Path) -> RunConfig:
        values = read_yaml(path)
        if not isinstance(values, dict) or not {"model", "train", "data"} <= values.keys():
            raise InputError(f"{path} is not a run's configuration: it needs the sections model, train and data.")
        model, train = ModelConfig.from_dict(values["model"]), TrainConfig.from_dict(values["train"])
        return cls(model, train, values["data"])

    def differences(self, other: RunConfig) -> list[str]:
        """Settings that differ from `other` and would change the result, as `name: theirs -> ours`."""
        lines = []
        for section in ("model", "train"):
            ours, theirs = getattr(self, section).to_dict(), getattr(other, section).to_dict()
            for key, value in ours.items():
                if value != theirs[key] and not (section == "train" and key in FREE_ON_RESUME):
                    lines.append(f"{section}.{key}: {theirs[key]} -> {value}")
        if self.data["fingerprint"] != other.data["fingerprint"]:
            lines.append(f"data: {other.data['fingerprint'][:12]} -> {self.data['fingerprint'][:12]} (other tokens)")
        return lines


class RunDirectory:
    """Opens a run directory for writing; use as a context manager so that the lock is released."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.checkpoints = path / "checkpoints"
        self._files: dict[str, FileIO] = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path / ".lock", "a+")  # noqa: SIM115 -- held for as long as the run is
        except OSError as error:
            raise InputError(f"cannot write the run to {path}: {error.strerror}. Choose another --out.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "another process"
            self._lock.close()
            raise InputError(f"{path} is being written by {holder}: wait for it, or choose another --out.") from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {platform.node()}")
        self._lock.flush()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._lock.close()  # the kernel drops the lock with it, also when the process is killed

    def log(self, name: str, record: dict[str, Any]) -> None:
        """Append one line to `metrics.jsonl` or `timing.jsonl`."""
        if name not in self._files:
            self._files[name] = open(self.path / f"{name}.jsonl", "ab", buffering=0)  # noqa: SIM115
        line = json.dumps(record).encode() + b"\n"
        if self._files[name].write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / f"{name}.jsonl"))

    def rewind(self, step: int) -> None:
        """Forget what was logged after `step`, since those steps will be repeated, and what a kill left behind."""
        for name in ("config.yaml", "environment.json", "metrics.jsonl", "timing.jsonl", "samples.txt"):
            for left in self.path.glob(f".{name}-*"):
                left.unlink()
        for name in ("metrics", "timing"):
            path = self.path / f"{name}.jsonl"
            if path.exists():
                kept = [line for line in complete_lines(path) if json.loads(line)["step"] <= step]
                write_text(path, "".join(kept))

        path = self.path / "samples.txt"
        if path.exists():
            parts = re.split(r"^(?==== step \d+$)", path.read_bytes().decode("utf-8"), flags=re.MULTILINE)
            kept = [part for part in parts if part and int(part.split(maxsplit=3)[2]) <= step]
            write_text(path, "".join(kept))

    def sample(self, step: int, text: str) -> None:
        with open(self.path / "samples.txt", "a", encoding="utf-8", newline="") as file:
            file.write(f"=== step {step}\n{text}\n\n")

    def fault(self, step: int, record: dict[str, Any]) -> Path:
        """Keep what is known of a step that was refused."""
        path = self.path / "faults" / f"step-{step:08d}.json"
        path.parent.mkdir(exist_ok=True)
        write_text(path, json.dumps({"step": step, **record}, indent=1) + "\n")
        return path

    def write(self, name: str, text: str) -> None:
        write_text(self.path / name, text)


class Onlooker(RunDirectory):
    """The run directory for all processes but the one that writes it: nothing is opened, nothing written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.checkpoints = path / "checkpoints"

    def __exit__(self, *_: object) -> None: ...

    def log(self, name: str, record: dict[str, Any]) -> None: ...

    def rewind(self, step: int) -> None: ...

    def sample(self, step: int, text: str) -> None: ...

    def fault(self, step: int, record: dict[str, Any]) -> Path:
        return self.path / "faults"

    def write(self, name: str, text: str) -> None: ...


def read_log(run: Path, name: str = "metrics") -> list[dict[str, Any]]:
    """The records of `metrics.jsonl` or `timing.jsonl` of a run."""
    path = run / f"{name}.jsonl"
    return [json.loads(line) for line in complete_lines(path)] if path.exists() else []


def read_tail(run: Path, name: str = "metrics", size: int = 65_536) -> list[dict[str, Any]]:
    """The last records of a log, without reading all of it."""
    path = run / f"{name}.jsonl"
    if not path.exists():
        return []
    with open(path, "rb") as file:
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - size))
        lines = file.read().decode("utf-8").splitlines(keepends=True)
    whole = lines[1:] if length > size else lines
    return [json.loads(line) for line in whole if line.endswith("\n")]


def complete_lines(path: Path) -> list[str]:
    """All lines but a last one that a crash cut short."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return lines if not lines or lines[-1].endswith("\n") else lines[:-1]


def environment(device: torch.device) -> dict[str, Any]:
    """What another person needs to know to judge or repeat the run."""
    versions = {name: _version(name) for name in ("residual-matrix-transformer", "torch", "numpy", "tokenizers")}
    return {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "versions": versions,
        "git_commit": _git_commit(),
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        },
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
