"""Residual Matrix Transformer: language models whose residual stream is an outer-product memory.

    import rmt
    config = rmt.preset("rmt-134m")
    model = rmt.build(config)
    output = model(input_ids, targets=targets)

The names below are loaded when they are first used, so that `import rmt` and `rmt --help` are quick. transformers'
Auto classes know our models as soon as both packages are imported, in either order.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rmt.hub.registration import register as _register

if TYPE_CHECKING:
    from rmt.config import ModelConfig, MuP, TrainConfig, preset, presets, recipe
    from rmt.errors import InputError
    from rmt.hub.configuration import RMTConfig
    from rmt.hub.folder import load_model
    from rmt.hub.modeling import RMTForCausalLM, RMTModel
    from rmt.model import Cache, LanguageModel, Output, build
    from rmt.streams.matrix import MatrixNorm, Retrieve, Store
    from rmt.theory.accounting import count
    from rmt.theory.moments import moments
    from rmt.wires.table import wiring

_HOME = {
    "ModelConfig": "rmt.config",
    "TrainConfig": "rmt.config",
    "MuP": "rmt.config",
    "preset": "rmt.config",
    "presets": "rmt.config",
    "recipe": "rmt.config",
    "InputError": "rmt.errors",
    "RMTConfig": "rmt.hub.configuration",
    "RMTModel": "rmt.hub.modeling",
    "RMTForCausalLM": "rmt.hub.modeling",
    "load_model": "rmt.hub.folder",
    "LanguageModel": "rmt.model",
    "Cache": "rmt.model",
    "Output": "rmt.model",
    "build": "rmt.model",
    "Store": "rmt.streams.matrix",
    "Retrieve": "rmt.streams.matrix",
    "MatrixNorm": "rmt.streams.matrix",
    "count": "rmt.theory.accounting",
    "moments": "rmt.theory.moments",
    "wiring": "rmt.wires.table",
}

_ROOMS = ("data", "evaluate", "experiments", "hub", "report", "train")

__all__ = [
    "Cache",
    "InputError",
    "LanguageModel",
    "MatrixNorm",
    "ModelConfig",
    "MuP",
    "Output",
    "RMTConfig",
    "RMTForCausalLM",
    "RMTModel",
    "Retrieve",
    "Store",
    "TrainConfig",
    "build",
    "count",
    "load_model",
    "moments",
    "preset",
    "presets",
    "recipe",
    "wiring",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _ROOMS:
        return importlib.import_module(f"rmt.{name}")
    raise AttributeError(f"module 'rmt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])


_register()
