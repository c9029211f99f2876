"""The most memory that a training step holds, measured in a fresh process for each row, next to what `rmt count` says.

The process first trains a tiny model, so that libraries and threads are there; what it holds then is the base. It then
builds the model, makes one step, and measures the highest resident memory of a second one. Memory that is freed goes
back to the system at once (a fixed threshold for glibc's malloc), so the figure is what the step needs and not what
an allocator kept. Started as `python -m rmt.bench.memory` with a row as JSON on its standard input.
"""

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rmt.bench.cases import Case
from rmt.bench.step import MIDDLE, WIDER, batch_of, new_stepper
from rmt.bench.stock import StockStepper
from rmt.config import ModelConfig, Ops, Recompute
from rmt.errors import RunFailed
from rmt.theory.accounting import count

POLICIES: tuple[Recompute, ...] = ("none", "gelu", "ff", "full")
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "1"}
LONGEST = 900  # seconds


@dataclass(frozen=True)
class Job:
    """One measurement. `stock` is the transformer of torch modules; `ops` and `recompute` are of our models."""

    config: dict[str, Any]
    batch: int
    stock: bool = False
    ops: Ops = "auto"
    recompute: Recompute = "none"


def jobs(case: Case) -> dict[str, Job]:
    matrix, vector = case.config.to_dict(), case.vector.to_dict()
    made = {}
    if "stock" in case.rows:
        made["stock"] = Job(vector, case.batch, stock=True)
    if "vector" in case.rows:
        made |= {named("vector", kind): Job(vector, case.batch, recompute=kind) for kind in POLICIES}
    made |= {row: Job(matrix, case.batch, ops=row) for row in case.matrix_rows}
    made |= {named(case.best, kind): Job(matrix, case.batch, ops=case.best, recompute=kind) for kind in POLICIES[1:]}
    for times in WIDER[1:]:
        key_dim = times * case.config.key_dim
        made[f"key_dim {key_dim}"] = Job(matrix | {"key_dim": key_dim}, case.batch, ops=case.best)
    return made


def named(row: str, recompute: Recompute) -> str:
    return row if recompute == "none" else f"{row}, recompute {recompute}"


def measure(case: Case, threads: int, say: Callable[[str], object] = lambda text: None) -> dict[str, Any]:
    """Bytes of each row: measured and, where the accounting describes it, predicted."""
    rows: dict[str, dict[str, float]] = {}
    for name, job in jobs(case).items():
        say(f"memory: {name}")
        config = ModelConfig.from_dict(job.config)
        answer = measure_apart(job, threads)
        fixed = 4 * 4 * int(count(config).params)
        rows[name] = {"measured": answer, "beyond_weights_gradients_moments": answer - fixed}
        if not job.stock and job.ops != "plain":
            predicted = count(config, batch=job.batch, recompute=job.recompute).memory.peak
            rows[name] |= {"predicted": predicted, "predicted / measured": predicted / answer}
    return {"rows": rows}


def measure_apart(job: Job, threads: int) -> int:
    """Run `measure_here` in a process of its own."""
    command = [sys.executable, "-m", "rmt.bench.memory", str(threads)]
    environment = os.environ | GIVE_BACK
    try:
        answer = subprocess.run(
            command, input=json.dumps(asdict(job)), env=environment, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"bench: a memory measurement took more than {LONGEST} s; use a smaller --shape.") from None
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or [f"status {answer.returncode}"])[-1]
        raise RunFailed(f"bench: a memory measurement failed: {last}")
    return int(answer.stdout)


def measure_here(job: Job) -> int:
    """Bytes at the highest moment of a step, beyond what a process that has trained a tiny model holds."""
    config = ModelConfig.from_dict(job.config)
    tiny = config.replace(layers=1, heads=2, head_dim=8, key_dim=8, ff_dim=32, vocab_size=64, context=32)
    train(tiny, job, steps=2)
    settle()
    base = status("VmRSS")
    run = train(config, job, steps=1)
    settle()
    reset_peak()
    run()
    return status("VmHWM") - base


def train(config: ModelConfig, job: Job, steps: int) -> Callable[[], object]:
    """Make some steps; returns the function that makes one more."""
    ids_BT, targets_BT = batch_of(config, job.batch)
    run: Callable[[], object]
    if job.stock:
        stock = StockStepper(config)

        def run() -> object:
            return stock.step(ids_BT, targets_BT)
    else:
        stepper = new_stepper(config, job.ops, job.recompute)

        def run() -> object:
            return stepper.step(MIDDLE, ids_BT, targets_BT)

    for _ in range(steps):
        run()
    return run


def settle() -> None:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def status(name: str) -> int:
    """Bytes of one line of the process's status (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RunFailed(f"bench: this system does not report {name}; memory is measured on Linux only.")


def reset_peak() -> None:
    """Let the highest resident memory start again from here. Where that is not allowed it is that of all steps."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(measure_here(Job(**json.loads(sys.stdin.read()))))
