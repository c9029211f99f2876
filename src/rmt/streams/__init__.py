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
    "aggregation": "rmt.streams.aggregation:AggregationStream",
    "depthwise_lstm": "rmt.streams.depthwise_lstm:DepthwiseLSTMStream",
    "highway": "rmt.streams.highway:HighwayStream",
    "hyper": "rmt.streams.hyper:HyperStream",
    "hyper_dynamic": "rmt.streams.hyper:HyperDynamicStream",
    "mhc": "rmt.streams.hyper:ManifoldHyperStream",
    "attention_residual": "rmt.streams.attention_residual:AttentionResidualStream",
    "attention_residual_block": "rmt.streams.attention_residual:AttentionResidualBlockStream",
}


def find_stream(name: str) -> "type[Stream]":
    """The class of a registered stream."""
    module, _, attribute = STREAMS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
