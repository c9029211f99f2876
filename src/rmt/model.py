"""The language model: embedding, L layers of attention and feed-forward cores over a residual stream, unembedding.

The cores are the same for every stream. All that distinguishes the RMT, the transformer and their rivals is the list
of boundaries in `self.stream` (see `rmt.streams.base`), so the whole model is the short loop in
`LanguageModel._forward`.

Axes: B batch, T tokens, S cached tokens, H query heads, G key/value heads, V head_dim, D model_dim, F ff_dim,
W vocabulary, K key_dim.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rmt.config import ModelConfig, Ops, Recompute
from rmt.errors import InputError
from rmt.ops import attention as attention_op
from rmt.ops import choice
from rmt.ops.attention import Attend
from rmt.ops.boundary import State
from rmt.ops.cross_entropy import linear_cross_entropy
from rmt.ops.feed_forward import feed_forward
from rmt.streams import find_stream
from rmt.streams.base import Embedded
from rmt.theory import mup
from rmt.theory.mup import Described, Role

if TYPE_CHECKING:
    from rmt.decoding import Decoder


class Embedding(Described):
    """Token table and, with learned positions, position table."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.scale = mup.embedding_scale(config)
        self.token_WD = self.describe("token_WD", (config.vocab_size, config.model_dim), Role("embedding"))
        self.position_ND = None
        if config.position == "learned":
            self.position_ND = self.describe("position_ND", (config.context, config.model_dim), Role("embedding"))

    def forward(self, ids_BT: Tensor, position_BT: Tensor) -> Embedded:
        token_BTD = F.embedding(ids_BT, self.token_WD) * self.scale
        if self.position_ND is None:
            return Embedded(token_BTD, None)
        position_BTD = F.embedding(position_BT, self.position_ND) * self.scale
        return Embedded(token_BTD, position_BTD.expand_as(token_BTD))


class Attention(Described):
    """The attention core of one layer: heads in, heads out, no weights but optional gains and value residuals."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.ops: Ops = "auto"
        self.scale = mup.attention_scale(config, layer)
        self.eps = config.norm_eps
        self.query_gain = self.key_gain = None
        if config.qk_norm:
            self.query_gain = self.describe("query_gain", (config.head_dim,), Role("gain"))
            self.key_gain = self.describe("key_gain", (config.head_dim,), Role("gain"))
        self.value_mix = None
        if config.value_residual and layer > 0:
            self.value_mix = self.describe("value_mix", (2,), Role("connection", initial=0.5))

    def forward(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        context: Attend,
        cache: LayerCache | None,
        first_v_BTGV: Tensor | None = None,
    ) -> Tensor:
        """`first_v_BTGV`: the first layer's values, for the value residual (see docs/streams/value_residual.md)."""
        q_BTHV, k_BTGV, v_BTGV = self.entering(qkv, context, first_v_BTGV)
        k_BGSV, v_BGSV = k_BTGV.transpose(1, 2), v_BTGV.transpose(1, 2)
        if cache is not None:
            k_BGSV, v_BGSV = cache.append(k_BGSV, v_BGSV)
        return attention_op.attend(q_BTHV, k_BGSV, v_BGSV, context, self.scale, self.ops)

    def entering(
        self, qkv: tuple[Tensor, Tensor, Tensor], context: Attend, first_v_BTGV: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as they enter the product: mixed, normalised and turned, where that is asked for."""
        q_BTHV, k_BTGV, v_BTGV = qkv
        if self.value_mix is not None and first_v_BTGV is not None:
            own, first = self.value_mix
            v_BTGV = own * v_BTGV + first * first_v_BTGV
        if self.query_gain is not None and self.key_gain is not None:
            q_BTHV = F.rms_norm(q_BTHV, q_BTHV.shape[-1:], self.query_gain.to(q_BTHV.dtype), self.eps)
            k_BTGV = F.rms_norm(k_BTGV, k_BTGV.shape[-1:], self.key_gain.to(k_BTGV.dtype), self.eps)
        if context.rotation is not None:
            q_BTHV = attention_op.rotate(q_BTHV, context.rotation)
            k_BTGV = attention_op.rotate(k_BTGV, context.rotation)
        return q_BTHV, k_BTGV, v_BTGV


class FeedForward(Described):
    """W2 gelu(W1 x), or W2 (silu(gate) * up) with gate and up packed in W1."""

    def __init__(self, config: ModelConfig, writes: bool) -> None:
        super().__init__()
        self.ops: Ops = "auto"
        self.gated = config.ff == "swiglu"
        D, neurons = config.model_dim, config.ff_dim
        rows = 2 * neurons if self.gated else neurons
        into = Role("linear", fan_in=D, fan_out=rows, scales_with=("model_dim",))
        out = Role("linear", fan_in=neurons, fan_out=D, scales_with=("ff_dim",), writes=writes)
        self.into_FD = self.describe("into_FD", (rows, D), into)
        self.out_DF = self.describe("out_DF", (D, neurons), out)

    def forward(self, x_BTD: Tensor, recompute: Recompute = "none") -> Tensor:
        return feed_forward(x_BTD, self.into_FD, self.out_DF, self.gated, recompute, self.ops)


class Unembedding(Described):
    """Logits from the last read of the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.scale = mup.logit_scale(config)
        role = Role("unembedding", fan_in=config.model_dim, fan_out=config.vocab_size, scales_with=("model_dim",))
        self.weight_WD = self.describe("weight_WD", (config.vocab_size, config.model_dim), role)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.linear(x_BTD, self.weight_WD) * self.scale


@dataclass
class Output:
    """What a forward pass returns.

    `loss` (cross-entropy plus z-loss; the one to differentiate), `ce` (cross-entropy alone; the one to report) and
    `accuracy` are there when targets were given. `logits` are computed when they are first asked for, so that
    training never holds them.
    """

    hidden_BTD: Tensor
    unembedding: Unembedding
    loss: Tensor | None = None
    ce: Tensor | None = None
    accuracy: Tensor | None = None
    _logits: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        if self._logits is None:
            self._logits = self.unembedding(self.hidden_BTD)
        return self._logits


class LanguageModel(nn.Module):
    """A language model over the residual stream that `config.stream` names. Made by `rmt.build`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute: Recompute = "none"
        self.ops: Ops = "auto"
        stream = find_stream(config.stream)
        self.embedding = Embedding(config)
        self.attention = nn.ModuleList(Attention(config, layer) for layer in range(config.layers))
        self.feed_forward = nn.ModuleList(
            stream.feed_forward(config, layer) or FeedForward(config, stream.feed_forward_writes)
            for layer in range(config.layers)
        )
        self.stream = nn.ModuleList(stream.boundaries(config))
        self.unembedding = Unembedding(config)

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Cache | None = None,
        position_ids: Tensor | None = None,
    ) -> Output:
        """Run the model on `input_ids` [B, T].

        Args:
            input_ids: token ids.
            targets: the id that should follow each token, aligned with the logits; -100 is ignored. Gives `loss`, `ce`.
            document_ids: a number per token; tokens attend only within their own document.
            cache: keys and values of earlier tokens (`new_cache`); the new ones are appended to it.
            position_ids: each token's position; by default counted from the start of the sequence (or of the cache).
        """
        self._check(input_ids, targets, document_ids, cache)
        hidden_BTD = self._forward(input_ids, document_ids, cache, position_ids)
        output = Output(hidden_BTD, self.unembedding)
        if targets is not None:
            loss = linear_cross_entropy(
                hidden_BTD.flatten(0, 1),
                self.unembedding.weight_WD,
                targets.flatten(),
                self.config.z_loss,
                self.unembedding.scale,
                ops=self.ops,
            )
            output.loss, output.ce, output.accuracy = loss.total, loss.ce, loss.accuracy
        return output

    def set_ops(self, name: str) -> None:
        """Choose the version of the hot operations (see `rmt.ops.choice`); "auto" unless called."""
        choice.check(name, self.unembedding.weight_WD.device)
        self.ops = cast(Ops, name)
        for module in self.modules():
            if hasattr(module, "ops"):
                module.ops = self.ops  # type: ignore[assignment]

    def _forward(
        self, ids_BT: Tensor, document_BT: Tensor | None, cache: Cache | None, position_BT: Tensor | None
    ) -> Tensor:
        past = cache.length if cache is not None else 0
        if position_BT is None:
            position_BT = torch.arange(past, past + ids_BT.shape[1], device=ids_BT.device)[None]
        embedded = self.embedding(ids_BT, position_BT)
        context = self._context(embedded, ids_BT, document_BT, cache, position_BT)
        if cache is not None and ids_BT.shape[1] == 1 and (decoder := cache.decoder_for(self, context)):
            cache.length = past + 1
            return decoder.step(embedded, context)
        state, x = self.stream[0](None, embedded)
        first_v_BTGV = x[2] if self.config.value_residual else None
        for layer in range(self.config.layers):
            layer_cache = cache.layers[layer] if cache is not None else None
            whole = self.recompute == "full" and torch.is_grad_enabled() and layer_cache is None
            if whole and not isinstance(state, State):
                state, x = checkpoint(self._layer, layer, state, x, context, None, first_v_BTGV, use_reentrant=False)
            else:
                state, x = self._layer(layer, state, x, context, layer_cache, first_v_BTGV)
        if cache is not None:
            cache.length = past + ids_BT.shape[1]
        return x

    def _layer(
        self, layer: int, state: Any, qkv: Any, context: Attend, cache: LayerCache | None, first_v_BTGV: Tensor | None
    ) -> tuple[Any, Any]:
        """One layer: both cores, each followed by its boundary."""
        with self._keeping_little(state, qkv):
            heads_BTHV = self.attention[layer](qkv, context, cache, first_v_BTGV)
        state, x_BTD = self.stream[2 * layer + 1](state, heads_BTHV)
        with self._keeping_little(state, x_BTD):
            y_BTD = self._feed_forward(self.feed_forward[layer], x_BTD)
        return self.stream[2 * layer + 2](state, y_BTD)

    def _feed_forward(self, core: nn.Module, x_BTD: Tensor) -> Tensor:
        if isinstance(core, FeedForward):
            return core(x_BTD, self.recompute)
        if self.recompute == "ff" and torch.is_grad_enabled():
            return checkpoint(core, x_BTD, use_reentrant=False)
        return core(x_BTD)

    def _keeping_little(self, state: Any, read: Tensor | tuple[Tensor, ...]) -> AbstractContextManager:
        """A matrix stream that is rebuilt in the backward pass can be read again there (see `rmt.ops.boundary`)."""
        if self.recompute == "full" and isinstance(state, State) and torch.is_grad_enabled():
            return state.keep_nothing_of(read)
        return nullcontext()

    def _context(
        self, embedded: Embedded, ids_BT: Tensor, document_BT: Tensor | None, cache: Cache | None, position_BT: Tensor
    ) -> Attend:
        """Masks, biases and rotations of this pass."""
        T = ids_BT.shape[1]
        past = cache.length if cache is not None else 0
        document_BS, start_B = document_BT, None
        if cache is not None:
            document_BS, start_B = cache.append_documents(document_BT, T), cache.start_B
            document_BT = None if document_BS is None else document_BS[:, past:]
        dtype = embedded.token_BTD.dtype
        return attention_op.prepare(self.config, past, position_BT, document_BT, document_BS, dtype, start_B)

    def new_cache(self, batch: int, capacity: int | None = None) -> Cache:
        """An empty cache for decoding `batch` sequences of up to `capacity` tokens (default: the context)."""
        weight = self.unembedding.weight_WD
        return Cache(self.config, batch, capacity or self.config.context, weight.device, weight.dtype)

    def _check(
        self, ids_BT: Tensor, targets_BT: Tensor | None, document_BT: Tensor | None, cache: Cache | None
    ) -> None:
        config = self.config
        if ids_BT.ndim != 2 or ids_BT.dtype not in (torch.int64, torch.int32):
            kind = f"{ids_BT.dtype} {list(ids_BT.shape)}".removeprefix("torch.")
            raise InputError(f"input_ids must be integers of shape [batch, tokens], got {kind}.")
        for name, other in (("targets", targets_BT), ("document_ids", document_BT)):
            if other is not None and other.shape != ids_BT.shape:
                raise InputError(
                    f"{name} has shape {list(other.shape)}, input_ids {list(ids_BT.shape)}: make them equal."
                )
        length = ids_BT.shape[1] + (cache.length if cache is not None else 0)
        if length > config.context:
            raise InputError(
                f"the sequence has {length} tokens, the context is {config.context}: shorten it, or build the model "
                "with a longer context."
            )
        if cache is not None and length > cache.capacity:
            raise InputError(f"the cache holds {cache.capacity} tokens, {length} are needed: make a larger one.")
        # On an accelerator this would wait for the device at every step, and it breaks a compiled graph; the trainer
        # checks the vocabulary once.
        if ids_BT.device.type == "cpu" and ids_BT.numel() and not torch.compiler.is_compiling():
            smallest, largest = (int(end) for end in ids_BT.aminmax())
            if largest >= config.vocab_size or smallest < 0:
                wrong = largest if largest >= config.vocab_size else smallest
                raise InputError(
                    f"token id {wrong} is outside the vocabulary of {config.vocab_size}: check the tokenizer."
                )


class LayerCache:
    """Keys and values of one layer: views of the cache's memory, which is allocated once and written in place."""

    def __init__(self, k_BGSV: Tensor, v_BGSV: Tensor) -> None:
        self.k_BGSV, self.v_BGSV = k_BGSV, v_BGSV
        self.length = 0

    def append(self, k_BGTV: Tensor, v_BGTV: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new keys and values; returns views of all so far."""
        new, end = k_BGTV.shape[2], self.length + k_BGTV.shape[2]
        self.k_BGSV.narrow(2, self.length, new).copy_(k_BGTV)
        self.v_BGSV.narrow(2, self.length, new).copy_(v_BGTV)
        self.length = end
        return self.k_BGSV.narrow(2, 0, end), self.v_BGSV.narrow(2, 0, end)


class Cache:
    """Keys and values of the tokens seen so far, for decoding one token at a time.

    `memory` [layers, 2 (keys, values), B, G, capacity, V] is allocated once. A new token is written to its place in it,
    and attention reads views of it: nothing is moved, joined or made longer.
    """

    def __init__(
        self, config: ModelConfig, batch: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.layers, 2, batch, config.kv_groups, capacity, config.head_dim)
        self.batch, self.capacity, self.length = batch, capacity, 0
        self.memory = torch.zeros(shape, device=device, dtype=dtype)
        # `.data`: to autograd the layers' parts are tensors of their own, so that writing one does not spoil another.
        self.layers = [LayerCache(kv[0].data, kv[1].data) for kv in self.memory]
        self.document_BS: Tensor | None = None
        self.start_B: Tensor | None = None  # the first token of each sequence's last document, if that is in one piece
        self.decoder: Decoder | None = None

    def decoder_for(self, model: LanguageModel, context: Attend) -> Decoder | None:
        """The fast way to append one token to this cache, if there is one (see `rmt.decoding`)."""
        from rmt.decoding import Decoder, applies

        known = context.document_BT is None or context.start_B is not None
        if not (known and applies(model, self)):
            return None
        if self.decoder is None and Decoder.takes(model):
            self.decoder = Decoder(model, self)
        return None if self.decoder is None or any(self.decoder.hooks) else self.decoder

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self.length = length
        for layer in self.layers:
            layer.length = length

    def append_documents(self, document_BT: Tensor | None, new: int) -> Tensor | None:
        """Remember the document of each cached token. Tokens without one belong to the document of the token before
        them, and the first of all to document 0."""
        if document_BT is None and self.document_BS is None:
            return None
        if self.document_BS is None:
            self.document_BS = torch.zeros(self.batch, self.capacity, dtype=torch.int64, device=self.memory.device)
        end = self.length + new
        if document_BT is not None:
            self.document_BS[:, self.length : end] = document_BT
            self.start_B = attention_op.first_visible(self.document_BS[:, :end])
        else:
            self.document_BS[:, self.length : end] = self.document_BS[:, self.length - 1, None]
        return self.document_BS[:, :end]


def build(
    config: ModelConfig, *, seed: int = 0, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> LanguageModel:
    """Build the model of a configuration and give it its initial values.

    Args:
        config: from `rmt.preset(name)` or `ModelConfig(...)`.
        seed: of the initial values. Models with equal dimensions share the values of what they share.
        device: where the parameters live; "meta" builds the structure only.
        dtype: of the parameters (default float32).
    """
    with torch.device("meta"):
        model = LanguageModel(config)
    if str(device) == "meta":
        return model
    model = model.to_empty(device=device or "cpu").to(dtype or torch.float32)
    mup.initialise(model, config, seed)
    return model
