"""Residual streams: one file each. The registry below is all that the rest of the code knows of them by name.

A stream's file is imported when a model with that stream is built, so reading this registry needs no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmt.streams.base import Stream

STREAMS = {
    "matrix": "rmt.streams.matrix:MatrixStream",
    "vector": "rmt.streams.vector:VectorStream",
}


def find_stream(name: str) -> "type[Stream]":
    """The class of a registered stream."""
    module, _, attribute = STREAMS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
