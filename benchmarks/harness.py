"""Interleaved timing of several functions on a machine that does other work too.

One round runs every function once (in turns forwards and backwards), so that all of them meet the same disturbances,
and only ratios within a round are compared. Rounds in which other processes used more than a few per cent of the CPU
are dropped when enough quiet ones remain. With `cpu=True` the process's CPU time is measured instead of the clock's: on
a busy machine, with one thread, that is the steadier figure.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

QUIET = 0.06
FEWEST_QUIET = 3


@dataclass(frozen=True)
class Sample:
    seconds: float
    others: float  # share of all cores that other processes used meanwhile


def interleave(functions: dict[str, Callable[[], object]], rounds: int, cpu: bool = False) -> dict[str, list[Sample]]:
    """Time each function `rounds` times, after one run to warm up."""
    samples: dict[str, list[Sample]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for turn in range(rounds):
        names = list(functions) if turn % 2 == 0 else list(reversed(functions))
        for name in names:
            samples[name].append(measure(functions[name], cpu))
    return samples


def measure(function: Callable[[], object], cpu: bool) -> Sample:
    clock = time.process_time if cpu else time.perf_counter
    all_before, own_before, wall_before, before = busy(), time.process_time(), time.perf_counter(), clock()
    function()
    seconds, wall = clock() - before, time.perf_counter() - wall_before
    others = max(0.0, (busy() - all_before) - (time.process_time() - own_before)) / (wall * (os.cpu_count() or 1))
    return Sample(seconds, 0.0 if cpu else others)


def busy() -> float:
    """Seconds of CPU time that all processes have used (Linux; elsewhere 0, and every round counts as quiet)."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq, steal = (int(field) for field in fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def median(samples: list[Sample]) -> float:
    quiet = [sample.seconds for sample in samples if sample.others < QUIET]
    return statistics.median(quiet if len(quiet) >= FEWEST_QUIET else [sample.seconds for sample in samples])


def ratio(samples: dict[str, list[Sample]], name: str, base: str) -> tuple[float, float, float]:
    """Median and quartiles of time(name) / time(base), round by round."""
    pairs = list(zip(samples[name], samples[base], strict=True))
    quiet = [a.seconds / b.seconds for a, b in pairs if a.others < QUIET and b.others < QUIET]
    found = sorted(quiet if len(quiet) >= FEWEST_QUIET else [a.seconds / b.seconds for a, b in pairs])
    return statistics.median(found), found[len(found) // 4], found[3 * len(found) // 4]


def table(samples: dict[str, list[Sample]], bases: list[str]) -> str:
    lines = [f"{'':24s} {'ms':>9s} " + " ".join(f"{'/ ' + base:>26s}" for base in bases)]
    for name, own in samples.items():
        cells = []
        for base in bases:
            middle, low, high = ratio(samples, name, base)
            cells.append(f"{middle:10.3f} [{low:.3f}, {high:.3f}]")
        lines.append(f"{name:24s} {1e3 * median(own):9.1f} " + " ".join(f"{cell:>26s}" for cell in cells))
    return "\n".join(lines)
