"""One boundary of the matrix stream as one operation: X += W d ; y = r . norm(X).

`definition` says what it computes, in ordinary PyTorch. `write_read` computes the same in place: all boundaries of a
pass share one buffer that holds the stream, and no boundary saves it. In the backward pass each boundary first finds
in the buffer the stream as it left it, and subtracts W d on its way out, so that the boundary before it finds its own.
What is saved per token is the data d and two numbers of the norm. The first boundary writes to an empty stream; it
computes X = W d anew instead of trusting the subtractions.

Writing in place is safe because nobody sees the buffer. A boundary hands on a `State`: a ticket for the buffer at one
position of the pass. A ticket that has been overtaken, in the forward or in the backward pass, raises; it never gives
wrong numbers. The gradient of the stream also lives in the buffer, so what autograd sees of the stream is only an empty
tensor, the `link`, that puts the boundaries in order.

The versions of the computation itself are `portable` (PyTorch), `native` (C++) and `triton`: each two functions of a
`Step`.

Axes: N tokens (all leading axes), R vectors written, P vectors read, K key_dim, V head_dim.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmt.config import Ops
from rmt.ops.boundary.step import Norming, Stats, Step
from rmt.ops.choice import choose
from rmt.ops.norm import normalise
from rmt.ops.once import once_differentiable
from rmt.ops.pieces import Like, join, same_memory


def definition(
    X_NKV: Tensor | None, d_NRV: Tensor, write_KR: Tensor, gain: Tensor | None, norm: Norming, read_PK: Tensor
) -> tuple[Tensor, Tensor]:
    """The truth: the new stream, and what is read from it. The stream is float32 (or float64) whatever `d` is."""
    kind = stream_dtype(write_KR.dtype)
    with torch.autocast(d_NRV.device.type, enabled=False):
        outer_NKV = torch.matmul(write_KR.to(kind), d_NRV.to(kind))
        X_NKV = outer_NKV if X_NKV is None else X_NKV + outer_NKV
        gain = None if gain is None else gain.to(kind)
        y_NPV = torch.matmul(read_PK.to(kind), normalise(X_NKV, 2, gain, norm.kind, norm.eps))
    return X_NKV, y_NPV.to(read_dtype(d_NRV))


def stream_dtype(weights: torch.dtype) -> torch.dtype:
    """In bfloat16 the sum over layers loses the early ones, so the stream is float32 at least."""
    return torch.promote_types(weights, torch.float32)


def read_dtype(d: Tensor) -> torch.dtype:
    """What the next core computes in."""
    device = d.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else d.dtype


def write_read(
    state: State | Tensor | None,
    d: Tensor,
    write_KR: Tensor,
    gain: Tensor | None,
    norm: Norming,
    read_PK: Tensor,
    pieces: tuple[int, ...],
    ops: Ops = "auto",
    as_tensor: bool = False,
) -> tuple[State | Tensor, tuple[Tensor, ...]]:
    """Write `d` to the stream, normalise, read.

    Args:
        state: None for an empty stream; the `State` that the boundary before returned, which this call overtakes; or
            an ordinary tensor [..., K, V], which stays as it is.
        d: [..., R, V], the vectors to write.
        write_KR: their keys.
        gain: of the norm, [K, V], [V] or None.
        norm: its kind and epsilon.
        read_PK: the keys to read with.
        pieces: how the P vectors are divided, for instance into queries, keys and values; the pieces are views.
        ops: the version to use, see `rmt.ops.choice`.
        as_tensor: return the new stream as a tensor [..., K, V] of its own, for somebody who wants to keep it.

    Returns:
        The new state, and the pieces, each [..., piece, V].
    """
    chosen = choose(ops, write_KR)
    if chosen == "plain":
        if isinstance(state, State):
            raise RuntimeError("the ops changed to 'plain' in the middle of a pass: choose them before it.")
        X, y = definition(state, d, write_KR, gain, norm, read_PK)
        return X, y.split(pieces, dim=-2)
    *lead, R, V = d.shape
    K = write_KR.shape[0]
    kind = stream_dtype(write_KR.dtype)
    backend = find_backend(chosen, K, V, kind)
    start = None
    if isinstance(state, State):
        buffer, link = state.open(), state.link
    else:
        X_NKV = torch.empty(math.prod(lead), K, V, dtype=kind, device=d.device)
        if state is not None:
            start = state.reshape(-1, K, V)
            X_NKV.copy_(start.detach())
        buffer, link = Buffer(X_NKV), torch.empty(0, device=d.device)
    dtype = read_dtype(d)
    turn = _Turn(backend, buffer, buffer.position, state is None, norm, pieces, dtype, as_tensor)
    weights = ready(write_KR, kind), full_gain(gain, K, V, kind, d.device), ready(read_PK, kind)
    d_NRV = d.reshape(-1, R, V)
    tracked = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (link, d, start, *weights))
    reader = None
    if tracked:
        link, X_copy, *read = _WriteRead.apply(turn, link, start, d_NRV, *weights)
        reader = _Reader(backend, weights[1].detach(), weights[2].detach(), norm, dtype)
    else:
        _, y_NPV = turn.forward(d_NRV, *weights)
        X_copy = buffer.X_NKV.clone() if as_tensor else None
        read = [y_NPV] if len(pieces) == 1 else y_NPV.split(pieces, dim=1)
    new = X_copy.view(*lead, K, V) if as_tensor else State(buffer, buffer.position, link, tuple(lead), reader)
    return new, tuple(piece.view(*lead, *piece.shape[1:]) for piece in read)


def ready(keys: Tensor, kind: torch.dtype) -> Tensor:
    """The keys as the backends want them. Decoding has no time for conversions that change nothing."""
    return keys if keys.dtype == kind and keys.is_contiguous() else keys.to(kind).contiguous()


def full_gain(gain: Tensor | None, K: int, V: int, kind: torch.dtype, device: torch.device) -> Tensor:
    """The gain as [K, V]."""
    if gain is not None and gain.ndim == 2 and gain.dtype == kind:
        return gain
    if gain is None:
        gain = torch.ones(V, dtype=kind, device=device)
    return gain.to(kind).expand(K, V).contiguous()


@functools.cache
def find_backend(chosen: Ops, key_dim: int, value_dim: int, kind: torch.dtype) -> Any:
    """The module that computes; the portable one for what a faster one does not take."""
    if chosen != "portable":
        backend = importlib.import_module(f"rmt.ops.boundary.{chosen}")
        if backend.takes(key_dim, value_dim, kind):
            return backend
    return importlib.import_module("rmt.ops.boundary.portable")


@dataclass
class Buffer:
    """The stream of one pass, changed in place.

    `position` counts the boundaries that have written to it: up in the forward pass, down in the backward pass.
    `G_NKV` is the gradient of the stream at that position, once the backward pass has begun.
    """

    X_NKV: Tensor
    position: int = 0
    G_NKV: Tensor | None = None
    read_again: tuple[int, Tensor] | None = None  # position, and what was read there a second time

    def expect(self, position: int, doing: str) -> None:
        if self.position != position:
            raise RuntimeError(
                f"{doing}: the matrix stream was changed in place since (it is at boundary {self.position}, "
                f"{position} is needed). A state can be used once, and a pass differentiated once, from its end; "
                'for anything else use model.set_ops("plain").'
            )


@dataclass(frozen=True)
class State:
    """A ticket for the stream after one boundary. It is good until the next boundary writes."""

    buffer: Buffer = field(repr=False)
    position: int
    link: Tensor = field(repr=False)
    lead: tuple[int, ...]
    reader: _Reader | None = field(repr=False)  # None where no gradient is wanted

    def open(self) -> Buffer:
        self.buffer.expect(self.position, "this state is used again")
        return self.buffer

    def copy(self) -> Tensor:
        """The stream [..., K, V], as a tensor of its own, without gradients."""
        X_NKV = self.open().X_NKV
        return X_NKV.view(*self.lead, *X_NKV.shape[1:]).clone()

    @contextmanager
    def keep_nothing_of(self, read: Tensor | tuple[Tensor, ...]) -> Iterator[None]:
        """Within this context, whatever autograd would keep of `read` (what the boundary of this state returned) is
        read from the stream again in the backward pass."""
        one = read if isinstance(read, Tensor) else read[0]

        def pack(x: Tensor) -> Any:
            return (x.shape, x.stride(), x.storage_offset()) if same_memory(x, one) else x

        def unpack(kept: Any) -> Tensor:
            return kept if isinstance(kept, Tensor) else self._read_again().as_strided(*kept)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _read_again(self) -> Tensor:
        self.buffer.expect(self.position, "reading the stream again")
        assert self.reader is not None, "only a backward pass reads again"
        if self.buffer.read_again is None or self.buffer.read_again[0] != self.position:
            self.buffer.read_again = self.position, self.reader.read(self.buffer.X_NKV)
        return self.buffer.read_again[1]


class _Reader(NamedTuple):
    """How a boundary reads."""

    backend: Any
    gain_KV: Tensor
    read_PK: Tensor
    norm: Norming
    dtype: torch.dtype

    def read(self, X_NKV: Tensor) -> Tensor:
        N, K, V = X_NKV.shape
        y_NPV = torch.empty(N, len(self.read_PK), V, dtype=self.dtype, device=X_NKV.device)
        nothing_NRV, nothing_KR = X_NKV.new_empty(N, 0, V), X_NKV.new_empty(K, 0)
        step = Step(X_NKV, False, nothing_NRV, nothing_KR, self.gain_KV, self.read_PK, self.norm)
        self.backend.forward(step, y_NPV)
        return y_NPV


class _Turn(NamedTuple):
    """One boundary of one pass: everything but the differentiable inputs."""

    backend: Any
    buffer: Buffer
    position: int  # of the buffer before this boundary
    first: bool  # writes to an empty stream
    norm: Norming
    pieces: tuple[int, ...]
    dtype: torch.dtype
    as_tensor: bool

    def forward(self, d_NRV: Tensor, write_KR: Tensor, gain_KV: Tensor, read_PK: Tensor) -> tuple[Stats, Tensor]:
        """Write and read; returns the norm's statistics, and y_NPV."""
        X_NKV = self.buffer.X_NKV
        shape = X_NKV.shape[0], read_PK.shape[0], X_NKV.shape[2]
        y_NPV = torch.empty(shape, dtype=self.dtype, device=X_NKV.device)
        stats = self.backend.forward(Step(X_NKV, self.first, d_NRV, write_KR, gain_KV, read_PK, self.norm), y_NPV)
        self.buffer.position = self.position + 1
        return stats, y_NPV


class _WriteRead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        turn: _Turn,
        link: Tensor,
        start_NKV: Tensor | None,
        d_NRV: Tensor,
        write_KR: Tensor,
        gain_KV: Tensor,
        read_PK: Tensor,
    ) -> tuple[Tensor | None, ...]:
        stats, y_NPV = turn.forward(d_NRV, write_KR, gain_KV, read_PK)
        ctx.turn = turn
        ctx.save_for_backward(d_NRV, write_KR, gain_KV, read_PK, *stats)
        ctx.set_materialize_grads(False)
        X_copy = turn.buffer.X_NKV.clone() if turn.as_tensor else None
        return torch.empty_like(link), X_copy, *y_NPV.split(turn.pieces, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _link: Tensor, grad_copy: Tensor | None, *grad_pieces: Tensor | None) -> tuple:
        turn: _Turn = ctx.turn
        buffer = turn.buffer
        buffer.expect(turn.position + 1, "backward pass of a boundary")
        d_NRV, write_KR, gain_KV, read_PK, *stats = ctx.saved_tensors
        if grad_copy is not None:
            buffer.G_NKV = grad_copy.clone() if buffer.G_NKV is None else buffer.G_NKV + grad_copy
        fresh = buffer.G_NKV is None
        G_NKV = torch.empty_like(buffer.X_NKV) if buffer.G_NKV is None else buffer.G_NKV
        dy_NPV = join(grad_pieces, turn.pieces, Like(len(d_NRV), d_NRV.shape[2], turn.dtype, d_NRV.device))
        step = Step(buffer.X_NKV, turn.first, d_NRV, write_KR, gain_KV, read_PK, turn.norm)
        grads = turn.backend.backward(step, G_NKV, fresh, tuple(stats), dy_NPV)
        buffer.position, buffer.G_NKV, buffer.read_again = turn.position, G_NKV, None
        link = torch.empty(0, device=d_NRV.device)
        wants_start = ctx.needs_input_grad[2]
        return None, link, G_NKV if wants_start else None, *grads
