"""Models with different streams made comparable: the same dimensions, or the same parameters, FLOPs or step time.

The dimensions of attention stay; the feed-forward neurons are solved for (the number of layers where a stream's cost
does not depend on them). Parameters and FLOPs are counted exactly and leave out the tables that all streams share;
time is measured on this machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, get_args

import torch

from rmt.config import ModelConfig, TrainConfig
from rmt.errors import InputError, suggest
from rmt.theory.accounting import count
from rmt.train.estimate import time_parts

Match = Literal["dims", "params", "flops", "time"]
TOLERANCE = 0.03  # how far the nearest model may be from the target


def match_models(base: ModelConfig, streams: list[str], match: Match, train: TrainConfig) -> dict[str, ModelConfig]:
    """A configuration per stream. The target is the vector stream's cost at the dimensions of `base`, or, where the
    vector stream does not take part, that of the first stream."""
    if match not in get_args(Match):
        raise InputError(f"--match {match}: {suggest(match, get_args(Match))}")
    models = {stream: mirror(base, stream) for stream in streams}
    if match == "dims":
        return models
    costs: dict[str, Callable[[ModelConfig], float]] = {
        "params": lambda model: count(model).non_embedding_params,
        "flops": lambda model: count(model).flops.non_embedding_per_token,
        "time": functools.partial(seconds_per_step, train=train),
    }
    cost = costs[match]
    reference = "vector" if "vector" in models else streams[0]
    target = cost(models[reference])
    return {
        stream: model if stream == reference else solve(model, cost, target, match, exact=match != "time")
        for stream, model in models.items()
    }


def mirror(base: ModelConfig, stream: str) -> ModelConfig:
    """The same core dimensions over another stream."""
    return base.replace(stream=stream, width=None if stream == "matrix" else base.width)


def solve(
    model: ModelConfig, cost: Callable[[ModelConfig], float], target: float, what: str, *, exact: bool
) -> ModelConfig:
    """Change ff_dim, or else layers, so that the cost comes as near to the target as whole numbers allow.

    Costs are affine in either, so two evaluations give the line and a third checks it.
    """
    for field, step in (("ff_dim", 1 if exact else 16), ("layers", 2)):
        here = getattr(model, field)
        low, high = cost(model), cost(model.replace(**{field: 2 * here}))
        if high <= low * 1.001:
            continue
        wanted = here + (target - low) / ((high - low) / here)
        candidate = model.replace(**{field: max(step, step * round(wanted / step))})
        if abs(cost(candidate) / target - 1) <= (TOLERANCE if exact else 4 * TOLERANCE) or field == "layers":
            return candidate
    raise InputError(f"the {model.stream} stream cannot be matched by {what}: use --match dims.")


def seconds_per_step(model: ModelConfig, train: TrainConfig) -> float:
    micro = train.micro_batch or train.batch_size
    forward, update = time_parts(model, train, micro, 100, torch.device("cpu"))
    return forward * train.batch_size / micro + update
