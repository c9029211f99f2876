"""Real processes for the tests of faults, without paying for `import torch` each time.

`python processes.py` imports the package once and then forks a process for every job it is told of; a job runs `rmt`
commands one after the other, alone or as one of several ranks. A job can be told to send itself a signal at the n-th
call of a function, to make a loss NaN, to write down the tokens it sees, or to live with a limit on file sizes.
`Processes` is the other end, for the tests.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


class Processes:
    """Starts jobs and waits for them."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == "ready\n"

    def start(self, folder: Path, *commands: list[str], rank: int = 0, size: int = 1, port: int = 0, **job: Any) -> Job:
        """Run `rmt` with each of the argument lists. The job's output goes to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        job = {"commands": commands, "output": str(folder / f"output-{rank}.txt"), **job}
        if size > 1:
            ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank}
            job["environment"] = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return Job(self, self._ask(job), Path(job["output"]))

    def run(self, folder: Path, *commands: list[str], **job: Any) -> Job:
        done = self.start(folder, *commands, **job)
        done.wait()
        return done

    def start_two(self, folder: Path, *commands: list[str], **job: Any) -> list[Job]:
        port = free_port()
        return [self.start(folder, *commands, rank=rank, size=2, port=port, **job) for rank in (0, 1)]

    def run_two(self, folder: Path, *commands: list[str], **job: Any) -> list[Job]:
        jobs = self.start_two(folder, *commands, **job)
        for one in jobs:
            one.wait()
        return jobs

    def _ask(self, question: Any) -> Any:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(question) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def close(self) -> None:
        self.server.communicate(timeout=60)


class Job:
    def __init__(self, processes: Processes, pid: int, output: Path) -> None:
        self.processes, self.pid, self.output = processes, pid, output
        self.status: int | None = None

    def poll(self) -> int | None:
        """The exit status (minus the signal's number for a process that was killed), or None while it runs."""
        if self.status is None:
            self.status = self.processes._ask({"poll": self.pid})
        return self.status

    def wait(self, seconds: float = 240) -> int:
        deadline = time.monotonic() + seconds
        while (status := self.poll()) is None:
            assert time.monotonic() < deadline, f"still running: {self.text()}"
            time.sleep(0.01)
        return status

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve() -> None:
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor

    import rmt
    import rmt.cli
    import rmt.commands.train
    import rmt.report.curves
    import rmt.train.loop

    torch.set_num_threads(1)
    rmt.build(rmt.preset("rmt-tiny"))  # imports what torch imports late
    rmt.train.loop.matmul_peak = lambda *_: 1e12
    rmt.report.curves.loss_curve = lambda *_: None
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if "poll" in job:
            pid, status = os.waitpid(job["poll"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            obey(job)
        print(pid, flush=True)


def obey(job: dict[str, Any]) -> None:
    """In the forked process: do the job and end."""
    from rmt.cli import main

    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (0, 1, 2):
        os.dup2(output if stream else os.open(os.devnull, os.O_RDONLY), stream)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    os.environ.update({name: str(value) for name, value in job.get("environment", {}).items()})
    for sabotage in job.get("signals", []):
        send_signal_at(**sabotage)
    if "poison" in job:
        poison(job["poison"])
    if "record" in job:
        record(job["record"])
    if "count" in job:
        count_messages(job["count"])
    if "file_limit" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_limit"], job["file_limit"]))
    status = 70
    try:
        if "RANK" in os.environ:
            import torch.distributed as dist

            dist.init_process_group("gloo")
        for command in job["commands"]:
            status = main(command)
            if status:
                break
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def replace(where: str, make: Any) -> None:
    """Put `make(original)` in the place of a function such as `rmt.train.loop:Trainer.evaluate`."""
    module, _, names = where.partition(":")
    owner: Any = importlib.import_module(module)
    *path, name = names.split(".")
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, name, make(getattr(owner, name)))


def send_signal_at(where: str, call: int = 1, number: int = signal.SIGTERM, after: bool = False) -> None:
    """At the n-th call of a function this process gets a signal, before (or after) the function's work."""
    count, lock = [0], threading.Lock()

    def make(original: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            with lock:
                count[0] += 1
                now = count[0] == call
            if now and not after:
                os.kill(os.getpid(), number)
            result = original(*args, **kwargs)
            if now and after:
                os.kill(os.getpid(), number)
            return result

        return function

    replace(where, make)


def poison(steps: list[int]) -> None:
    """The losses of these steps (counted from 0) become NaN, with their gradients."""
    from rmt.train.step import Stepper

    def make(original: Any) -> Any:
        def step(self: Stepper, index: int, *args: Any, **kwargs: Any) -> Any:
            forward = self.forward

            def poisoned(*inputs: Any, **more: Any) -> Any:
                output = forward(*inputs, **more)
                output.loss = output.loss * (float("nan") if index in steps else 1.0)
                return output

            self.forward = poisoned
            with contextlib.ExitStack() as stack:
                stack.callback(setattr, self, "forward", forward)
                return original(self, index, *args, **kwargs)

        return step

    replace("rmt.train.step:Stepper.step", make)


def record(path: str) -> None:
    """Append the tokens of every step to a file."""

    def make(original: Any) -> Any:
        def one_step(self: Any, index: int, tokens: Any) -> None:
            with open(f"{path}-{os.environ.get('RANK', 0)}", "a") as file:
                file.write(json.dumps([index, tokens.tolist()]) + "\n")
            original(self, index, tokens)

        return one_step

    replace("rmt.train.loop:Trainer.one_step", make)


def count_messages(path: str) -> None:
    """Append, for every optimizer step, how often each kind of message was sent between the processes."""
    import torch.distributed as dist

    names = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")
    kinds = [name for name in names if hasattr(dist, name)]  # the last ones since torch 2.13
    counts = dict.fromkeys(kinds, 0)

    def counted(kind: str) -> Any:
        def make(original: Any) -> Any:
            def send(*args: Any, **kwargs: Any) -> Any:
                counts[kind] += 1
                return original(*args, **kwargs)

            return send

        return make

    for kind in kinds:
        setattr(dist, kind, counted(kind)(getattr(dist, kind)))

    def make(original: Any) -> Any:
        def step(*args: Any) -> Any:
            counts.update(dict.fromkeys(kinds, 0))
            result = original(*args)
            with open(f"{path}-{os.environ['RANK']}", "a") as file:
                file.write(json.dumps(counts) + "\n")
            return result

        return step

    replace("rmt.train.step:Stepper.step", make)


if __name__ == "__main__":
    serve()
