"""Causal attention in C++ for float32 on the CPU: any head_dim, grouped heads, contiguous documents and ALiBi.

`attend` (attention.cpp) is differentiable and takes whole sequences; `attend_token` (decode.cpp) takes one new token of
each sequence and the cache. Axes: see `rmt.ops.attention`.
"""

import functools
from collections.abc import Callable
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


def takes_token(q_BTHV: Tensor, k_BGSV: Tensor, v_BGSV: Tensor) -> bool:
    """Whether this is one new token of each sequence, and nobody wants a gradient."""
    heads = (q_BTHV, k_BGSV, v_BGSV)
    if q_BTHV.shape[1] != 1 or not all(x.dtype == torch.float32 and x.stride(-1) == 1 for x in heads):
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in heads))


def attend(
    q_BTHV: Tensor, k_BGSV: Tensor, v_BGSV: Tensor, start_BT: Tensor | None, slopes_H: Tensor | None, scale: float
) -> Tensor:
    """-> [B, T, H, V]. Query t of a sequence sees the keys start_BT[t] .. t."""
    slopes_H = None if slopes_H is None else slopes_H.float().contiguous()
    return _Attention.apply(q_BTHV, k_BGSV.transpose(1, 2), v_BGSV.transpose(1, 2), start_BT, slopes_H, scale)


def attend_token(
    q_BTHV: Tensor, k_BGSV: Tensor, v_BGSV: Tensor, start_B: Tensor | None, slopes_H: Tensor | None, scale: float
) -> Tensor:
    """For one query of each sequence (T = 1), without gradients: it sees the keys start_B .. S - 1."""
    y_BTHV = torch.empty(q_BTHV.shape)
    S = k_BGSV.shape[2]
    bind_token(q_BTHV, None, None, k_BGSV, v_BGSV, slopes_H, scale, y_BTHV)(
        S, address(start_B), token_threads(q_BTHV, S)
    )
    return y_BTHV


def bind_token(
    q_BTHV: Tensor,
    new_k_BTGV: Tensor | None,
    new_v_BTGV: Tensor | None,
    k_BGSV: Tensor,
    v_BGSV: Tensor,
    slopes_H: Tensor | None,
    scale: float,
    y_BTHV: Tensor,
) -> Callable[[int, int | None, int], None]:
    """The kernel, bound to tensors that are used again and again; the caller keeps them.

    The function takes the number of tokens up to the new one, the address of start_B or None, and the threads. The new
    key and value, if given, are written to the last of those places.
    """
    B, _, H, V = q_BTHV.shape
    new = q_BTHV if new_k_BTGV is None else new_k_BTGV
    other = q_BTHV if new_v_BTGV is None else new_v_BTGV
    token = [stride for x in (q_BTHV, new, other) for stride in (x.stride(0), x.stride(2))]
    where = (c_long * 12)(*token, *k_BGSV.stride()[:3], *v_BGSV.stride()[:3])
    pointers = (address(x) for x in (slopes_H, q_BTHV, new_k_BTGV, new_v_BTGV, k_BGSV, v_BGSV))
    return functools.partial(
        library().rmt_attention_token, B, H, k_BGSV.shape[1], V, scale, *pointers, where, y_BTHV.data_ptr()
    )


def token_threads(q_BTHV: Tensor, length: int) -> int:
    return build.threads(4.0 * q_BTHV.numel() * length)


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
    found.rmt_attention_token.argtypes = [*[c_long] * 4, c_float, *pointers[:8], c_long, c_void_p, c_int]
    for function in (found.rmt_attention_forward, found.rmt_attention_backward, found.rmt_attention_token):
        function.restype = None
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
