"""The boundary in ordinary PyTorch, for every device and dtype: a chunk of tokens at a time, so that on a CPU the
chunk of the stream stays in the cache through all the small products.

`forward` writes and reads; `backward` gives the gradients, turns G into the gradient of the stream before the write
and X into the stream before the write. Axes: see the package.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rmt.ops.boundary.step import Gradients, Stats, Step

CPU_CHUNK_BYTES = 2**20
GPU_CHUNK_BYTES = 2**28


def forward(step: Step, y_NPV: Tensor) -> Stats:
    X_NKV, first, d_NRV, write_KR, gain_KV, read_PK, norm = step
    mean_N, rstd_N = (X_NKV.new_zeros(len(X_NKV)) for _ in range(2))
    for part in chunks(X_NKV):
        X, d = X_NKV[part], d_NRV[part].to(X_NKV.dtype)
        store(X, write_KR, d, first)
        if norm.kind == "layernorm":
            h_NKV, mean, rstd = torch.native_layer_norm(X, gain_KV.shape, gain_KV, None, norm.eps)
            mean_N[part], rstd_N[part] = mean.view(-1), rstd.view(-1)
        else:
            rstd = torch.rsqrt(X.square().mean((1, 2), keepdim=True) + norm.eps)
            h_NKV = (X * rstd).mul_(gain_KV)
            rstd_N[part] = rstd.view(-1)
        if y_NPV.dtype == X.dtype:
            torch.bmm(over(read_PK, X), h_NKV, out=y_NPV[part])
        else:
            y_NPV[part] = torch.bmm(over(read_PK, X), h_NKV)
    return mean_N, rstd_N


def backward(step: Step, G_NKV: Tensor, fresh: bool, stats: Stats, dy_NPV: Tensor) -> Gradients:
    """`fresh`: G holds nothing yet."""
    X_NKV, first, d_NRV, write_KR, gain_KV, read_PK, norm = step
    dd_NRV = torch.empty(d_NRV.shape, dtype=d_NRV.dtype, device=d_NRV.device)
    dwrite_KR, dgain_KV, dread_PK = (torch.zeros_like(t) for t in (write_KR, gain_KV, read_PK))
    for part in chunks(X_NKV):
        X, G, d, dy = X_NKV[part], G_NKV[part], d_NRV[part].to(X_NKV.dtype), dy_NPV[part].to(X_NKV.dtype)
        mean, rstd = (stat[part, None, None] for stat in stats)
        if first:
            torch.bmm(over(write_KR, X), d, out=X)
        dh_NKV = torch.bmm(over(read_PK.t(), X), dy)
        unit_NKV = (X - mean).mul_(rstd)
        h_NKV = unit_NKV * gain_KV
        dread_PK += torch.bmm(dy, h_NKV.transpose(1, 2)).sum(0)
        if norm.kind == "layernorm":
            dX, dgain, _ = torch.ops.aten.native_layer_norm_backward(
                dh_NKV, X, gain_KV.shape, mean, rstd, gain_KV, None, [True, True, False]
            )
            dgain_KV += dgain
        else:
            dgain_KV += (dh_NKV * unit_NKV).sum(0)
            dunit_NKV = dh_NKV.mul_(gain_KV)
            along = (dunit_NKV * unit_NKV).mean((1, 2), keepdim=True)
            dX = dunit_NKV.sub_(unit_NKV.mul_(along)).mul_(rstd)
        if fresh:
            G.copy_(dX)
        else:
            G += dX
        dwrite_KR += torch.bmm(G, d.transpose(1, 2)).sum(0)
        dd_NRV[part] = torch.bmm(over(write_KR.t(), X), G)
        if not first:
            X.baddbmm_(over(write_KR, X), d, alpha=-1)
    return dd_NRV, dwrite_KR, dgain_KV, dread_PK


def store(X_NKV: Tensor, write_KR: Tensor, d_NRV: Tensor, first: bool) -> None:
    if first:
        torch.bmm(over(write_KR, X_NKV), d_NRV, out=X_NKV)
    else:
        X_NKV.baddbmm_(over(write_KR, X_NKV), d_NRV)


def over(keys: Tensor, X_NKV: Tensor) -> Tensor:
    """The same keys for every token of the chunk."""
    return keys.expand(len(X_NKV), -1, -1)


def chunks(X_NKV: Tensor) -> Iterator[slice]:
    size = CPU_CHUNK_BYTES if X_NKV.device.type == "cpu" else GPU_CHUNK_BYTES
    step = max(1, size // max(1, X_NKV[0].numel() * X_NKV.element_size())) if len(X_NKV) else 1
    for start in range(0, len(X_NKV), step):
        yield slice(start, start + step)
