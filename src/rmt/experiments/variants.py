"""The paper's section 4.3: the RMT against the transformer and three older ways to change the residual stream.

One declaration at two scales. At the paper's, GPT2-small dimensions are trained for 50,000 steps of 64 x 512 tokens at
a peak learning rate of 1e-2 for all; at the tiny one the same comparison takes minutes on a CPU.
"""

from typing import Literal

from rmt.config import ModelConfig, TrainConfig, preset, recipe

Scale = Literal["tiny", "paper"]
STREAMS_OF_THE_PAPER = ["matrix", "vector", "highway", "aggregation", "depthwise_lstm"]


def settings(scale: Scale) -> tuple[ModelConfig, TrainConfig]:
    """Dimensions and recipe of the paper's comparison of variants, and of its sweep over stream sizes, at a scale.

    Micro-batches of 16 sequences fit a GPU of 24 GB; the result is that of the whole batch.
    """
    if scale == "paper":
        return preset("rmt-134m"), recipe("rmt-134m").replace(tokens=None, steps=50_000, lr=1e-2, micro_batch=16)
    return preset("rmt-tiny"), recipe("rmt-tiny")
