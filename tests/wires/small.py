"""Small matrix models for the wiring tests: keys and gains moved off their initial values, as training does."""

import torch

import rmt

CONFIGS = {
    "full": {},
    "value": {"norm_gain": "value"},
    "none": {"norm_gain": "none"},
    "rmsnorm": {"norm": "rmsnorm"},
    "alibi": {"position": "alibi", "norm": "rmsnorm", "norm_gain": "none"},
    "modern": {"position": "rope", "norm": "rmsnorm", "ff": "swiglu", "kv_heads": 2, "qk_norm": True},
    "value_residual": {"value_residual": True, "kv_heads": 1},
}


def small_model(name: str = "full", **changes) -> rmt.LanguageModel:
    config = rmt.ModelConfig(
        layers=3, heads=4, head_dim=8, key_dim=6, ff_dim=32, vocab_size=50, context=16, **(CONFIGS[name] | changes)
    )
    model = rmt.build(config, seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.std().item() or 1.0  # gains start equal
            parameter += 0.3 * spread * torch.randn(parameter.shape, generator=generator) + 0.02
        model.unembedding.weight_WD.normal_(generator=generator)
    return model
