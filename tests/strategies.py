"""Small models for property tests: every option that a configuration has, at dimensions that run in milliseconds."""

import torch
from hypothesis import strategies as st

from rmt.config import ModelConfig
from rmt.model import LanguageModel, build
from rmt.streams import STREAMS


@st.composite
def configs(draw, streams=tuple(STREAMS), norm_gains=("none", "value", "full")):
    heads = draw(st.sampled_from([1, 2, 3, 4]))
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    stream = draw(st.sampled_from(streams))
    return ModelConfig(
        stream=stream,
        layers=2 * draw(st.integers(1, 2)),
        heads=heads,
        head_dim=2 * draw(st.integers(1, 4)),
        kv_heads=draw(st.sampled_from([None, *divisors])),
        key_dim=draw(st.integers(1, 9)),
        ff_dim=draw(st.integers(1, 16)),
        vocab_size=draw(st.integers(5, 40)),
        context=16,
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        norm_gain=draw(st.sampled_from(norm_gains)),
        position=draw(st.sampled_from(["learned", "alibi", "rope"])),
        ff="gelu" if stream == "depthwise_lstm" else draw(st.sampled_from(["gelu", "swiglu"])),  # it has its own core
        qk_norm=draw(st.booleans()),
        inverse_layer_scaling=draw(st.booleans()),
    )


def double_model(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """A float64 model whose gains are not all one, so that a forgotten gain shows."""
    model = build(config, seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gain" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def tokens(config: ModelConfig, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
