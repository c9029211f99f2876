"""Where models come from and go to: the authors' parameter trees, transformers, and folders that both sides read.

    reference.py      the authors' parameter trees as our models
    configuration.py  RMTConfig, and modeling.py: RMTModel and RMTForCausalLM, the adapter to transformers
    registration.py   tells transformers' Auto classes about them when both packages are there
    folder.py         reads a model from a run or from a transformers folder, with its tokenizer
    export.py         writes a transformers folder; card.py its model card; with_code.py its modelling code
    importing.py      makes a run of a transformers folder or of the authors' file

Nothing is imported before it is used: `import rmt` must stay quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmt.hub.configuration import RMTConfig
    from rmt.hub.folder import load_model
    from rmt.hub.modeling import RMTForCausalLM, RMTModel
    from rmt.hub.reference import from_reference

_HOME = {
    "RMTConfig": "rmt.hub.configuration",
    "RMTForCausalLM": "rmt.hub.modeling",
    "RMTModel": "rmt.hub.modeling",
    "from_reference": "rmt.hub.reference",
    "load_model": "rmt.hub.folder",
}

__all__ = ["RMTConfig", "RMTForCausalLM", "RMTModel", "from_reference", "load_model"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'rmt.hub' has no attribute {name!r}")
