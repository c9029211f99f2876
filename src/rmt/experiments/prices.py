"""What a sweep will cost, before anything runs: parameters, tokens, FLOPs, and the time on a machine that is named.

FLOPs are given twice: exact, as `rmt count` has them, and without the logits, as the paper counts (docs/errata.md, 3
and 4). Times are estimates. On a GPU they are those of `rmt.train.gpus`: FLOPs over a share of the bfloat16
peak, plus the time in which the matrix stream passes through the memory. On a CPU they are FLOPs over what a core of a
common server does in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rmt.errors import InputError, suggest
from rmt.experiments.sweep import Member
from rmt.theory.accounting import count
from rmt.train.gpus import GPUS, SHARES, stream_traffic
from rmt.train.view import duration

CPU = "cpu"
CORE_FLOPS = 25e9  # useful training FLOPs per second of one core
SHARE = SHARES[0]


@dataclass(frozen=True)
class Machine:
    """What the runs are timed on: a GPU of the table, or CPU cores that take a run each."""

    name: str
    cores: int = 1

    def __post_init__(self) -> None:
        names = [CPU, *(gpu.name for gpu in GPUS)]
        if self.name not in names:
            raise InputError(f"--gpu {self.name}: the table has no such GPU. {suggest(self.name, names)}")

    def seconds(self, member: Member) -> float:
        """Of one run."""
        flops = count(member.model).flops.training(member.tokens)
        if self.name == CPU:
            return flops / CORE_FLOPS
        gpu = next(gpu for gpu in GPUS if gpu.name == self.name)
        return flops / (SHARE * gpu.flops) + member.tokens * stream_traffic(member.model) / gpu.bandwidth

    def explained(self) -> str:
        if self.name == CPU:
            return f"{CORE_FLOPS / 1e9:.0f} GFLOP/s per core, a run per core, {self.cores} cores"
        return f"one NVIDIA {self.name} at {100 * SHARE:.0f} % of its peak, the stream at its bandwidth"


def prices(members: Sequence[Member], machine: Machine, seeds: int = 1, rates: int = 1) -> dict[str, Any]:
    """What each member of a sweep costs, and all together: every seed, and every learning rate with the first seed."""
    runs = seeds + rates - 1
    rows = [price(member, machine, runs) for member in members]
    alone = sum(row["runs"] * row["seconds"] for row in rows)
    return {
        "runs": rows,
        "machine": machine.explained(),
        "total_flops": sum(row["runs"] * row["flops"] for row in rows),
        "total_seconds": max(alone / machine.cores, *(row["seconds"] for row in rows)),
    }


def price(member: Member, machine: Machine, runs: int) -> dict[str, Any]:
    counted = count(member.model)
    return {
        "name": member.name,
        "stream": member.model.stream,
        "stream_size": member.model.stream_size,
        "parameters": int(counted.params),
        "non_embedding_parameters": counted.non_embedding_params,
        "tokens": member.tokens,
        "steps": member.steps,
        "batch_size": member.train.batch_size,
        "context": member.model.context,
        "flops": counted.flops.training(member.tokens),
        "flops_without_logits": counted.flops.training(member.tokens, logits=False),
        "seconds": machine.seconds(member),
        "runs": runs,
    }


def readable(found: dict[str, Any]) -> list[dict[str, str]]:
    """The table for people."""
    return [
        {
            "model": row["name"],
            "parameters": f"{row['parameters']:,}",
            "non-embedding": f"{row['non_embedding_parameters']:,}",
            "tokens": f"{row['tokens']:,}",
            "steps": f"{row['steps']:,} x {row['batch_size']} x {row['context']}",
            "FLOPs": f"{row['flops']:.4g}",
            "as the paper counts": f"{row['flops_without_logits']:.4g}",
            "time": duration(row["seconds"]),
            "runs": str(row["runs"]),
        }
        for row in found["runs"]
    ]


def summary(found: dict[str, Any]) -> str:
    number = sum(row["runs"] for row in found["runs"])
    return (
        f"{number} runs, {found['total_flops']:.3g} FLOPs, about {duration(found['total_seconds'])}: an estimate for "
        f"{found['machine']}. Nothing was run."
    )
