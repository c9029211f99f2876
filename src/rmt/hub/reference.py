"""Models from the parameter trees of the paper's authors.

Their implementation names and orders things differently: a parameter tree stacked over layers, axes in another order,
value index before rank in the feed-forward input, RMSNorm and ALiBi instead of the paper's LayerNorm and learned
positions. `from_reference` turns such a tree (arrays by name, and the metadata that describes the configuration) into
our model. The rules for one parameter are one line each in `MATRIX` and `VECTOR`.

Axes: L layer, K key_dim, V head_dim, R and H heads, F ff_dim, W vocabulary, D width, 3 query/key/value.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rmt.config import ModelConfig, MuP
from rmt.errors import InputError, suggest
from rmt.model import LanguageModel, build

Array = np.ndarray
Rule = tuple[str, Callable[[Array], Array]]


def transpose(*axes: int, flatten: tuple[int, ...] | None = None) -> Callable[[Array], Array]:
    """Reorder axes, then merge runs of them: flatten=(1, 2) makes [a, b, c] into [a, b * c]."""

    def apply(array: Array) -> Array:
        array = array.transpose(axes)
        if flatten is None:
            return array
        shape, start = [], 0
        for run in flatten:
            shape.append(int(np.prod(array.shape[start : start + run])))
            start += run
        return array.reshape(shape)

    return apply


MATRIX: dict[str, Rule] = {
    "embedding": ("embedding.token_WD", transpose(0, 2, 1, flatten=(1, 2))),
    "storage_linear": ("stream.0.store.keys_KR", transpose(1, 0)),
    "rmt_stack.attention.norm": ("stream.{attention}.norm.gain", transpose(1, 0)),
    "rmt_stack.attention.qkv_linear": ("stream.{attention}.retrieve.keys_RK", transpose(1, 2, 0, flatten=(2, 1))),
    "rmt_stack.attention.out_linear": ("stream.{feed_forward}.store.keys_KR", transpose(1, 0)),
    "rmt_stack.mlp.norm": ("stream.{feed_forward}.norm.gain", transpose(1, 0)),
    "rmt_stack.mlp.retrieval_linear": ("stream.{feed_forward}.retrieve.keys_RK", transpose(1, 0)),
    "rmt_stack.mlp.W1": ("feed_forward.{layer}.into_FD", transpose(2, 1, 0, flatten=(1, 2))),
    "rmt_stack.mlp.W2": ("feed_forward.{layer}.out_DF", transpose(2, 1, 0, flatten=(2, 1))),
    "rmt_stack.mlp.storage_linear": ("stream.{next_attention}.store.keys_KR", transpose(1, 0)),
    "norm": ("stream.{last}.norm.gain", transpose(1, 0)),
    "retrieval_linear": ("stream.{last}.retrieve.keys_RK", transpose(1, 0)),
    "unembedding": ("unembedding.weight_WD", transpose(2, 1, 0, flatten=(1, 2))),
}

VECTOR: dict[str, Rule] = {
    "embedding": ("embedding.token_WD", transpose(0, 1)),
    "transformer_stack.attention.norm": ("stream.{attention}.norm.gain", transpose(0)),
    "transformer_stack.attention.qkv_linear": ("stream.{attention}.qkv", transpose(1, 2, 3, 0, flatten=(3, 1))),
    "transformer_stack.attention.out_linear": ("stream.{feed_forward}.output", transpose(2, 0, 1, flatten=(1, 2))),
    "transformer_stack.mlp.norm": ("stream.{feed_forward}.norm.gain", transpose(0)),
    "transformer_stack.mlp.W1": ("feed_forward.{layer}.into_FD", transpose(1, 0)),
    "transformer_stack.mlp.W2": ("feed_forward.{layer}.out_DF", transpose(1, 0)),
    "norm": ("stream.{last}.norm.gain", transpose(0)),
    "unembedding": ("unembedding.weight_WD", transpose(1, 0)),
}


def from_reference(params: Mapping[str, Array], meta: Mapping[str, Any]) -> LanguageModel:
    """The authors' model as ours.

    Args:
        params: arrays by the authors' names (a leading `param/` is ignored).
        meta: their metadata, with `kind` ("rmt" or "transformer") and `config`.
    """
    config = reference_config(meta, context=int(meta["config"].get("max_seq_len", 512)))
    model = build(config)
    state = reference_state(params, config)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    return model


def reference_config(meta: Mapping[str, Any], context: int = 512) -> ModelConfig:
    theirs = meta["config"]
    if meta["kind"] == "rmt":
        names = {"heads": "rank", "head_dim": "resval_dim", "key_dim": "reskey_dim", "ff_dim": "n_neurons"}
    elif meta["kind"] == "transformer":
        names = {"heads": "n_heads", "head_dim": "head_dim", "width": "embed_dim", "ff_dim": "n_neurons"}
    else:
        raise InputError(f"unknown kind of reference model {meta['kind']!r}. {suggest(meta['kind'], _RULES)}")
    mup = MuP(
        sigma=theirs.get("init_std", 1.0),
        alpha_in=theirs.get("input_multiplier", 1.0),
        alpha_attn=theirs.get("attn_multiplier", 1.0),
        alpha_out=theirs.get("output_multiplier", 1.0),
        zero_unembedding=theirs.get("output_zero_init", True),
        **{f"base_{ours}": theirs.get(f"base_{name}") for ours, name in names.items()},
    )
    return ModelConfig(
        stream="matrix" if meta["kind"] == "rmt" else "vector",
        layers=theirs["n_layers"],
        vocab_size=theirs["vocab_size"],
        context=context,
        norm="rmsnorm",
        norm_eps=theirs.get("rmsnorm_eps", 1e-6),
        position="alibi",
        init="mup",
        mup=mup,
        **{ours: theirs[name] for ours, name in names.items()},
    )


def reference_state(params: Mapping[str, Array], config: ModelConfig) -> dict[str, Array]:
    """Arrays by the authors' names -> arrays by ours. Serves parameters and their gradients alike."""
    rules = _RULES["rmt" if config.stream == "matrix" else "transformer"]
    state = {}
    for key, array in params.items():
        name = key.removeprefix("param/")
        if name not in rules:
            raise InputError(f"unknown reference parameter {name!r}. {suggest(name, rules)}")
        ours, reorder = rules[name]
        if "_stack." not in name:
            state[ours.format(last=2 * config.layers)] = np.ascontiguousarray(reorder(array))
            continue
        for layer in range(config.layers):
            places = {
                "layer": layer,
                "attention": 2 * layer,
                "feed_forward": 2 * layer + 1,
                "next_attention": 2 * layer + 2,
            }
            state[ours.format(**places)] = np.ascontiguousarray(reorder(array[layer]))
    return state


_RULES = {"rmt": MATRIX, "transformer": VECTOR}
