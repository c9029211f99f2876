"""The boundary as Triton kernels for CUDA and ROCm: a float32 stream, data and products in bfloat16 or float32.

One program works through a few tokens with the keys and the gain in registers, so the stream is read and written once.
With bfloat16 data the products run on tensor cores in bfloat16 and sum in float32; the backward pass subtracts the very
product that the forward pass added. Sums over tokens go to one place per program and are added in a fixed order. The
launch settings come from a table rather than from timing at run time, because they decide that order: a resumed run
computes the same bits.

Same two functions as `portable`. Axes: see the package; blocks are padded to powers of two, at least 16.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rmt.ops.boundary.step import Gradients, Stats, Step
from rmt.ops.choice import interprets_triton

INTERPRETED = tl.constexpr(interprets_triton())


class Launch(NamedTuple):
    """How a kernel is started."""

    tokens: int  # per program
    warps: int


# By the padded size of one token's stream, at most. tests/ops/test_triton.py asks the compiler for sm_80 and sm_90: in
# bfloat16 nothing spills up to 4096 (all of the paper's models).
FORWARD = {2048: Launch(8, 4), 4096: Launch(8, 8), 8192: Launch(8, 8)}
BACKWARD = {2048: Launch(16, 4), 4096: Launch(16, 8), 8192: Launch(16, 8)}
ONE_PASS = 2048  # up to this size the backward kernel computes everything at once
STAGES = 1  # the loop over tokens is not pipelined: its registers are full


@triton.jit
def dot(a, b, LOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """a b, in bfloat16 with float32 sums (LOW) or in float32."""
    if LOW:
        if INTERPRETED:  # the interpreter's product does not know bfloat16; rounded operands give the same result
            return tl.dot(a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32))
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    X_NKV, d_NRV, write_KR, gain_KV, read_PK, y_NPV, mean_N, rstd_N,
    N, d_token, eps,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    KB: tl.constexpr, VB: tl.constexpr, RB: tl.constexpr, PB: tl.constexpr,
    TOKENS: tl.constexpr, FIRST: tl.constexpr, CENTRED: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    k, v, r, p = tl.arange(0, KB), tl.arange(0, VB), tl.arange(0, RB), tl.arange(0, PB)
    inside_KV = (k < K)[:, None] & (v < V)[None, :]
    at_KV = k[:, None] * V + v[None, :]
    write = tl.load(write_KR + k[:, None] * R + r[None, :], (k < K)[:, None] & (r < R)[None, :], 0.0)
    read = tl.load(read_PK + p[:, None] * K + k[None, :], (p < P)[:, None] & (k < K)[None, :], 0.0)
    gain = tl.load(gain_KV + at_KV, inside_KV, 0.0)
    inside_RV, inside_PV = (r < R)[:, None] & (v < V)[None, :], (p < P)[:, None] & (v < V)[None, :]
    start = tl.program_id(0).to(tl.int64) * TOKENS
    for t in range(start, tl.minimum(start + TOKENS, N)):
        d = tl.load(d_NRV + t * d_token + r[:, None] * V + v[None, :], inside_RV, 0.0)
        x = dot(write, d, LOW)
        if not FIRST:
            x += tl.load(X_NKV + t * K * V + at_KV, inside_KV, 0.0)
        tl.store(X_NKV + t * K * V + at_KV, x, inside_KV)
        mean = tl.sum(x) / (K * V) if CENTRED else 0.0
        centred = tl.where(inside_KV, x - mean, 0.0)
        rstd = 1 / tl.sqrt(tl.sum(centred * centred) / (K * V) + eps)
        y = dot(read, centred * rstd * gain, LOW)
        tl.store(y_NPV + t * P * V + p[:, None] * V + v[None, :], y.to(y_NPV.dtype.element_ty), inside_PV)
        tl.store(mean_N + t, mean)
        tl.store(rstd_N + t, rstd)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    X_NKV, G_NKV, d_NRV, write_KR, gain_KV, read_PK, mean_N, rstd_N, dy_NPV,
    dd_NRV, dwrite_BKR, dgain_BKV, dread_BPK,
    N, d_token, dy_token,
    K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    KB: tl.constexpr, VB: tl.constexpr, RB: tl.constexpr, PB: tl.constexpr,
    TOKENS: tl.constexpr, FRESH: tl.constexpr, FIRST: tl.constexpr, CENTRED: tl.constexpr, LOW: tl.constexpr,
    READ: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """READ: the gradients of the read keys and the gain; REST: all else. Both at once where the registers hold both."""
    k, v, r, p = tl.arange(0, KB), tl.arange(0, VB), tl.arange(0, RB), tl.arange(0, PB)
    inside_KV, inside_KR = (k < K)[:, None] & (v < V)[None, :], (k < K)[:, None] & (r < R)[None, :]
    inside_RV, inside_PV = (r < R)[:, None] & (v < V)[None, :], (p < P)[:, None] & (v < V)[None, :]
    inside_PK = (p < P)[:, None] & (k < K)[None, :]
    at_KV = k[:, None] * V + v[None, :]
    dwrite = tl.zeros((KB, RB), tl.float32)
    dgain = tl.zeros((KB, VB), tl.float32)
    dread = tl.zeros((PB, KB), tl.float32)
    start = tl.program_id(0).to(tl.int64) * TOKENS
    for t in range(start, tl.minimum(start + TOKENS, N)):
        d = tl.load(d_NRV + t * d_token + r[:, None] * V + v[None, :], inside_RV, 0.0)
        dy = tl.load(dy_NPV + t * dy_token + p[:, None] * V + v[None, :], inside_PV, 0.0)
        # Loaded for every token, from the cache: kept over the loop they would crowd the sums out of the registers.
        write = tl.load(write_KR + k[:, None] * R + r[None, :], inside_KR, 0.0)
        gain = tl.load(gain_KV + at_KV, inside_KV, 0.0)
        outer = dot(write, d, LOW)
        if FIRST:  # the first stream is computed anew, exactly
            x = outer
        else:
            x = tl.load(X_NKV + t * K * V + at_KV, inside_KV, 0.0)
        mean, rstd = tl.load(mean_N + t), tl.load(rstd_N + t)
        unit = tl.where(inside_KV, (x - mean) * rstd, 0.0)
        if READ:
            dread += dot(dy, tl.trans(unit * gain), LOW)
        read_turned = tl.load(read_PK + p[None, :] * K + k[:, None], (p < P)[None, :] & (k < K)[:, None], 0.0)
        dh = dot(read_turned, dy, LOW)
        if READ:
            dgain += dh * unit
        if REST:
            dunit = dh * gain
            common = tl.sum(dunit) / (K * V) if CENTRED else 0.0
            slope = tl.sum(dunit * unit) / (K * V)
            g = rstd * (dunit - common - unit * slope)
            if not FRESH:
                g += tl.load(G_NKV + t * K * V + at_KV, inside_KV, 0.0)
            g = tl.where(inside_KV, g, 0.0)
            tl.store(G_NKV + t * K * V + at_KV, g, inside_KV)
            dwrite += dot(g, tl.trans(d), LOW)
            write_turned = tl.load(write_KR + k[None, :] * R + r[:, None], (k < K)[None, :] & (r < R)[:, None], 0.0)
            dd = dot(write_turned, g, LOW)
            tl.store(dd_NRV + t * R * V + r[:, None] * V + v[None, :], dd.to(dd_NRV.dtype.element_ty), inside_RV)
            if not FIRST:
                tl.store(X_NKV + t * K * V + at_KV, x - outer, inside_KV)
    block = tl.program_id(0).to(tl.int64)
    if READ:
        tl.store(dread_BPK + block * P * K + p[:, None] * K + k[None, :], dread, inside_PK)
        tl.store(dgain_BKV + block * K * V + at_KV, dgain, inside_KV)
    if REST:
        tl.store(dwrite_BKR + block * K * R + k[:, None] * R + r[None, :], dwrite, inside_KR)


def forward(step: Step, y_NPV: Tensor) -> Stats:
    X_NKV, first, d_NRV, write_KR, gain_KV, read_PK, norm = step
    mean_N, rstd_N = (torch.empty(len(X_NKV), device=X_NKV.device) for _ in range(2))
    launch = pick(FORWARD, X_NKV)
    d_NRV = token_major(d_NRV)
    if len(X_NKV):
        forward_kernel[(triton.cdiv(len(X_NKV), launch.tokens),)](
            X_NKV, d_NRV, write_KR, gain_KV, read_PK, y_NPV, mean_N, rstd_N,
            len(X_NKV), d_NRV.stride(0), norm.eps,
            **shapes(step), TOKENS=launch.tokens, FIRST=first, CENTRED=norm.kind == "layernorm",
            LOW=y_NPV.dtype == torch.bfloat16, num_warps=launch.warps, num_stages=STAGES,
        )  # fmt: skip
    return mean_N, rstd_N


def backward(step: Step, G_NKV: Tensor, fresh: bool, stats: Stats, dy_NPV: Tensor) -> Gradients:
    X_NKV, first, d_NRV, write_KR, gain_KV, read_PK, norm = step
    launch = pick(BACKWARD, X_NKV)
    programs = triton.cdiv(len(X_NKV), launch.tokens)
    d_NRV, dy_NPV = token_major(d_NRV), token_major(dy_NPV)
    dd_NRV = torch.empty(d_NRV.shape, dtype=d_NRV.dtype, device=d_NRV.device)
    sums = [torch.empty(programs, *t.shape, device=t.device) for t in (write_KR, gain_KV, read_PK)]
    low = dy_NPV.dtype == torch.bfloat16
    for read, rest in passes(X_NKV, low) if programs else ():
        backward_kernel[(programs,)](
            X_NKV, G_NKV, d_NRV, write_KR, gain_KV, read_PK, *stats, dy_NPV, dd_NRV, *sums,
            len(X_NKV), d_NRV.stride(0), dy_NPV.stride(0),
            **shapes(step), TOKENS=launch.tokens, FRESH=fresh, FIRST=first, CENTRED=norm.kind == "layernorm",
            LOW=low, READ=read, REST=rest, num_warps=launch.warps, num_stages=STAGES,
        )  # fmt: skip
    dwrite_KR, dgain_KV, dread_PK = (parts.sum(0) for parts in sums)
    return dd_NRV, dwrite_KR, dgain_KV, dread_PK


def passes(X_NKV: Tensor, low: bool) -> tuple[tuple[bool, bool], ...]:
    """READ and REST of each launch of the backward kernel. The first of two leaves the stream as it is."""
    together = low and block(X_NKV.shape[1]) * block(X_NKV.shape[2]) <= ONE_PASS
    return ((True, True),) if together else ((True, False), (False, True))


def shapes(step: Step) -> dict[str, Any]:
    dims = dict(zip("KVRP", step.sizes[1:], strict=True))
    return dims | {f"{name}B": block(size) for name, size in dims.items()}


def block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def takes(key_dim: int, value_dim: int, kind: torch.dtype) -> bool:
    """A float32 stream that fits in one program's registers."""
    return kind == torch.float32 and block(key_dim) * block(value_dim) <= max(FORWARD)


def pick(table: dict[int, Launch], X_NKV: Tensor) -> Launch:
    size = block(X_NKV.shape[1]) * block(X_NKV.shape[2])
    return next(launch for limit, launch in table.items() if size <= limit)


def token_major(x_NRV: Tensor) -> Tensor:
    """Each token's vectors in one piece; tokens may lie apart."""
    R, V = x_NRV.shape[1:]
    dense = (x_NRV.stride(2) == 1 or V == 1) and (x_NRV.stride(1) == V or R == 1)
    return x_NRV if dense else x_NRV.contiguous()
