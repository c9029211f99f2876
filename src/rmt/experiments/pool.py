"""Several training runs on one machine: as many at a time as fit, each in a process of its own, all resumable.

A job is a run directory with its configuration. Every job is an ordinary `rmt train --resume`, so a pool that was
killed is simply started again: finished runs are skipped, others go on from their last checkpoint, and the lock of
the run directory keeps two pools from working on the same run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from rmt.errors import RunFailed
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


class Running:
    """A job's process and its line on the screen."""

    def __init__(self, job: Job, threads: int, view: View) -> None:
        self.job, self.view, self.shown = job, view, 0
        job.out.mkdir(parents=True, exist_ok=True)
        recipe = job.out / "job.yaml"
        job.config.save(recipe)
        command = [sys.executable, "-m", "rmt.cli", "train", "--config", str(recipe), "--out", str(job.out)]
        command += ["--data", str(job.config.data["path"]), "--resume", "--quiet"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self.errors = job.out / "errors.log"
        with open(self.errors, "w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(command, env=environment, stderr=errors)
        done = job.progress()
        view.start(done.step if done else 0, job.steps, f"{job.out.parent.name}/{job.out.name}")

    def refresh(self) -> None:
        progress = self.job.progress()
        if progress is not None and progress.step > self.shown:
            self.shown = progress.step
            self.view.update(progress)

    def failure(self) -> str:
        lines = self.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1].removeprefix("rmt: ") if lines else f"exit status {self.process.returncode}"


def run_pool(jobs: Sequence[Job], *, workers: int, threads: int, console: Console, quiet: bool = False) -> None:
    """Run all jobs, `workers` at a time with `threads` threads each. Jobs that are finished are not repeated."""
    waiting = [job for job in jobs if not job.finished()]
    running: list[Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(Running(waiting.pop(0), threads, view_for(console, quiet)))
            time.sleep(POLL_SECONDS)
            for item in list(running):
                item.refresh()
                if item.process.poll() is not None:
                    running.remove(item)
                    item.view.close()
                    if item.process.returncode != 0:
                        raise RunFailed(f"{item.job.out}: {item.failure()}")
    finally:
        stop(running)


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
