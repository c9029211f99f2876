"""Runs the parts of the benchmark one after another into one result: plain data, ready for JSON.

schema, shape, all_layers, best (the RMT's fastest row), rounds, threads, clock, environment
checks                              largest relative difference of each row from its definition
stack, step, decode, loss, keydim   rows: seconds (median, low, high), rounds, quiet_rounds, ratios to other rows;
                                    gemm_flops_per_second (best); step also flops, profile, share_of_gemm_peak
                                    (the best multiplication of a round) and share_of_gemm_typical (the median one)
memory                              rows: measured, predicted (bytes)
targets                             figure, bound, value, met
"""

import gc
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch

from rmt.bench import decode, loss, memory, stack, step
from rmt.bench.cases import PARTS, Case, training_flops
from rmt.bench.checks import check
from rmt.bench.harness import Clock, get_ready, interleave
from rmt.bench.profile import step_profile
from rmt.bench.targets import judge
from rmt.theory.accounting import count
from rmt.train import heap
from rmt.train.run import environment

SCHEMA = 1
BASES = ("stock", "vector", "gpt2")
Say = Callable[[str], object]


def run(
    case: Case, parts: Sequence[str] = PARTS, rounds: int = 7, clock: Clock = "wall", say: Say = lambda text: None
) -> dict[str, Any]:
    """Measure some parts of a case. `say` is told what is being done."""
    torch.manual_seed(0)
    say("checking that all rows compute the same")
    about = environment(torch.device("cpu"))
    about.pop("command")
    about["versions"]["transformers"] = metadata.version("transformers")
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "shape": case.to_dict(),
        "all_layers": case.whole,
        "best": case.best,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "clock": clock,
        "environment": about,
        "checks": check(case),
    }
    timed: dict[str, Callable[[Case], dict[str, Callable[[], object]]]] = {
        "stack": stack.functions,
        "step": step.functions,
        "decode": decode.functions,
        "loss": loss.functions,
        "keydim": step.wider_functions,
    }
    # Each part says how it was measured, so that parts of several runs can be put together.
    how = {"rounds": rounds, "threads": torch.get_num_threads(), "clock": clock, "started": about["started"]}
    for part in PARTS:
        if part not in parts:
            continue
        if part == "memory":
            result[part] = memory.measure(case, torch.get_num_threads(), say) | {"how": how}
            continue
        functions = timed[part](case)
        # What is not trained by our trainer has the memory management of any process.
        usual = set(functions) if part == "decode" else {"stock"} & set(functions)
        timing = interleave(functions, rounds, clock, lambda text, part=part: say(f"{part}: {text}"), usual)  # type: ignore[misc]
        bases = (str(case.config.key_dim),) if part == "keydim" else BASES
        result[part] = timing.to_dict(bases) | {"how": how}
        if part == "step":
            needed = {row: flops_of(case, row) for row in functions}
            result[part]["flops"] = needed
            for speed in ("peak", "typical"):
                shares = {row: timing.share_of_gemm(row, flops, speed).to_dict() for row, flops in needed.items()}
                result[part][f"share_of_gemm_{speed}"] = shares
            watched = [row for row in ("stock", "vector", case.best) if row in functions]
            result[part]["profile"] = {}
            for row in watched:
                get_ready(functions[row], row in usual)
                result[part]["profile"][row] = step_profile(functions[row])
        if part == "decode":
            result[part]["new_tokens"] = decode.NEW
        del functions
        gc.collect()
        heap.give_back()
    result["targets"] = judge(result)
    return result


def flops_of(case: Case, row: str) -> float:
    """Of one step of a row."""
    config = case.vector if row in ("stock", step.KEPT_STOCK, "vector") else case.config
    return training_flops(count(config), config.context if row == step.ONE_SEQUENCE else case.tokens)
