"""What a model costs, in closed form: parameters, FLOPs, memory. Nothing is built and nothing is run.

Parameters and matrix-multiplication FLOPs are exact: tests hold them against the built model and against torch's FLOP
counter. The softmax is counted as the paper counts it, 3 FLOPs for each attention weight, and kept as a part of its
own because no counter sees it; norms, activations and additions are not counted, as usual. Attention is counted over
the full context, as the paper does, although half of it is masked.

Memory is that of float32 with the default operations, in which a matrix stream is one buffer that all layers change in
place. Weights, gradients, optimizer state and the key/value cache are exact; activations are what autograd keeps for
the backward pass, without temporaries and the allocator's overhead, so take the total as an estimate. Not all parts
are there at once: a step drops its activations as it gains its gradients, and `Memory.peak` is the most at one moment
(`rmt bench --what memory` measures it).

A stream says what its boundaries cost in `Stream.cost` (and `Stream.feed_forward_cost` if it brings its own
feed-forward core, and `Stream.saved` for the activations); everything else is shared and counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from rmt.config import ModelConfig, Recompute
from rmt.errors import InputError, suggest
from rmt.ops.cross_entropy import CHUNK_BYTES
from rmt.streams import find_stream
from rmt.streams.base import Cost, sites
from rmt.theory import paper_formulas
from rmt.theory.paper_formulas import Printed

FLOAT = 4  # bytes of a float32
TOKEN_ID = 8  # bytes of a token or position id


class Total(int):
    """A sum that remembers its parts: use it as the number it is, or look into `.parts`."""

    parts: dict[str, int]

    def __new__(cls, **parts: int) -> Total:
        self = super().__new__(cls, sum(parts.values()))
        self.parts = parts
        return self

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), self.parts

    @property
    def total(self) -> int:
        return int(self)

    def without(self, *names: str) -> int:
        return int(self) - sum(self.parts[name] for name in names)

    def to_dict(self) -> dict[str, int]:
        return {"total": int(self), **self.parts}


@dataclass(frozen=True)
class Flops:
    """Forward FLOPs per token by part, and what follows from them. A backward pass counts as two forward passes."""

    per_token: Total
    context: int

    @property
    def per_example(self) -> int:
        """Forward, one full context."""
        return self.per_token * self.context

    @property
    def non_embedding_per_token(self) -> int:
        """Forward, without the logits: what the paper's totals count. (Looking up an embedding costs none.)"""
        return self.per_token.without("logits")

    @property
    def training_per_token(self) -> int:
        """Forward and backward."""
        return 3 * self.per_token

    def training(self, tokens: int | float, *, logits: bool = True) -> int:
        """Forward and backward over `tokens` tokens, with or without the logits."""
        forward = int(self.per_token) if logits else self.non_embedding_per_token
        return round(3 * forward * tokens)

    def to_dict(self) -> dict[str, Any]:
        return {
            "forward_per_token": self.per_token.to_dict(),
            "forward_per_example": self.per_example,
            "non_embedding_forward_per_token": self.non_embedding_per_token,
            "non_embedding_forward_per_example": self.non_embedding_per_token * self.context,
            "training_per_token": self.training_per_token,
            "non_embedding_training_per_token": self.training(1, logits=False),
        }


@dataclass(frozen=True)
class Memory:
    """Bytes, in float32.

    Args:
        training: weights, gradients, AdamW's two moments, activations and loss, for one forward and backward pass over
            `batch` full contexts. The part `activations` is missing where the stream does not say what it keeps.
        peak: the most of it that is held at one moment of such a step, if gradients are not accumulated over several.
        inference: weights, key/value cache and stream state for decoding `batch` sequences of a full context.
        kv_cache_per_token: the cache of one token.
        batch: sequences.
        recompute: what the backward pass computes again (`TrainConfig.recompute`).
    """

    training: Total
    peak: int
    inference: Total
    kv_cache_per_token: int
    batch: int
    recompute: Recompute

    def to_dict(self) -> dict[str, Any]:
        return {
            "training": self.training.to_dict(),
            "peak": self.peak,
            "inference": self.inference.to_dict(),
            "kv_cache_per_token": self.kv_cache_per_token,
            "batch": self.batch,
            "recompute": self.recompute,
            "activations_known": "activations" in self.training.parts,
        }


@dataclass(frozen=True)
class Count:
    """What a model costs. `params` is the number of parameters and `params.parts` where they are.

    `paper` is what the paper's printed formulas give, or None where they do not describe the model.
    """

    config: ModelConfig
    params: Total
    flops: Flops
    memory: Memory
    paper: Printed | None

    @property
    def non_embedding_params(self) -> int:
        """Without the token, position and unembedding tables: what the paper's token budgets are multiples of."""
        return self.params.without("token_embedding", "position_embedding", "unembedding")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "params": int(self.params),
            "params_by_part": dict(self.params.parts),
            "non_embedding_params": self.non_embedding_params,
            "stream_size": self.config.stream_size,
            "flops": self.flops.to_dict(),
            "memory": self.memory.to_dict(),
            "paper": self.paper_to_dict(),
            "config": self.config.to_dict(),
        }

    def paper_to_dict(self) -> dict[str, Any] | None:
        if self.paper is None:
            return None
        return {
            "params": self.paper.params,
            "params_formula": self.paper.params_formula,
            "params_difference": self.paper.params - int(self.params),
            "flops_per_example": self.paper.flops_per_example,
            "flops_formula": self.paper.flops_formula,
            "flops_difference": self.paper.flops_per_example - self.flops.per_example,
        }


def count(config: ModelConfig, *, batch: int = 1, recompute: Recompute = "none") -> Count:
    """Count the parameters, FLOPs and bytes of a model.

    Args:
        config: the model.
        batch: sequences of a full context in one pass, for the memory.
        recompute: what the backward pass computes again (`TrainConfig.recompute`), for the memory.
    """
    if batch < 1:
        raise InputError(f"batch = {batch}: count the memory of at least one sequence.")
    if recompute not in get_args(Recompute):
        raise InputError(f"recompute = {recompute!r}: {suggest(recompute, get_args(Recompute))}")
    stream = find_stream(config.stream)
    costs = [stream.cost(config, site) for site in sites(config.layers)]
    own_feed_forward = stream.feed_forward_cost(config)
    saved = [stream.saved(config, site) for site in sites(config.layers)]
    params = count_params(config, costs, own_feed_forward)
    return Count(
        config=config,
        params=params,
        flops=Flops(count_flops(config, costs, own_feed_forward), config.context),
        memory=count_memory(config, int(params), [n for n in saved if n is not None], batch, recompute),
        paper=paper_formulas.printed(config),
    )


def count_params(config: ModelConfig, costs: list[Cost], own_feed_forward: tuple[int, int] | None) -> Total:
    table = config.vocab_size * config.model_dim
    feed_forward = own_feed_forward[0] if own_feed_forward else feed_forward_weights(config)
    return Total(
        token_embedding=table,
        position_embedding=config.context * config.model_dim if config.position == "learned" else 0,
        stream_writes=sum(cost.write_params for cost in costs),
        stream_reads=sum(cost.read_params for cost in costs),
        norms=sum(cost.norm_params for cost in costs),
        attention=attention_weights(config),
        feed_forward=config.layers * feed_forward,
        unembedding=table,
    )


def attention_weights(config: ModelConfig) -> int:
    """The attention core's few: gains of queries and keys, and the two weights of the value residual after layer 0."""
    gains = config.layers * 2 * config.head_dim if config.qk_norm else 0
    return gains + (2 * (config.layers - 1) if config.value_residual else 0)


def count_flops(config: ModelConfig, costs: list[Cost], own_feed_forward: tuple[int, int] | None) -> Total:
    """Forward, per token."""
    weights_per_layer = config.heads * config.context  # attention weights of one token
    feed_forward = own_feed_forward[1] if own_feed_forward else 2 * feed_forward_weights(config)
    return Total(
        embedding=0,
        stream_writes=sum(cost.write_flops for cost in costs),
        stream_reads=sum(cost.read_flops for cost in costs),
        attention=config.layers * 4 * weights_per_layer * config.head_dim,
        softmax=config.layers * 3 * weights_per_layer,
        feed_forward=config.layers * feed_forward,
        logits=2 * config.vocab_size * config.model_dim,
    )


def feed_forward_weights(config: ModelConfig) -> int:
    """Weights of the shared feed-forward core of one layer: into the neurons (twice for swiglu) and out of them."""
    return (3 if config.ff == "swiglu" else 2) * config.model_dim * config.ff_dim


def count_memory(config: ModelConfig, params: int, saved: list[int], batch: int, recompute: Recompute) -> Memory:
    tokens = batch * config.context
    training = {"weights": FLOAT * params, "gradients": FLOAT * params, "optimizer": 2 * FLOAT * params}
    if saved:
        training["activations"] = activation_bytes(config, saved, batch, recompute)
    training["loss"] = loss_bytes(config, tokens)
    kv_per_token = FLOAT * config.layers * 2 * config.kv_groups * config.head_dim
    inference = Total(
        weights=FLOAT * params, kv_cache=kv_per_token * tokens, stream_state=FLOAT * batch * config.stream_size
    )
    return Memory(Total(**training), peak_bytes(config, training, tokens), inference, kv_per_token, batch, recompute)


def peak_bytes(config: ModelConfig, training: dict[str, int], tokens: int) -> int:
    """The backward pass drops activations and makes gradients layer by layer, so the most is held at one of its ends.

    At its beginning, all activations, the gradient of the unembedding and a chunk of logits; at its end, all gradients,
    the activations of the first layer and, of a matrix stream, the memory and its gradient.
    """
    activations = training.get("activations", 0)
    first_layer = FLOAT * tokens * (attention_saved(config) + feed_forward_saved(config, "none"))
    buffers = 2 * FLOAT * tokens * config.stream_size if config.stream == "matrix" else 0
    beginning = activations + training["loss"]
    end = training["gradients"] + min(activations, first_layer + buffers)
    return training["weights"] + training["optimizer"] + max(beginning, end)


def activation_bytes(config: ModelConfig, saved: list[int], batch: int, recompute: Recompute) -> int:
    """What autograd keeps from the forward pass of `batch` full contexts until the backward pass has used it.

    `saved` is what each boundary keeps, in numbers per token. With recompute "full", a layer keeps its queries, keys
    and values and the stream (or what was written to it, if that is less: a memory changed in place is rebuilt from
    that), and the most is held when the first layer of the backward pass has been computed again.
    """
    layer = attention_saved(config) + feed_forward_saved(config, recompute)
    mixed_values = config.kv_groups * config.head_dim if config.value_residual and config.layers > 1 else 0
    if recompute != "full":
        numbers = sum(saved) + config.layers * layer + (config.layers - 1) * mixed_values
    else:
        given = qkv_numbers(config) + min(config.stream_size, 2 * config.model_dim)
        numbers = saved[0] + (config.layers - 1) * given + layer + mixed_values + saved[1] + saved[-1]
    numbers += config.model_dim  # the loss's gradient with respect to the last hidden vectors
    per_token = FLOAT * numbers + TOKEN_ID
    return batch * config.context * per_token + shared_by_layers(config)


def attention_saved(config: ModelConfig) -> int:
    """Numbers per token: queries, keys and values, log-partition per head, output; and what prepares q and k."""
    q_and_k = (config.heads + config.kv_groups) * config.head_dim
    numbers = qkv_numbers(config) + config.heads + config.heads * config.head_dim
    if config.qk_norm:  # the deviation and the normalised values, for the gain
        numbers += config.heads + config.kv_groups + q_and_k
    if config.qk_norm or config.position == "rope":  # queries and keys after it
        numbers += q_and_k
    return numbers


def qkv_numbers(config: ModelConfig) -> int:
    return (config.heads + 2 * config.kv_groups) * config.head_dim


def feed_forward_saved(config: ModelConfig, recompute: Recompute) -> int:
    """Numbers per token: the input, and the neurons before and after each operation; less what is computed again."""
    gated = config.ff == "swiglu"
    neurons = {"none": 4 if gated else 2, "gelu": 2 if gated else 1, "ff": 0, "full": 4 if gated else 2}[recompute]
    return config.model_dim + neurons * config.ff_dim


def shared_by_layers(config: ModelConfig) -> int:
    """Bytes of what is made once per pass: position ids, rotations or attention biases."""
    if config.position == "learned":
        return TOKEN_ID * config.context
    if config.position == "rope":
        return FLOAT * 2 * config.context * config.head_dim
    return FLOAT * config.heads * config.context**2


def loss_bytes(config: ModelConfig, tokens: int) -> int:
    """The gradient of the unembedding, made with the loss, and one chunk of logits."""
    row = FLOAT * config.vocab_size
    rows = min(tokens, max(1, CHUNK_BYTES // row))
    return row * config.model_dim + rows * row
