"""The feed-forward core W2 act(W1 x), keeping as much or as little for the backward pass as wanted.

    none    the input, the hidden numbers and the activated ones (what PyTorch keeps by itself)
    gelu    the input and the hidden numbers; the activation is computed again
    ff      the input only; one of the three products is computed again

Axes: N tokens, D features, F hidden neurons (E of them after the activation: F, or F / 2 when gated).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rmt.config import Recompute
from rmt.ops.once import once_differentiable


def feed_forward(x: Tensor, into_FD: Tensor, out_DE: Tensor, gated: bool, recompute: Recompute = "none") -> Tensor:
    """W2 gelu(W1 x) or, gated, W2 (silu(gate) * up) with gate and up packed in W1; x [..., D] -> [..., D]."""
    if recompute == "none" or not torch.is_grad_enabled():
        return F.linear(activate(F.linear(x, into_FD), gated), out_DE)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, into_FD, out_DE = x.to(dtype), into_FD.to(dtype), out_DE.to(dtype)
    y_ND = _FeedForward.apply(x.reshape(-1, x.shape[-1]), into_FD, out_DE, gated, recompute == "gelu")
    return y_ND.view(x.shape[:-1] + y_ND.shape[-1:])


def activate(h: Tensor, gated: bool) -> Tensor:
    if not gated:
        return F.gelu(h, approximate="tanh")
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def activate_backward(da: Tensor, h: Tensor, gated: bool) -> Tensor:
    if not gated:
        return torch.ops.aten.gelu_backward(da, h, approximate="tanh")
    gate, up = h.chunk(2, dim=-1)
    return torch.cat((torch.ops.aten.silu_backward(da * up, gate), da * F.silu(gate)), dim=-1)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, into_FD: Tensor, out_DE: Tensor, gated: bool, keep_hidden: bool) -> Tensor:
        h_NF = F.linear(x_ND, into_FD)
        ctx.gated = gated
        ctx.save_for_backward(x_ND, into_FD, out_DE, h_NF if keep_hidden else None)
        return F.linear(activate(h_NF, gated), out_DE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, into_FD, out_DE, h_NF = ctx.saved_tensors
        wants_x, wants_into, wants_out = ctx.needs_input_grad[:3]
        if h_NF is None:
            h_NF = F.linear(x_ND, into_FD)
        dout_DE = dy_ND.t() @ activate(h_NF, ctx.gated) if wants_out else None
        dh_NF = activate_backward(dy_ND @ out_DE, h_NF, ctx.gated)
        return (
            dh_NF @ into_FD if wants_x else None,
            dh_NF.t() @ x_ND if wants_into else None,
            dout_DE,
            None,
            None,
        )
