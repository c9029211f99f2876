"""Decoding with a matrix stream and the native operations: one token after another, in memory that is allocated once.

A step computes what `LanguageModel` computes for one new token of each sequence after a cache. Every weight is then
read once from memory, and the rest is so small that the time between the products counts. So the kernels are bound to
their tensors once, and a layer is four short calls. All shapes are fixed; only the number of cached tokens that
attention looks at grows. What a step still allocates has a fixed size: the embeddings, and the vector that it returns.

Axes: B batch, T = 1 new token, H query heads, G key/value heads, V head_dim, P = H + 2G, R vectors written, K key_dim,
D model_dim, F hidden neurons, E of them after the activation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.modules import module

from rmt.ops import choice
from rmt.ops.attention import Attend, alibi_slopes
from rmt.ops.boundary import full_gain
from rmt.ops.boundary import native as native_boundary
from rmt.ops.boundary.step import Norming, Step
from rmt.ops.feed_forward import native_activate_into
from rmt.ops.native import attention as native_attention
from rmt.streams.base import Embedded
from rmt.streams.matrix import MatrixBoundary

if TYPE_CHECKING:
    from rmt.model import Attention, Cache, FeedForward, LanguageModel


def applies(model: LanguageModel, cache: Cache) -> bool:
    """Whether the operations are native ones on float32, and no gradients are wanted."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    return choice.choose(model.ops, cache.memory) == "native"


def hooks_of(model: LanguageModel) -> list[dict]:
    """Where the hooks of all parts of the model are kept, and those of all modules: empty if nobody listens."""
    found = [module._global_forward_hooks, module._global_forward_pre_hooks]
    for part in model.modules():
        found += [part._forward_hooks, part._forward_pre_hooks]
    return found


class Decoder:
    """Steps of one model with one cache, from whose memory it reads and to which it writes.

    Values derived from the weights (the keys of tokens and positions side by side) are kept, as are the keys and values
    in the cache: after a change of the weights both need to be made anew.
    """

    def __init__(self, model: LanguageModel, cache: Cache) -> None:
        config, B = model.config, cache.batch
        self.H, self.G, V = config.heads, config.kv_groups, config.head_dim
        self.kept = cache.layers  # not the cache itself: it holds this decoder, and a ring is freed late
        self.hooks = hooks_of(model)
        self.X_NKV = torch.empty(B, config.key_dim, V)
        self.mean_N, self.rstd_N = torch.empty(B), torch.empty(B)
        self.qkv_BTPV = torch.empty(B, 1, self.H + 2 * self.G, V)
        self.qkv = self.qkv_BTPV.split((self.H, self.G, self.G), dim=2)
        self.heads_BTHV, self.read_BTHV, self.y_BTHV = (torch.empty(B, 1, self.H, V) for _ in range(3))
        self.slopes_H = alibi_slopes(self.H).float() if config.position == "alibi" else None
        self.value_residual = config.value_residual
        boundaries = cast("list[MatrixBoundary]", list(model.stream))
        empty_BTD = torch.empty(B, 1, self.H * V)
        first = Embedded(empty_BTD, empty_BTD if config.position == "learned" else None)
        self.d_BTRV, first_KR = boundaries[0].written(first)
        self.steps: list[Step] = []  # they keep alive what the kernels are bound to
        self.start = self.bind_boundary(boundaries[0], first_KR)
        self.layers = []
        for layer in range(config.layers):
            attention, core = cast("Attention", model.attention[layer]), cast("FeedForward", model.feed_forward[layer])
            after_attention, after_core = boundaries[2 * layer + 1 : 2 * layer + 3]
            self.layers.append(
                (
                    attention,
                    self.bind_attention(layer, attention.scale),
                    self.bind_boundary(after_attention, after_attention.store.keys_KR),
                    self.bind_core(core),
                    self.bind_boundary(after_core, after_core.store.keys_KR),
                )
            )

    @staticmethod
    def takes(model: LanguageModel) -> bool:
        """The parts of the model are those that a decoder knows, their weights are here, and nobody listens."""
        from rmt.model import FeedForward

        return (
            all(type(boundary) is MatrixBoundary for boundary in model.stream)
            and all(type(core) is FeedForward for core in model.feed_forward)
            and all(
                type(p.data) is Tensor and p.dtype == torch.float32 and p.is_contiguous() for p in model.parameters()
            )
            and not any(hooks_of(model))
        )

    def bind_boundary(self, boundary: MatrixBoundary, write_KR: Tensor) -> Callable[[], None]:
        written = {"embedding": self.d_BTRV, "attention": self.heads_BTHV, "feed_forward": self.y_BTHV}
        read_BTPV = self.qkv_BTPV if boundary.site.before == "attention" else self.read_BTHV
        norm, d_NRV = boundary.norm, written[boundary.site.after].flatten(0, 1)
        _, K, V = self.X_NKV.shape
        gain_KV = full_gain(norm.gain, K, V, torch.float32, self.X_NKV.device)
        first = boundary.site.after == "embedding"
        norming = Norming(norm.kind, norm.eps)
        self.steps.append(Step(self.X_NKV, first, d_NRV, write_KR, gain_KV, boundary.retrieve.keys_RK, norming))
        return native_boundary.bind_forward(self.steps[-1], read_BTPV.flatten(0, 1), self.mean_N, self.rstd_N)

    def bind_attention(self, layer: int, scale: float) -> Callable[[int, int | None, int], None]:
        (q_BTHV, k_BTGV, v_BTGV), kept = self.qkv, self.kept[layer]
        return native_attention.bind_token(
            q_BTHV, k_BTGV, v_BTGV, kept.k_BGSV, kept.v_BGSV, self.slopes_H, scale, self.heads_BTHV
        )

    def bind_core(self, core: FeedForward) -> Callable[[], object]:
        x_BD, y_BD = self.read_BTHV.flatten(0, 1).flatten(1), self.y_BTHV.flatten(0, 1).flatten(1)
        into_DF, out_FD, gated = core.into_FD.t(), core.out_DF.t(), core.gated
        h_BF, a_BE = (torch.empty(len(x_BD), neurons) for neurons in (into_DF.shape[1], out_FD.shape[0]))

        def run() -> None:
            torch.mm(x_BD, into_DF, out=h_BF)
            native_activate_into(h_BF, gated, a_BE)
            torch.mm(a_BE, out_FD, out=y_BD)

        return run

    def step(self, embedded: Embedded, context: Attend) -> Tensor:
        """What the unembedding reads [B, 1, D]. The cache has the new token's keys and values afterwards."""
        token_BTRV, *position_BTRV = self.d_BTRV.split(self.H, dim=2)
        token_BTRV.copy_(embedded.token_BTD.view(token_BTRV.shape))
        if position_BTRV and embedded.position_BTD is not None:
            position_BTRV[0].copy_(embedded.position_BTD.view(token_BTRV.shape))
        length = context.past + 1
        start_B = native_attention.address(context.start_B)
        threads = native_attention.token_threads(self.heads_BTHV, length)
        self.start()
        first_v_BTGV = self.qkv[2].clone() if self.value_residual else None
        for attention, attend, after_attention, core, after_core in self.layers:
            for mine, changed in zip(self.qkv, attention.entering(self.qkv, context, first_v_BTGV), strict=True):
                if changed is not mine:
                    mine.copy_(changed)
            attend(length, start_B, threads)
            after_attention()
            core()
            after_core()
        for kept in self.kept:
            kept.length = length
        return self.read_BTHV.flatten(2).clone()
