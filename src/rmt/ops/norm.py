"""Normalisation of a residual stream over all its entries, with a learned gain of any shape that broadcasts."""

import torch.nn.functional as F
from torch import Tensor

from rmt.config import Norm


def normalise(x: Tensor, axes: int, gain: Tensor | None, kind: Norm, eps: float) -> Tensor:
    """Normalise the last `axes` axes of `x` together, then multiply by `gain`."""
    shape = x.shape[-axes:]
    fits = gain is not None and gain.shape == shape
    norm = F.layer_norm if kind == "layernorm" else F.rms_norm
    y = norm(x, shape, weight=gain if fits else None, eps=eps)
    return y if fits or gain is None else y * gain
