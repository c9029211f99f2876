"""Vectors that are computed together and used apart, such as queries, keys and values: divided without a copy, and
their gradients put together without one where they already lie side by side (as our attention kernel leaves them).

Axes: N tokens (`...`: any leading axes), P vectors, V their dimension.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmt.ops.once import once_differentiable


class Like(NamedTuple):
    """What is known of a tensor [N, P, V] that is not kept."""

    tokens: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


def divide(x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """`x.split(sizes, dim=-2)` for x [..., P, V]."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return x.split(sizes, dim=-2)
    lead = x.shape[:-2]
    pieces = _Divide.apply(x.reshape(-1, *x.shape[-2:]), sizes)
    return tuple(piece.view(*lead, *piece.shape[1:]) for piece in pieces)


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NPV: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.sizes, ctx.like = sizes, Like(len(x_NPV), x_NPV.shape[2], x_NPV.dtype, x_NPV.device)
        ctx.set_materialize_grads(False)
        return x_NPV.split(sizes, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        return join(grads, ctx.sizes, ctx.like), None


def join(pieces: tuple[Tensor | None, ...], sizes: tuple[int, ...], like: Like) -> Tensor:
    """The pieces as one tensor [N, P, V]: a view where they lie side by side, else a copy; None is zero."""
    N, V, dtype, device = like
    first = pieces[0]
    if first is not None and first.stride()[1:] == (V, 1):
        place, adjacent = first.data_ptr(), True
        for piece, size in zip(pieces, sizes, strict=True):
            if piece is None or piece.data_ptr() != place or piece.stride() != first.stride():
                adjacent = False
                break
            adjacent = adjacent and same_memory(piece, first)
            place += size * V * first.element_size()
        if adjacent:
            return first.as_strided((N, sum(sizes), V), first.stride())
    filled = [
        torch.zeros(N, size, V, dtype=dtype, device=device) if piece is None else piece
        for piece, size in zip(pieces, sizes, strict=True)
    ]
    return torch.cat(filled, dim=1)


def same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
