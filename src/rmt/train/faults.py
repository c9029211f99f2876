"""Steps that must not change the weights: a loss or gradient that is not finite, and (if asked for) a sudden spike.

`Guard` decides, between the backward pass and the update. What it refuses leaves a record in `RUN/faults/`: the windows
of the batch, so that it can be looked at and computed again, and the parameters whose gradients were not finite.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rmt.train.distributed import World, own

WINDOW = 128  # steps that a spike is compared with
FEWEST = 32  # before so many steps nothing is called a spike

NOT_FINITE, SPIKE = "not finite", "spike"


@dataclass
class Guard:
    """Whether a step may change the weights.

    Args:
        spike: refuse a loss or gradient norm that lies this many standard deviations above the mean of the last steps.
    """

    spike: float | None = None
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    in_a_row: int = 0  # refused, up to now

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """Why the step is refused, or None. Every step is judged once, in order."""
        reason = None
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            reason = NOT_FINITE
        elif self.spike is not None:
            if stands_out(loss, self.losses, self.spike) or stands_out(grad_norm, self.norms, self.spike):
                reason = SPIKE
            # A spike counts as well: a level that stays must become the new normal.
            self.losses = [*self.losses, loss][-WINDOW:]
            self.norms = [*self.norms, grad_norm][-WINDOW:]
        self.in_a_row = self.in_a_row + 1 if reason else 0
        return reason

    def state(self) -> dict[str, Any]:
        return {"losses": self.losses, "norms": self.norms, "in_a_row": self.in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        self.losses, self.norms = state.get("losses", []), state.get("norms", [])
        self.in_a_row = state.get("in_a_row", 0)


def stands_out(value: float, before: list[float], deviations: float) -> bool:
    if len(before) < FEWEST:
        return False
    return value > statistics.fmean(before) + deviations * statistics.pstdev(before)


def broken_parameters(model: nn.Module, world: World) -> dict[str, list[str]]:
    """Parameters with numbers that are not finite, in their gradients and in themselves."""
    named = list(model.named_parameters())
    flags = torch.zeros(2, len(named))
    for index, (_, parameter) in enumerate(named):
        for row, tensor in enumerate((parameter.grad, parameter)):
            if tensor is not None:
                flags[row, index] = not bool(torch.isfinite(own(tensor.detach())).all())
    gradients, weights = (row.nonzero().flatten().tolist() for row in world.sum(flags))
    return {"gradients": [named[i][0] for i in gradients], "weights": [named[i][0] for i in weights]}
