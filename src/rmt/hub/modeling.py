"""`RMTModel` and `RMTForCausalLM`: a `LanguageModel` as transformers expects a model to be.

The network, its numbers and its parameter names are those of `rmt.model`; this file translates. An attention mask
becomes documents (padding is a document of its own, so nothing attends to it) and positions counted without the
padding; transformers' cache becomes a `Cache`; `labels` become targets, shifted; `gradient_checkpointing` becomes
`recompute = "full"`.

Axes: B batch, T new tokens, S cached and new tokens, G key/value heads, V head_dim, D model_dim, W vocabulary.
"""

import sys
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple

from rmt.config import Ops
from rmt.errors import InputError
from rmt.hub.configuration import RMTConfig
from rmt.model import Cache, LanguageModel, LayerCache, Output, build
from rmt.ops.attention import Attend, first_visible

OPS: Ops = "auto"
IGNORED = -100  # a label that is not scored, here and in transformers


class LayerView(LayerCache):
    """One layer of transformers' cache as a `LayerCache`."""

    def __init__(self, cache: TransformersCache, layer: int) -> None:
        self.cache, self.layer = cache, layer
        self.length = int(cache.get_seq_length())

    def append(self, k_BGTV: Tensor, v_BGTV: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + k_BGTV.shape[2]
        places = {"cache_position": torch.arange(self.length, end, device=k_BGTV.device)}  # the first 5.x ask for it
        k_BGSV, v_BGSV = self.cache.update(k_BGTV, v_BGTV, self.layer, places)
        return k_BGSV[:, :, :end], v_BGSV[:, :, :end]  # a static cache returns the places not yet filled, too


class CacheView(Cache):
    """transformers' cache as a `Cache`. The documents of all tokens come with every call, from the attention mask."""

    def __init__(self, cache: TransformersCache, layers: int, document_BS: Tensor | None) -> None:
        self.length = int(cache.get_seq_length())
        self.capacity = sys.maxsize
        self.layers = [LayerView(cache, layer) for layer in range(layers)]
        self.document_BS = document_BS
        self.start_B = None if document_BS is None else first_visible(document_BS)

    def append_documents(self, document_BT: Tensor | None, new: int) -> Tensor | None:
        return self.document_BS

    def decoder_for(self, model: LanguageModel, context: Attend) -> None:
        """There is none for memory that transformers manages."""


class RMTPreTrainedModel(PreTrainedModel):
    """What both classes share: where the network is, and its initial values."""

    config_class = RMTConfig
    config: RMTConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012 -- transformers' own convention

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Values for the parameters that were not loaded: those that `rmt.build` gives them.

        (transformers' own goes from module to module; our values depend on the parameter's full name.)
        """
        network = cast("RMTModel", self.base_model).network
        missing = {
            name: parameter
            for name, parameter in network.named_parameters()
            if not parameter.is_meta and not getattr(parameter, "_is_hf_initialized", False)
        }
        if missing:
            fresh = build(network.config)
            for name, parameter in missing.items():
                parameter.copy_(fresh.get_parameter(name))
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> Any:
        if new_num_tokens not in (None, self.config.vocab_size):
            raise InputError(
                f"the vocabulary of {self.config.vocab_size} tokens is fixed: build a model with vocab_size = "
                f"{new_num_tokens} instead."
            )
        return self.get_input_embeddings()

    def enable_input_require_grads(self) -> None:
        """Nothing to do: what is computed anew in the backward pass does not hang on the input's gradient."""

    def disable_input_require_grads(self) -> None:
        """Nothing to do, as above."""

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The attention mask as it is: the model makes its own, also for a static cache."""
        return attention_mask


class RMTModel(RMTPreTrainedModel):
    """The network up to its last read of the stream. `network` is the `rmt.LanguageModel`."""

    def __init__(self, config: RMTConfig) -> None:
        super().__init__(config)
        self.network = LanguageModel(config.model_config())
        self.network.set_ops(OPS)
        self.post_init()

    @property
    def gradient_checkpointing(self) -> bool:
        return self.network.recompute == "full"

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, wanted: bool) -> None:
        self.network.recompute = "full" if wanted else "none"

    def get_input_embeddings(self) -> nn.Module:
        return self.network.embedding

    def run(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past: TransformersCache | None,
        use_cache: bool | None,
        targets: Tensor | None = None,
    ) -> tuple[Output, TransformersCache | None]:
        """The network's output, and the cache with the new tokens in it."""
        if input_ids is None:
            raise InputError("input_ids are needed: the model does not take inputs_embeds.")
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if past is None and use_cache and not self.training:
            past = DynamicCache()
        seen = int(past.get_seq_length()) if past is not None else 0
        document_BS = documents(attention_mask, seen + input_ids.shape[1])
        if position_ids is None and document_BS is not None:
            position_ids = (document_BS.cumsum(-1) - 1).clamp(min=0)[:, seen:]
        if past is None:
            output = self.network(input_ids, targets, document_BS, position_ids=position_ids)
        else:
            cache = CacheView(past, self.config.layers, document_BS)
            output = self.network(input_ids, targets, cache=cache, position_ids=position_ids)
        return output, past

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TransformersCache | None = None,
        use_cache: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        output, past = self.run(input_ids, attention_mask, position_ids, past_key_values, use_cache)
        hidden: Any = output.hidden_BTD
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past)


class ContextEnd(StoppingCriteria):
    """Ends a generation where the context ends. (transformers' own criterion of length would replace the caller's.)"""

    def __init__(self, context: int) -> None:
        self.context = context

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        full = input_ids.shape[1] >= self.context
        return torch.full((input_ids.shape[0],), full, dtype=torch.bool, device=input_ids.device)


class RMTForCausalLM(RMTPreTrainedModel, GenerationMixin):
    """The language model, with `generate`."""

    def __init__(self, config: RMTConfig) -> None:
        super().__init__(config)
        self.model = RMTModel(config)
        self.post_init()

    @classmethod
    def from_language_model(cls, network: LanguageModel, **tokens: int | None) -> "RMTForCausalLM":
        """An adapter around a network that exists already; both hold the same parameters.

        Args:
            network: made by `rmt.build` or read from a run.
            tokens: `eos_token_id` and the like, for `RMTConfig`.
        """
        with torch.device("meta"):
            model = cls(RMTConfig.from_model_config(network.config, **tokens))
        model.model.network = network
        model.config.dtype = network.unembedding.weight_WD.dtype
        return model.train(network.training)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.network.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.model.network.unembedding

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TransformersCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits and, with `labels`, the loss.

        Args:
            input_ids: token ids [B, T].
            attention_mask: 0 for padding [B, S], on either side.
            position_ids: by default counted without the padding.
            past_key_values: transformers' cache of the earlier tokens.
            labels: as the input ids, -100 where not scored; the shift by one happens here. In training the loss has
                the z-loss of the configuration in it, in evaluation it is the cross-entropy alone.
            use_cache: keep keys and values (never while training).
            logits_to_keep: logits of the last so many tokens, or of these places; 0: of all.
            num_items_in_batch: labels that the whole batch has, if it comes in parts; the loss is divided by it.
        """
        targets = None
        if labels is not None:
            targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        output, past = self.model.run(input_ids, attention_mask, position_ids, past_key_values, use_cache, targets)
        loss = output.loss if self.training else output.ce
        if loss is not None and targets is not None and num_items_in_batch is not None:
            loss = loss * (targets != IGNORED).sum() / num_items_in_batch
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.network.unembedding(output.hidden_BTD[:, kept])
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, which here also ends where the context ends."""
        criteria = [*(kwargs.pop("stopping_criteria", None) or []), ContextEnd(self.config.context)]
        generate: Any = super().generate  # type: ignore[misc]
        return generate(*args, stopping_criteria=StoppingCriteriaList(criteria), **kwargs)


def documents(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """1 for text and 0 for padding [B, S]; None if there is no padding."""
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[1] != length:
        raise InputError(
            f"attention_mask has shape {list(attention_mask.shape)}, expected [batch, {length}]: one number for each "
            "cached and each new token."
        )
    return None if bool((attention_mask != 0).all()) else (attention_mask != 0).long()
