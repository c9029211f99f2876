"""The boundary in C++ (native/boundary.cpp): float32 on the CPU. See `portable` for what its functions do."""

import functools
from collections.abc import Callable
from ctypes import c_float, c_int, c_long, c_void_p
from typing import Any

import torch
from torch import Tensor

from rmt.ops.boundary.step import Gradients, Stats, Step
from rmt.ops.native import build

DIMENSIONS: list[Any] = [c_long] * 5 + [c_int, c_float]


@functools.cache
def library() -> Any:
    found = build.library()
    data: list[Any] = [c_void_p, c_long]
    pointers: list[Any] = [c_void_p] * 6
    found.rmt_boundary_forward.argtypes = [*DIMENSIONS, c_void_p, c_int, *data, *pointers, c_int]
    found.rmt_boundary_forward.restype = None
    kinds = [c_void_p, c_void_p, c_int, c_int, *data, *pointers[:5], *data, *pointers[:4], c_int]
    found.rmt_boundary_backward.argtypes = [*DIMENSIONS, *kinds]
    found.rmt_boundary_backward.restype = None
    return found


def forward(step: Step, y_NPV: Tensor) -> Stats:
    step = step._replace(d_NRV=token_major(step.d_NRV))
    y = y_NPV if y_NPV.dtype == torch.float32 else torch.empty(y_NPV.shape)
    mean_N, rstd_N = torch.empty(len(y)), torch.empty(len(y))
    bind_forward(step, y, mean_N, rstd_N)()
    if y is not y_NPV:
        y_NPV.copy_(y)
    return mean_N, rstd_N


def bind_forward(step: Step, y_NPV: Tensor, mean_N: Tensor, rstd_N: Tensor) -> Callable[[], None]:
    """The kernel, bound to tensors that decoding uses again and again; the caller keeps them."""
    X_NKV, first, d_NRV, write_KR, gain_KV, read_PK, _ = step
    return functools.partial(
        library().rmt_boundary_forward,
        *dimensions(step),
        X_NKV.data_ptr(),
        first,
        d_NRV.data_ptr(),
        d_NRV.stride(0),
        write_KR.data_ptr(),
        gain_KV.data_ptr(),
        read_PK.data_ptr(),
        y_NPV.data_ptr(),
        mean_N.data_ptr(),
        rstd_N.data_ptr(),
        threads(step),
    )


def backward(step: Step, G_NKV: Tensor, fresh: bool, stats: Stats, dy_NPV: Tensor) -> Gradients:
    X_NKV, first, d_NRV, write_KR, gain_KV, read_PK, _ = step
    d, dy_NPV = token_major(d_NRV), token_major(dy_NPV)
    mean_N, rstd_N = stats
    dd_NRV = torch.empty(d.shape)
    dwrite_KR, dgain_KV, dread_PK = (torch.empty_like(t) for t in (write_KR, gain_KV, read_PK))
    library().rmt_boundary_backward(
        *dimensions(step),
        X_NKV.data_ptr(),
        G_NKV.data_ptr(),
        fresh,
        first,
        d.data_ptr(),
        d.stride(0),
        write_KR.data_ptr(),
        gain_KV.data_ptr(),
        read_PK.data_ptr(),
        mean_N.data_ptr(),
        rstd_N.data_ptr(),
        dy_NPV.data_ptr(),
        dy_NPV.stride(0),
        dd_NRV.data_ptr(),
        dwrite_KR.data_ptr(),
        dgain_KV.data_ptr(),
        dread_PK.data_ptr(),
        threads(step),
    )
    return dd_NRV.to(d_NRV.dtype), dwrite_KR, dgain_KV, dread_PK


def takes(key_dim: int, value_dim: int, kind: torch.dtype) -> bool:
    return kind == torch.float32


def dimensions(step: Step) -> tuple:
    return *step.sizes, step.norm.kind == "layernorm", step.norm.eps


def threads(step: Step) -> int:
    N, K, V, R, P = step.sizes
    return build.threads(2.0 * N * K * V * (R + P))


def token_major(x_NRV: Tensor) -> Tensor:
    """float32 with each token's vectors in one piece; tokens may lie apart."""
    x_NRV = x_NRV if x_NRV.dtype == torch.float32 else x_NRV.float()
    R, V = x_NRV.shape[1:]
    dense = (x_NRV.stride(2) == 1 or V == 1) and (x_NRV.stride(1) == V or R == 1)
    return x_NRV if dense else x_NRV.contiguous()
