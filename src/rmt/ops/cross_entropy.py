"""The training loss straight from the last hidden vectors: linear, cross-entropy and z-loss without the full logits.

`reference` is the definition. `linear_cross_entropy` computes the same a few hundred rows at a time, and its gradients
in the same pass, so that no more than one chunk of logits exists at once. On the CPU a kernel in C++ (native/loss.cpp)
turns a chunk of logits into its loss and its gradient while each row is in the cache.

Axes: N tokens, D features, W vocabulary.
"""

import functools
from ctypes import c_float, c_int, c_long, c_void_p
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rmt.config import Ops
from rmt.errors import InputError
from rmt.ops import choice
from rmt.ops.native import build
from rmt.ops.once import once_differentiable

IGNORE = -100
CHUNK_BYTES = 128 * 2**20
LINE = 16  # floats in a line of the CPU's cache


class Loss(NamedTuple):
    """Means over the targets that are not ignored. Only `total` carries gradients."""

    total: Tensor  # cross-entropy + z_loss * mean squared log-partition
    ce: Tensor
    z: Tensor  # mean squared log-partition
    accuracy: Tensor


def reference(hidden_ND: Tensor, weight_WD: Tensor, targets_N: Tensor, z_loss: float, scale: float = 1.0) -> Loss:
    """The definition, with all logits in memory."""
    keep = targets_N != IGNORE
    logits_NW = F.linear(hidden_ND[keep], weight_WD)
    logits_NW = logits_NW.to(torch.promote_types(logits_NW.dtype, torch.float32)) * scale
    targets = targets_N[keep]
    log_partition_N = torch.logsumexp(logits_NW, dim=-1)
    ce = (log_partition_N - logits_NW.gather(1, targets[:, None])[:, 0]).mean()
    z = log_partition_N.square().mean()
    accuracy = (logits_NW.argmax(-1) == targets).to(logits_NW.dtype).mean()
    return Loss(ce + z_loss * z, ce.detach(), z.detach(), accuracy)


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_WD: Tensor,
    targets_N: Tensor,
    z_loss: float,
    scale: float = 1.0,
    chunk: int | None = None,
    ops: Ops = "auto",
) -> Loss:
    """`reference`, chunked over tokens.

    Args:
        hidden_ND: last hidden vectors.
        weight_WD: unembedding.
        targets_N: ids; -100 is ignored. If all are, the loss is zero.
        z_loss: coefficient of the squared log-partition.
        scale: of the logits, greater than zero.
        chunk: tokens at a time; by default what fits in 128 MiB of logits.
        ops: the version to use, see `rmt.ops.choice`.
    """
    check_targets(targets_N, weight_WD.shape[0])
    if ops == "plain" and bool((targets_N != IGNORE).any()):
        return reference(hidden_ND, weight_WD, targets_N, z_loss, scale)
    if torch.is_autocast_enabled(hidden_ND.device.type):
        dtype = torch.get_autocast_dtype(hidden_ND.device.type)
        hidden_ND, weight_WD = hidden_ND.to(dtype), weight_WD.to(dtype)
    if chunk is None:
        largest = max(1, CHUNK_BYTES // (4 * weight_WD.shape[0]))
        count = max(1, -(-len(hidden_ND) // largest))
        chunk = max(1, -(-len(hidden_ND) // count))
    native = choice.choose(ops, hidden_ND) == "native" and weight_WD.dtype == torch.float32
    return Loss(*_Chunked.apply(hidden_ND, weight_WD, targets_N, z_loss, scale, chunk, native))


def check_targets(targets_N: Tensor, vocabulary: int) -> None:
    # On an accelerator this would wait for the device at every step; there the data loader checks once.
    if targets_N.device.type != "cpu" or not targets_N.numel():
        return
    low, high = torch.aminmax(targets_N)
    if high >= vocabulary or low < 0:
        kept = targets_N[targets_N != IGNORE]
        wrong = kept[(kept < 0) | (kept >= vocabulary)]
        if wrong.numel():
            raise InputError(
                f"target {int(wrong[0])} is outside the vocabulary of {vocabulary}: check the tokenizer "
                f"(targets to be ignored are {IGNORE})."
            )


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_WD: Tensor,
        targets_N: Tensor,
        z_loss: float,
        scale: float,
        chunk: int,
        native: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        exact = torch.promote_types(weight_WD.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_weight = None
        targets_N = targets_N.long().contiguous()
        count = (targets_N != IGNORE).sum().clamp(min=1)
        sums = torch.zeros(3, device=hidden_ND.device, dtype=torch.float64)
        rows = _native_rows if native else _rows
        buffer = _rows_of_lines(hidden_ND, min(chunk, len(hidden_ND)), len(weight_WD))
        for start in range(0, len(hidden_ND), chunk):
            part = slice(start, start + chunk)
            hidden, targets = hidden_ND[part], targets_N[part]
            logits = torch.mm(hidden, weight_WD.t(), out=buffer[: len(hidden)])
            weight = scale / count.double() if wants_hidden or wants_weight else None
            terms, slope = rows(logits, targets, z_loss, scale, weight)
            sums += terms
            if grad_hidden is not None:
                torch.mm(slope, weight_WD, out=grad_hidden[part])
            if not wants_weight:
                continue
            if grad_weight is None:
                grad_weight = torch.mm(slope.t(), hidden).to(exact)
            elif slope.dtype == exact:
                grad_weight.addmm_(slope.t(), hidden)
            else:
                grad_weight += torch.mm(slope.t(), hidden)
        if wants_weight:
            grad_weight = torch.zeros_like(weight_WD) if grad_weight is None else grad_weight.to(weight_WD.dtype)
        # Not `save_for_backward`: a table of gradients is too large to be held twice, so it is handed on, once.
        ctx.grads = (grad_hidden, grad_weight)
        ce, z, accuracy = (sums / count).to(exact).unbind()
        ctx.mark_non_differentiable(ce, z, accuracy)
        return ce + z_loss * z, ce, z, accuracy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "the loss's gradient was asked for a second time (retain_graph=True), and the first one has taken it: "
                'use model.set_ops("plain"), which keeps everything.'
            )
        grads, ctx.grads = ctx.grads, None
        for grad in grads:
            if grad is not None:
                grad.mul_(grad_total)
        return *grads, None, None, None, None, None


def _rows_of_lines(like: Tensor, rows: int, width: int) -> Tensor:
    """Memory for a matrix whose rows begin at cache lines, an odd number of them apart: products write rows of 50257
    numbers more slowly when these are packed without a gap, and rows a power of two apart crowd the same sets."""
    apart = (-(-width // (2 * LINE)) * 2 + 1) * LINE
    return like.new_empty(rows, apart)[:, :width]


def _rows(
    logits_NW: Tensor, targets_N: Tensor, z_loss: float, scale: float, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of one chunk: the sums of cross-entropy, squared log-partition and hits; and, unless `weight` (scale / number of
    targets) is None, the gradient of the loss with respect to the unscaled logits, in their place."""
    keep = (targets_N != IGNORE)[:, None]
    targets = targets_N.clamp(min=0)[:, None]
    exact = logits_NW.to(torch.promote_types(logits_NW.dtype, torch.float32))
    if scale != 1:
        exact.mul_(scale)
    top, at_target = exact.amax(-1, keepdim=True), exact.gather(1, targets)
    total = exact.sub_(top).exp_().sum(-1, keepdim=True)
    log_partition = top + total.log()
    terms = torch.cat((log_partition - at_target, log_partition.square(), (at_target >= top).to(exact.dtype)), dim=1)
    sums = torch.where(keep, terms, 0).sum(0, dtype=torch.float64)
    if weight is None:
        return sums, logits_NW
    # p * (1 + 2 z log Z) - onehot, averaged over the targets.
    slope = exact.mul_((1 + 2 * z_loss * log_partition) / total * weight)
    slope.scatter_add_(1, targets, -weight.to(slope.dtype).expand_as(targets))
    slope.masked_fill_(~keep, 0)
    return sums, slope.to(logits_NW.dtype)


def _native_rows(
    logits_NW: Tensor, targets_N: Tensor, z_loss: float, scale: float, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`_rows` in C++."""
    terms_N3 = torch.empty(len(logits_NW), 3)
    _library().rmt_loss_rows(
        *logits_NW.shape,
        logits_NW.stride(0),
        logits_NW.data_ptr(),
        targets_N.data_ptr(),
        scale,
        z_loss,
        0.0 if weight is None else float(weight),
        terms_N3.data_ptr(),
        build.threads(10.0 * logits_NW.numel()),
    )
    log_partition, at_target, top = terms_N3.double().unbind(1)
    hits = ((at_target >= top) & (targets_N != IGNORE)).double()
    return torch.stack(((log_partition - at_target).sum(), log_partition.square().sum(), hits.sum())), logits_NW


@functools.cache
def _library() -> Any:
    found = build.library()
    found.rmt_loss_rows.argtypes = [*[c_long] * 3, c_void_p, c_void_p, *[c_float] * 3, c_void_p, c_int]
    found.rmt_loss_rows.restype = None
    return found
