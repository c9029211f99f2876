"""Causal attention in C++ (attention.cpp) as a differentiable operation: float32 on the CPU, no cache, any head_dim,
grouped heads, contiguous documents and ALiBi. Axes: see `rmt.ops.attention`.
"""

import functools
from ctypes import c_float, c_int, c_long, c_void_p
from typing import Any

import torch
from torch import Tensor

from rmt.ops.native import build
from rmt.ops.once import once_differentiable


def takes(q_BTHV: Tensor, k_BGSV: Tensor, v_BGSV: Tensor) -> bool:
    """Whether the kernel can work on these tensors as they are, and has enough heads for all threads."""
    heads = (q_BTHV, k_BGSV, v_BGSV)
    B, T, H, _ = q_BTHV.shape
    G, S = k_BGSV.shape[1:3]
    fits = all(x.dtype == torch.float32 and x.stride(-1) == 1 for x in heads) and T == S
    return fits and (G == H or torch.get_num_threads() <= B * G)


def attend(
    q_BTHV: Tensor, k_BGSV: Tensor, v_BGSV: Tensor, start_BT: Tensor | None, slopes_H: Tensor | None, scale: float
) -> Tensor:
    """-> [B, T, H, V]. Query t of a sequence sees the keys start_BT[t] .. t."""
    slopes_H = None if slopes_H is None else slopes_H.float().contiguous()
    return _Attention.apply(q_BTHV, k_BGSV.transpose(1, 2), v_BGSV.transpose(1, 2), start_BT, slopes_H, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BTHV: Tensor,
        k_BTGV: Tensor,
        v_BTGV: Tensor,
        start_BT: Tensor | None,
        slopes_H: Tensor | None,
        scale: float,
    ) -> Tensor:
        B, T, H, _ = q_BTHV.shape
        y_BTHV = torch.empty(q_BTHV.shape)
        partition_BHT = torch.empty(B, H, T)
        library().rmt_attention_forward(
            *dimensions(q_BTHV, k_BTGV),
            scale,
            address(start_BT),
            address(slopes_H),
            *(x.data_ptr() for x in (q_BTHV, k_BTGV, v_BTGV, y_BTHV)),
            strides(q_BTHV, k_BTGV, v_BTGV, y_BTHV),
            partition_BHT.data_ptr(),
            threads(q_BTHV),
        )
        ctx.save_for_backward(q_BTHV, k_BTGV, v_BTGV, y_BTHV, partition_BHT, start_BT, slopes_H)
        ctx.scale = scale
        return y_BTHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTHV: Tensor) -> tuple[Tensor | None, ...]:
        q_BTHV, k_BTGV, v_BTGV, y_BTHV, partition_BHT, start_BT, slopes_H = ctx.saved_tensors
        (B, T, H, V), G = q_BTHV.shape, k_BTGV.shape[2]
        if dy_BTHV.stride(-1) != 1 or 0 in dy_BTHV.stride():
            dy_BTHV = dy_BTHV.contiguous()
        # Side by side in one tensor, as a packed read or projection wants them.
        dq_BTHV, dk_BTGV, dv_BTGV = torch.empty(B, T, H + 2 * G, V).split((H, G, G), dim=2)
        heads = (q_BTHV, k_BTGV, v_BTGV, y_BTHV, dy_BTHV, dq_BTHV, dk_BTGV, dv_BTGV)
        library().rmt_attention_backward(
            *dimensions(q_BTHV, k_BTGV),
            ctx.scale,
            address(start_BT),
            address(slopes_H),
            *(x.data_ptr() for x in heads),
            strides(*heads),
            partition_BHT.data_ptr(),
            threads(q_BTHV),
        )
        return dq_BTHV, dk_BTGV, dv_BTGV, None, None, None


@functools.cache
def library() -> Any:
    found = build.library()
    shared: list[Any] = [c_long] * 5 + [c_float, c_void_p, c_void_p]
    pointers: list[Any] = [c_void_p] * 10
    found.rmt_attention_forward.argtypes = [*shared, *pointers[:6], c_int]
    found.rmt_attention_backward.argtypes = [*shared, *pointers, c_int]
    found.rmt_attention_forward.restype = found.rmt_attention_backward.restype = None
    return found


def dimensions(q_BTHV: Tensor, k_BTGV: Tensor) -> tuple[int, ...]:
    B, T, H, V = q_BTHV.shape
    return B, T, H, k_BTGV.shape[2], V


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def strides(*heads: Tensor) -> Any:
    """Batch, token and head stride of each tensor, as a C array."""
    numbers = [stride for x in heads for stride in x.stride()[:3]]
    return (c_long * len(numbers))(*numbers)


def threads(q_BTHV: Tensor) -> int:
    return build.threads(2.0 * q_BTHV.numel() * q_BTHV.shape[1])
