"""`RMTConfig`: a `ModelConfig` as transformers keeps it, flat in config.json, under one model type for all streams."""

import dataclasses
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from rmt.config import ModelConfig

FIELDS = tuple(item.name for item in dataclasses.fields(ModelConfig))


class RMTConfig(PreTrainedConfig):
    """The fields of `rmt.ModelConfig`, and what transformers wants to know besides.

    Args:
        use_cache: keep keys and values while generating.
        bos_token_id: the token before the first one of a text.
        eos_token_id: the token that ends a text.
        pad_token_id: what fills up the shorter sequences of a batch.
        values: the fields of `ModelConfig`, checked as it checks them, and those of `PreTrainedConfig`.
    """

    model_type = "rmt"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 -- transformers' own convention
    attribute_map = {  # noqa: RUF012
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "max_position_embeddings": "context",
        "intermediate_size": "ff_dim",
    }

    def __init__(
        self,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **values: Any,
    ) -> None:
        names = {self.attribute_map.get(name, name): name for name in values}
        model = ModelConfig.from_dict({field: values.pop(names[field]) for field in FIELDS if field in names})
        for name, value in model.to_dict().items():
            setattr(self, name, value)
        values["tie_word_embeddings"] = False
        super().__init__(**values)
        self.use_cache = use_cache
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id

    @classmethod
    def from_model_config(cls, config: ModelConfig, **values: Any) -> "RMTConfig":
        return cls(**config.to_dict(), **values)

    def model_config(self) -> ModelConfig:
        """What `rmt.build` takes."""
        return ModelConfig.from_dict({name: getattr(self, name) for name in FIELDS})

    @property
    def hidden_size(self) -> int:
        return self.model_config().model_dim

    @property
    def num_key_value_heads(self) -> int:
        return self.model_config().kv_groups
