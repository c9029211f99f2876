"""Several training runs on one machine: as many at a time as fit, each in a process of its own, all resumable.

A job is a run directory with its configuration. Every job is an ordinary `rmt train --resume`, so a pool that was
killed is simply started again: finished runs are skipped, others go on from their last checkpoint.

Several pools may work on the same jobs, as two commands with the same --out do. Before a pool starts a run it locks
the file `.claim` in the run directory, and the run's process inherits that lock: it lasts exactly as long as the
process, also when the pool dies before it. A run that is claimed is left alone and looked at again later: it is then
finished, or its claim is free and it is taken over. The kernel drops a dead process's locks, so nothing goes stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from rmt.errors import InputError, RunFailed
from rmt.train.run import RunConfig, read_tail
from rmt.train.view import Status, View, view_for

POLL_SECONDS = 0.5
GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class Job:
    """One run of a pool: where it is written, and what it does."""

    out: Path
    config: RunConfig

    @property
    def steps(self) -> int:
        return self.config.train.total_steps(self.config.model.context)

    def progress(self) -> Status | None:
        """The newest numbers that the run has written."""
        metrics, timing = read_tail(self.out), read_tail(self.out, "timing")
        steps = [record for record in metrics if "ce" in record]
        if not steps or not timing:
            return None
        dev = [record["dev_ce"] for record in metrics if "dev_ce" in record]
        last = steps[-1]
        return Status(
            step=last["step"],
            ce=last["ce"],
            lr=last["lr"],
            tokens_per_second=timing[-1]["tokens_per_second"],
            peak_share=timing[-1]["peak_share"],
            dev_ce=dev[-1] if dev else None,
        )

    def finished(self) -> bool:
        progress = self.progress()
        return progress is not None and progress.step >= self.steps and (self.out / "loss.png").exists()

    def check(self) -> None:
        """Refuse a run directory that holds another run: its result would be taken for this one's."""
        file = self.out / "config.yaml"
        if file.exists() and (differences := self.config.differences(RunConfig.load(file))):
            raise InputError(
                f"{self.out} was started with other settings ({'; '.join(differences)}): choose another --out, "
                "or the same settings."
            )


class Claim:
    """The right to start a job: a locked file that the job's process inherits."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.file = open(out / ".claim", "a")  # noqa: SIM115 -- held while the run is being started

    def take(self) -> bool:
        """False if another pool's process has it, or if the run is being written by one that no pool started."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(Path(self.file.name).with_name(".lock"), "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            return False
        return True

    def close(self) -> None:
        """Drops the lock, unless a process has inherited it."""
        self.file.close()


class Running:
    """A job's process and its line on the screen."""

    def __init__(self, job: Job, claim: Claim, slot: Slot, view: View) -> None:
        self.job, self.slot, self.view, self.shown = job, slot, view, 0
        recipe = job.out / "job.yaml"
        job.config.save(recipe)
        command = [*slot.launcher(), "train", "--config", str(recipe), "--out", str(job.out)]
        command += ["--data", str(job.config.data["path"]), "--resume", "--quiet"]
        self.errors = job.out / "errors.log"
        with open(self.errors, "w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **slot.environment()},
                stderr=errors,
                pass_fds=[claim.file.fileno()],
                process_group=0,  # Ctrl-C would reach it beside our SIGTERM, and a second signal ends it at once
            )
        claim.close()
        done = job.progress()
        view.start(done.step if done else 0, job.steps, f"{job.out.parent.name}/{job.out.name}")

    def refresh(self) -> None:
        progress = self.job.progress()
        if progress is not None and progress.step > self.shown:
            self.shown = progress.step
            self.view.update(progress)

    def failure(self) -> str:
        lines = self.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        own = [line.removeprefix("rmt: ") for line in lines if line.startswith("rmt: ")]
        return (own or lines or [f"exit status {self.process.returncode}"])[-1]


@dataclass(frozen=True)
class Slot:
    """Where a run computes: with so many threads, or on GPUs of its own, in one process or in several."""

    threads: int
    gpus: tuple[str, ...] = ()
    processes: int = 1

    def launcher(self) -> list[str]:
        if self.processes == 1:
            return [sys.executable, "-m", "rmt.cli"]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes)]
        return [sys.executable, *torchrun, "-m", "rmt.cli"]

    def environment(self) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        return threads | ({"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {})


def slots(workers: int | None, processes: int = 1) -> list[Slot]:
    """A slot per worker. By default as many workers as there are GPUs for them, or else cores."""
    gpus = visible_gpus()
    if gpus and processes > len(gpus):
        raise InputError(f"{processes} processes per run need as many GPUs: {len(gpus)} can be seen.")
    workers = workers or max(1, len(gpus or range(cores())) // processes)
    threads = max(1, cores() // (workers * processes))

    def share(worker: int) -> tuple[str, ...]:
        return tuple(gpus[(worker * processes + index) % len(gpus)] for index in range(processes)) if gpus else ()

    return [Slot(threads, share(worker), processes) for worker in range(workers)]


def visible_gpus() -> list[str]:
    """The GPUs that this command may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    numbered = [str(index) for index in range(torch.cuda.device_count())]
    return named if len(named) == len(numbered) else numbered


def run_pool(
    jobs: Sequence[Job],
    *,
    console: Console,
    workers: int | None = None,
    threads: int | None = None,
    processes: int = 1,
    quiet: bool = False,
) -> None:
    """Run all jobs, each unless it is finished or another pool has done it meanwhile.

    Args:
        jobs: what to run, in this order.
        console: where progress is shown.
        workers: runs at a time (default: as many as there are GPUs, or else cores).
        threads: of each run (default: an equal share of the cores).
        processes: of each run; several are started by torchrun.
        quiet: show nothing.
    """
    for job in jobs:
        job.check()
    free = [Slot(threads or slot.threads, slot.gpus, slot.processes) for slot in slots(workers, processes)]
    with ended_in_order():
        work_off([job for job in jobs if not job.finished()], free, console, quiet)


def work_off(waiting: list[Job], free: list[Slot], console: Console, quiet: bool) -> None:
    """Keep all slots busy until no job is left; on any failure the runs in progress are asked to save and end."""
    running: list[Running] = []
    told = False
    try:
        while waiting or running:
            while free and (found := next_job(waiting)):
                running.append(Running(*found, free.pop(0), view_for(console, quiet)))
            if waiting and not running and not told and not quiet:
                console.print(f"Another process is at work on the last {len(waiting)} run(s): waiting for it.")
                told = True
            if waiting or running:
                time.sleep(POLL_SECONDS)
            for item in list(running):
                item.refresh()
                if item.process.poll() is not None:
                    running.remove(item)
                    free.append(item.slot)
                    item.view.close()
                    if item.process.returncode != 0:
                        raise RunFailed(f"{item.job.out}: {item.failure()}")
    finally:
        stop(running)


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM and a closed terminal end the pool as Ctrl-C does: its runs save and end, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]  # nohup ignores
    before = {number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def next_job(waiting: list[Job]) -> tuple[Job, Claim] | None:
    """The first job that nobody has claimed, removed from `waiting` as are those that others have finished."""
    for job in list(waiting):
        claim = Claim(job.out)
        if not claim.take():
            continue
        waiting.remove(job)
        if not job.finished():
            return job, claim
        claim.close()
    return None


def stop(running: Sequence[Running]) -> None:
    """Ask the remaining processes to save and end; they get a while for it."""
    for item in running:
        item.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for item in running:
        try:
            item.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            item.process.kill()
        item.view.close()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
