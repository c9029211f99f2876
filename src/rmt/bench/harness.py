"""Interleaved timing of several functions on a machine that does other work too.

One round runs every function once (in turns forwards and backwards), so that all of them meet the same disturbances,
and only ratios within a round are compared. Rounds in which other processes used more than a few per cent of the CPU
are dropped when enough quiet ones remain. The machine's matrix multiplication speed is measured in every round too.
With the clock "cpu" the process's CPU time is measured instead of the wall's: on a busy machine, with one thread, that
is the steadier figure.
"""

import os
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from rmt.train import heap

Clock = Literal["wall", "cpu"]
QUIET = 0.06  # share of all cores that others may use in a quiet round
FEWEST_QUIET = 3
GEMM_SIZE = 1024
GEMM_TRIES = 12


@dataclass(frozen=True)
class Sample:
    seconds: float
    others: float  # share of all cores that other processes used meanwhile

    @property
    def quiet(self) -> bool:
        return self.others < QUIET


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4])

    def to_dict(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}


class Gemm(NamedTuple):
    """FLOP/s of matrix multiplication: the best that was seen, and the median, as a step's own time is a median."""

    peak: float
    typical: float


@dataclass(frozen=True)
class Timing:
    """Samples of all functions, round by round, and the speed of matrix multiplication in each round."""

    samples: dict[str, list[Sample]]
    gemm: list[Gemm]

    def seconds(self, name: str) -> Spread:
        return seconds_of(self.samples[name])

    def ratio(self, name: str, base: str) -> Spread:
        """time(name) / time(base), within rounds in which both were undisturbed if there are enough of them."""
        pairs = list(zip(self.samples[name], self.samples[base], strict=True))
        quiet = [a.seconds / b.seconds for a, b in pairs if a.quiet and b.quiet]
        return Spread.of(quiet if len(quiet) >= FEWEST_QUIET else [a.seconds / b.seconds for a, b in pairs])

    def share_of_gemm(self, name: str, flops: float, speed: Literal["peak", "typical"] = "peak") -> Spread:
        """Speed of a function that does so many FLOPs, as a share of that of matrix multiplication in its round."""
        shares = [
            (sample.quiet, flops / sample.seconds / getattr(gemm, speed))
            for sample, gemm in zip(self.samples[name], self.gemm, strict=True)
        ]
        quiet = [share for is_quiet, share in shares if is_quiet]
        return Spread.of(quiet if len(quiet) >= FEWEST_QUIET else [share for _, share in shares])

    def to_dict(self, bases: Sequence[str] = ()) -> dict[str, Any]:
        rows: dict[str, Any] = {}
        for name, own in self.samples.items():
            rows[name] = {
                "seconds": self.seconds(name).to_dict(),
                "rounds": len(own),
                "quiet_rounds": sum(sample.quiet for sample in own),
                "ratios": {base: self.ratio(name, base).to_dict() for base in bases if base in self.samples},
            }
        return {"rows": rows, "gemm_flops_per_second": statistics.median(gemm.peak for gemm in self.gemm)}


def interleave(
    functions: dict[str, Callable[[], object]],
    rounds: int,
    clock: Clock = "wall",
    say: Callable[[str], object] = lambda text: None,
    usual_heap: Collection[str] = (),
) -> Timing:
    """Time each function `rounds` times, after one run to warm up. `say` is told how far it is; see `get_ready`."""
    samples: dict[str, list[Sample]] = {name: [] for name in functions}
    gemm = []
    for name, function in functions.items():
        say(f"warming up: {name}")
        function()
    for turn in range(rounds):
        names = list(functions) if turn % 2 == 0 else list(reversed(functions))
        gemm.append(gemm_speed(clock))
        for name in names:
            say(f"round {turn + 1} of {rounds}: {name}")
            get_ready(functions[name], name in usual_heap)
            samples[name].append(measure(functions[name], clock))
    heap.give_back()
    return Timing(samples, gemm)


def get_ready(function: Callable[[], object], usual_heap: bool) -> None:
    """Before a function is timed: memory is managed as by the system, or as in our trainer (`rmt.train.heap`), where
    one run fills the heap again after the system had it."""
    if usual_heap:
        heap.give_back()
    elif heap.keep():
        function()


def seconds_of(samples: Sequence[Sample]) -> Spread:
    """Of the quiet samples, if there are enough of them."""
    quiet = [sample.seconds for sample in samples if sample.quiet]
    return Spread.of(quiet if len(quiet) >= FEWEST_QUIET else [sample.seconds for sample in samples])


def measure(function: Callable[[], object], clock: Clock = "wall") -> Sample:
    read = time.process_time if clock == "cpu" else time.perf_counter
    all_before, own_before, wall_before, before = busy(), time.process_time(), time.perf_counter(), read()
    function()
    seconds, wall = read() - before, time.perf_counter() - wall_before
    others = max(0.0, (busy() - all_before) - (time.process_time() - own_before)) / (wall * (os.cpu_count() or 1))
    return Sample(seconds, 0.0 if clock == "cpu" else others)


def gemm_speed(clock: Clock) -> Gemm:
    """Of a few square matrix multiplications, one after another."""
    read = time.process_time if clock == "cpu" else time.perf_counter
    a, b, out = (torch.ones(GEMM_SIZE, GEMM_SIZE) for _ in range(3))
    seconds = []
    for _ in range(GEMM_TRIES):
        before = read()
        torch.mm(a, b, out=out)
        seconds.append(read() - before)
    flops = 2 * GEMM_SIZE**3
    return Gemm(flops / min(seconds), flops / statistics.median(seconds))


def busy() -> float:
    """Seconds of CPU time that all processes have used (Linux; elsewhere 0, and every round counts as quiet)."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq, steal = (int(field) for field in fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
