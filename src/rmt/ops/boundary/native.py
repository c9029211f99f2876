"""The boundary in C++ (native/boundary.cpp): float32 on the CPU. See `portable` for what its functions do."""

import functools
from ctypes import c_float, c_int, c_long, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rmt.ops.native import build

if TYPE_CHECKING:
    from rmt.ops.boundary import Norming

Stats = tuple[Tensor, Tensor]

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


def forward(
    X_NKV: Tensor,
    first: bool,
    d_NRV: Tensor,
    write_KR: Tensor,
    gain_KV: Tensor,
    norm: "Norming",
    read_PK: Tensor,
    y_NPV: Tensor,
) -> Stats:
    d_NRV = token_major(d_NRV)
    y = y_NPV if y_NPV.dtype == torch.float32 else torch.empty(y_NPV.shape)
    tokens = X_NKV.shape[0]
    mean_N, rstd_N = torch.empty(tokens), torch.empty(tokens)
    library().rmt_boundary_forward(
        *dimensions(X_NKV, write_KR, norm, read_PK),
        X_NKV.data_ptr(),
        first,
        d_NRV.data_ptr(),
        d_NRV.stride(0),
        write_KR.data_ptr(),
        gain_KV.data_ptr(),
        read_PK.data_ptr(),
        y.data_ptr(),
        mean_N.data_ptr(),
        rstd_N.data_ptr(),
        threads(X_NKV, write_KR, read_PK),
    )
    if y is not y_NPV:
        y_NPV.copy_(y)
    return mean_N, rstd_N


def backward(
    X_NKV: Tensor,
    G_NKV: Tensor,
    fresh: bool,
    first: bool,
    d_NRV: Tensor,
    write_KR: Tensor,
    gain_KV: Tensor,
    norm: "Norming",
    read_PK: Tensor,
    stats: Stats,
    dy_NPV: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d, dy_NPV = token_major(d_NRV), token_major(dy_NPV)
    mean_N, rstd_N = stats
    dd_NRV = torch.empty(d.shape)
    dwrite_KR, dgain_KV, dread_PK = (torch.empty_like(t) for t in (write_KR, gain_KV, read_PK))
    library().rmt_boundary_backward(
        *dimensions(X_NKV, write_KR, norm, read_PK),
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
        threads(X_NKV, write_KR, read_PK),
    )
    return dd_NRV.to(d_NRV.dtype), dwrite_KR, dgain_KV, dread_PK


def takes(key_dim: int, value_dim: int, kind: torch.dtype) -> bool:
    return kind == torch.float32


def dimensions(X_NKV: Tensor, write_KR: Tensor, norm: "Norming", read_PK: Tensor) -> tuple:
    N, K, V = X_NKV.shape
    return N, K, V, write_KR.shape[1], read_PK.shape[0], norm.kind == "layernorm", norm.eps


def threads(X_NKV: Tensor, write_KR: Tensor, read_PK: Tensor) -> int:
    return build.threads(2.0 * X_NKV.numel() * (write_KR.shape[1] + read_PK.shape[0]))


def token_major(x_NRV: Tensor) -> Tensor:
    """float32 with each token's vectors in one piece; tokens may lie apart."""
    x_NRV = x_NRV if x_NRV.dtype == torch.float32 else x_NRV.float()
    R, V = x_NRV.shape[1:]
    dense = (x_NRV.stride(2) == 1 or V == 1) and (x_NRV.stride(1) == V or R == 1)
    return x_NRV if dense else x_NRV.contiguous()
