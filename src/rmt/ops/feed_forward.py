"""The feed-forward core W2 act(W1 x), keeping as much or as little for the backward pass as wanted.

    none    the input, the hidden numbers and the activated ones (what PyTorch keeps by itself)
    gelu    the input and the hidden numbers; the activation is computed again
    ff      the input only; one of the three products is computed again

On the CPU the activation is a kernel in C++ (native/activation.cpp), and its gradient takes the place of its input's.

Axes: N tokens, D features, F hidden neurons (E of them after the activation: F, or F / 2 when gated).
"""

import functools
from ctypes import c_int, c_long, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rmt.config import Ops, Recompute
from rmt.ops import choice
from rmt.ops.native import build
from rmt.ops.once import once_differentiable

FLOPS = 30.0  # of one activated neuron, about


def feed_forward(
    x: Tensor, into_FD: Tensor, out_DE: Tensor, gated: bool, recompute: Recompute = "none", ops: Ops = "auto"
) -> Tensor:
    """W2 gelu(W1 x) or, gated, W2 (silu(gate) * up) with gate and up packed in W1; x [..., D] -> [..., D]."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, into_FD, out_DE = x.to(dtype), into_FD.to(dtype), out_DE.to(dtype)
    native = choice.choose(ops, x) == "native"
    if not torch.is_grad_enabled() or (recompute == "none" and not native):
        return F.linear(activate(F.linear(x, into_FD), gated, native), out_DE)
    y_ND = _FeedForward.apply(x.reshape(-1, x.shape[-1]), into_FD, out_DE, gated, recompute, native)
    return y_ND.view(x.shape[:-1] + y_ND.shape[-1:])


def activate(h: Tensor, gated: bool, native: bool) -> Tensor:
    if native:
        return _native_activate(h, gated)
    if not gated:
        return F.gelu(h, approximate="tanh")
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def activate_backward(da: Tensor, h: Tensor, gated: bool, native: bool) -> Tensor:
    """The gradient of `h`; that of the activated neurons, `da`, is not used afterwards."""
    if native:
        return _native_activate_backward(da, h, gated)
    if not gated:
        return torch.ops.aten.gelu_backward(da, h, approximate="tanh")
    gate, up = h.chunk(2, dim=-1)
    return torch.cat((torch.ops.aten.silu_backward(da * up, gate), da * F.silu(gate)), dim=-1)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, into_FD: Tensor, out_DE: Tensor, gated: bool, recompute: Recompute, native: bool
    ) -> Tensor:
        h_NF = F.linear(x_ND, into_FD)
        a_NE = activate(h_NF, gated, native)
        ctx.gated, ctx.native = gated, native
        keeps_h, keeps_a = recompute in ("none", "gelu"), recompute == "none"
        ctx.save_for_backward(x_ND, into_FD, out_DE, h_NF if keeps_h else None, a_NE if keeps_a else None)
        return F.linear(a_NE, out_DE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, into_FD, out_DE, h_NF, a_NE = ctx.saved_tensors
        wants_x, wants_into, wants_out = ctx.needs_input_grad[:3]
        if h_NF is None:
            h_NF = F.linear(x_ND, into_FD)
        if a_NE is None and wants_out:
            a_NE = activate(h_NF, ctx.gated, ctx.native)
        dout_DE = dy_ND.t() @ a_NE if wants_out else None
        del a_NE
        dh_NF = activate_backward(dy_ND @ out_DE, h_NF, ctx.gated, ctx.native)
        return (
            dh_NF @ into_FD if wants_x else None,
            dh_NF.t() @ x_ND if wants_into else None,
            dout_DE,
            None,
            None,
            None,
        )


def _native_activate(h: Tensor, gated: bool) -> Tensor:
    h = h.contiguous()
    a = h.new_empty(*h.shape[:-1], h.shape[-1] // 2 if gated else h.shape[-1])
    native_activate_into(h, gated, a)
    return a


def native_activate_into(h: Tensor, gated: bool, a: Tensor) -> None:
    """`activate` in C++ into memory that is there; both in one piece."""
    width, threads = a.shape[-1], build.threads(FLOPS * a.numel())
    _library().rmt_activate(a.numel() // width, width, gated, h.data_ptr(), a.data_ptr(), threads)


def _native_activate_backward(da: Tensor, h: Tensor, gated: bool) -> Tensor:
    da, h = da.contiguous(), h.contiguous()
    dh, width = torch.empty_like(h) if gated else da, da.shape[-1]
    _library().rmt_activate_backward(
        da.numel() // width,
        width,
        gated,
        h.data_ptr(),
        da.data_ptr(),
        dh.data_ptr(),
        build.threads(FLOPS * da.numel()),
    )
    return dh


@functools.cache
def _library() -> Any:
    found = build.library()
    found.rmt_activate.argtypes = [c_long, c_long, c_int, c_void_p, c_void_p, c_int]
    found.rmt_activate_backward.argtypes = [c_long, c_long, c_int, c_void_p, c_void_p, c_void_p, c_int]
    found.rmt_activate.restype = found.rmt_activate_backward.restype = None
    return found
