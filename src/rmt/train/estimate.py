"""What a run would cost on this machine: counted exactly, and timed on a few steps that change nothing on disk."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from rmt.config import ModelConfig, TrainConfig
from rmt.data import TokenDataset
from rmt.model import build
from rmt.theory.accounting import count
from rmt.train import heap
from rmt.train.peak import matmul_peak, wait
from rmt.train.start import check_fit, find_device
from rmt.train.step import Stepper

TIMED_STEPS = 3


@dataclass(frozen=True)
class Estimate:
    params: int
    steps: int
    tokens: int
    epochs: float
    flops: float
    memory: int
    seconds_per_step: float
    seconds: float
    peak_share: float


def estimate(
    model_config: ModelConfig, train: TrainConfig, data: str | Path, device: str | torch.device | None = None
) -> Estimate:
    """Time a few micro-batches with the optimizer's update and scale them to the whole run."""
    dataset = TokenDataset.open(data)
    check_fit(model_config, train, dataset)
    where = find_device(device)
    steps = train.total_steps(model_config.context)
    tokens = steps * train.batch_size * model_config.context
    micro = train.micro_batch or train.batch_size
    cost = count(model_config, batch=micro, recompute=train.recompute)
    with heap.kept(where):
        forward, update = time_parts(model_config, train, micro, steps, where)
    seconds_per_step = forward * train.batch_size / micro + update
    flops = cost.flops.training(tokens)
    return Estimate(
        params=int(cost.params),
        steps=steps,
        tokens=tokens,
        epochs=tokens / dataset.tokens("train"),
        flops=flops,
        memory=int(cost.memory.training),
        seconds_per_step=seconds_per_step,
        seconds=seconds_per_step * steps,
        peak_share=flops / steps / seconds_per_step / matmul_peak(where, train.precision),
    )


def time_parts(
    model_config: ModelConfig, train: TrainConfig, micro: int, steps: int, device: torch.device
) -> tuple[float, float]:
    """Seconds of one micro-batch's forward and backward, and of the rest of a step."""
    stepper = Stepper(build(model_config, seed=train.seed, device=device), train, steps)
    ids = torch.randint(0, model_config.vocab_size, (micro, model_config.context))

    def timed(rows: int) -> float:
        times = []
        for index in range(TIMED_STEPS):
            wait(device)
            began = time.perf_counter()
            stepper.step(index, ids[:rows], ids[:rows])
            wait(device)
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    timed(1)  # the first steps pay for start-up
    one = timed(1)
    whole = timed(micro)
    forward = max(0.0, (whole - one) * micro / max(1, micro - 1)) if micro > 1 else one
    return forward, max(0.0, whole - forward)
