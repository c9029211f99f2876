"""The training loss straight from the last hidden vectors: linear, cross-entropy and z-loss without the full logits.

`reference` is the definition. `linear_cross_entropy` computes the same a few hundred rows at a time, and its gradients
in the same pass, so that no more than one chunk of logits exists at once.

Axes: N tokens, D features, W vocabulary.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100
CHUNK_BYTES = 64 * 2**20


class Loss(NamedTuple):
    """Means over the targets that are not ignored. Only `total` carries gradients."""

    total: Tensor  # cross-entropy + z_loss * mean squared log-partition
    ce: Tensor
    z: Tensor  # mean squared log-partition
    accuracy: Tensor


def reference(hidden_ND: Tensor, weight_WD: Tensor, targets_N: Tensor, z_loss: float, scale: float = 1.0) -> Loss:
    """The definition, with all logits in memory."""
    keep = targets_N != IGNORE
    logits_NW = F.linear(hidden_ND[keep], weight_WD).float() * scale
    targets = targets_N[keep]
    log_partition_N = torch.logsumexp(logits_NW, dim=-1)
    ce = (log_partition_N - logits_NW.gather(1, targets[:, None])[:, 0]).mean()
    z = log_partition_N.square().mean()
    accuracy = (logits_NW.argmax(-1) == targets).float().mean()
    return Loss(ce + z_loss * z, ce.detach(), z.detach(), accuracy)


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_WD: Tensor,
    targets_N: Tensor,
    z_loss: float,
    scale: float = 1.0,
    chunk: int | None = None,
) -> Loss:
    """`reference`, chunked over tokens. `chunk` defaults to what fits in 64 MiB of logits."""
    if torch.is_autocast_enabled(hidden_ND.device.type):
        dtype = torch.get_autocast_dtype(hidden_ND.device.type)
        hidden_ND, weight_WD = hidden_ND.to(dtype), weight_WD.to(dtype)
    if chunk is None:
        chunk = max(1, CHUNK_BYTES // (4 * weight_WD.shape[0]))
    return Loss(*_Chunked.apply(hidden_ND, weight_WD, targets_N, z_loss, scale, chunk))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_WD: Tensor, targets_N: Tensor, z_loss: float, scale: float, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_WD, dtype=torch.float32) if wants_weight else None
        if weight_WD.dtype == torch.float64 and grad_weight is not None:
            grad_weight = grad_weight.double()
        keep_N = targets_N != IGNORE
        count = keep_N.sum().clamp(min=1)
        sums = torch.zeros(3, device=hidden_ND.device, dtype=torch.float64)
        for rows in range(0, hidden_ND.shape[0], chunk):
            part = slice(rows, rows + chunk)
            hidden, keep = hidden_ND[part], keep_N[part, None]
            targets = targets_N[part, None].clamp(min=0)
            logits = torch.mm(hidden, weight_WD.t())
            logits = (logits if logits.dtype == torch.float64 else logits.float()).mul_(scale)
            log_partition = torch.logsumexp(logits, dim=-1, keepdim=True)
            at_target = logits.gather(1, targets)
            correct = at_target >= logits.amax(-1, keepdim=True)
            terms = torch.cat((log_partition - at_target, log_partition.square(), correct.to(logits.dtype)), dim=1)
            sums += (terms * keep).sum(0)
            if grad_hidden is None and grad_weight is None:
                continue
            # d total / d logits, written over the logits: p * (1 + 2 z log Z) - onehot, averaged over the targets.
            slope = logits.sub_(log_partition).exp_()
            slope.mul_(1 + 2 * z_loss * log_partition)
            slope.scatter_add_(1, targets, -torch.ones_like(at_target))
            slope.mul_(keep * (scale / count)).nan_to_num_(nan=0.0) if not keep.all() else slope.mul_(scale / count)
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(slope, weight_WD, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += torch.mm(slope.t(), hidden)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight_WD.dtype))
        ce, z, accuracy = (sums / count).to(logits.dtype).unbind()
        ctx.mark_non_differentiable(ce, z, accuracy)
        return ce + z_loss * z, ce, z, accuracy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * grad_total,
            None if grad_weight is None else grad_weight * grad_total,
            None,
            None,
            None,
            None,
        )
