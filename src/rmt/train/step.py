"""One optimizer step: forward and backward over micro-batches, clipping, learning rate, update.

`Stepper` is the trainer's engine and knows nothing of data sets, files or progress bars, so that the same code runs on
any batch: the trainer's, a test's, or the authors' golden ones. With several processes each is given its own part of
the batch; losses and gradient norms are those of the whole.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from rmt.config import TrainConfig
from rmt.model import LanguageModel
from rmt.train.distributed import ALONE, World, communicating, distribute
from rmt.train.faults import Guard
from rmt.train.optimizer import build_optimizer, clip_gradients, schedule, set_learning_rate


@dataclass(frozen=True)
class StepResult:
    """What a step reports. Losses are means over the batch, before the update."""

    loss: float
    ce: float
    grad_norm: float
    lr: float
    refused: str | None = None  # why the weights were not changed (see `rmt.train.faults`)

    @property
    def updated(self) -> bool:
        return self.refused is None


class Stepper:
    """Holds a model with its optimizer and advances both, one batch at a time."""

    def __init__(self, model: LanguageModel, train: TrainConfig, steps: int, world: World = ALONE) -> None:
        self.model = model
        self.train = train
        self.steps = steps
        self.world = world
        self.guard = Guard(train.spike)
        self.shared = distribute(model, train.parallel, world)  # may replace parameters, so the optimizer comes after
        self.optimizer = build_optimizer(model, train)
        self.forward = torch.compile(self.shared) if train.compile else self.shared
        self.device = next(model.parameters()).device
        model.recompute = train.recompute
        # A compiler makes its own fast operations out of the plain ones, and cannot look into ours.
        model.set_ops("plain" if train.compile and train.ops == "auto" else train.ops)

    def step(self, index: int, ids: Tensor, targets: Tensor, documents: Tensor | None = None) -> StepResult:
        """Step number `index` (from 0) on this process's rows [B, T] of the batch.

        A non-finite loss or gradient changes no weight.
        """
        train = self.train
        rows = ids.shape[0]
        micro = min(train.micro_batch or rows, rows)
        sums = torch.zeros(2, dtype=torch.float64)
        self.optimizer.zero_grad(set_to_none=True)
        for start in range(0, rows, micro):
            part = slice(start, start + micro)
            share = ids[part].shape[0] / rows
            with communicating(self.shared, last=start + micro >= rows):
                with autocast(self.device, train.precision):
                    output = self.forward(
                        self._move(ids[part]),
                        targets=self._move(targets[part]),
                        document_ids=None if documents is None else self._move(documents[part]),
                    )
                (output.loss * share).backward()
            sums += torch.stack((output.loss.detach(), output.ce)).double().cpu() * share
        loss, ce = (self.world.sum(sums) / self.world.size).tolist()
        norm = clip_gradients(self.model.parameters(), train.clip).item()
        share = schedule(index, self.steps, train.warmup, train.final_lr)
        set_learning_rate(self.optimizer, share)
        refused = self.guard.judge(loss, norm)
        if refused is None:
            self.optimizer.step()
        return StepResult(loss, ce, norm, train.lr * share, refused)

    def _move(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """bfloat16 matrix multiplications where asked for, or where the device has them and `precision` is auto."""
    wanted = precision == "bfloat16"
    if precision == "auto":
        wanted = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.autocast(device.type, dtype=torch.bfloat16) if wanted else contextlib.nullcontext()
