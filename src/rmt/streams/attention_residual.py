"""Attention residuals: each core reads a softmax-weighted average over depth instead of a sum.

With v_0 the embedding and v_i the output of core i, core l reads sum_i softmax_i(w_l . rms(v_i)) v_i over all i < l,
through its usual norm; w_l is one learned vector per core, and the unembedding has one too. The block form keeps few
sources: the outputs within a block of consecutive cores are summed, and a core attends to the embedding, the sums of
the finished blocks, and its own block's sum so far. Source: Kimi Team, "Attention Residuals" (2026). They require
w_l = 0 at the start, a plain average. Where they are silent: the RMS norm has no gain, since w_l can hold it; the
first core has one source and so needs no w; blocks are equally long, ceil(2L / residual_blocks) cores, but for a
shorter last one; w_l decays like other weights; the softmax is computed in float32 or wider. An average has no setting
in which it is the transformer's sum.

Axes: B batch, T tokens, S sources, D model_dim.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rmt.config import ModelConfig
from rmt.streams.base import Boundary, Cost, Embedded, Site, Stream
from rmt.streams.vector import VectorBoundary, VectorStream
from rmt.theory.mup import Described, Role


class DepthAttention(Described):
    """sum over i of softmax_i(w . rms(v_i)) v_i."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        role = Role("linear", fan_in=config.model_dim, scales_with=("model_dim",), initial=0.0)
        self.query_1D = self.describe("query_1D", (1, config.model_dim), role)

    def forward(self, sources: tuple[Tensor, ...]) -> Tensor:
        v_BTSD = torch.stack(sources, dim=-2)
        logits_BTS1 = F.linear(F.rms_norm(v_BTSD, v_BTSD.shape[-1:], eps=self.eps), self.query_1D)
        wide = torch.promote_types(logits_BTS1.dtype, torch.float32)
        weights_BTS1 = torch.softmax(logits_BTS1, dim=-2, dtype=wide).to(v_BTSD.dtype)
        return torch.matmul(weights_BTS1.mT, v_BTSD)[..., 0, :]


class AttentionResidualBoundary(VectorBoundary):
    """Append the last core's output to the sources, or add it to the open block, and attend over all sources.

    Args:
        block: how many consecutive cores share a source; 1 is the full form.
    """

    def __init__(self, config: ModelConfig, site: Site, block: int) -> None:
        super().__init__(config, site)
        self.opens_block = (site.index - 1) % block == 0
        if site.after != "embedding":
            self.attend = DepthAttention(config)

    def forward(  # type: ignore[override]
        self, sources: tuple[Tensor, ...] | None, data: Tensor | Embedded
    ) -> tuple[tuple[Tensor, ...], Tensor | tuple[Tensor, ...]]:
        y_BTD = self.project(data)
        if sources is None:
            return (y_BTD,), self.read(y_BTD)
        if self.opens_block:
            sources = (*sources, y_BTD)
        else:
            sources = (*sources[:-1], sources[-1] + y_BTD)
        return sources, self.read(self.attend(sources))


class AttentionResidualStream(Stream):
    @classmethod
    def block(cls, config: ModelConfig) -> int:
        """Cores per block."""
        return 1

    @classmethod
    def boundary(cls, config: ModelConfig, site: Site) -> Boundary:
        return AttentionResidualBoundary(config, site, cls.block(config))

    @classmethod
    def cost(cls, config: ModelConfig, site: Site) -> Cost:
        plain = VectorStream.cost(config, site)
        if site.after == "embedding":
            return plain
        D, sources = config.model_dim, 1 + math.ceil(site.index / cls.block(config))
        return dataclasses.replace(
            plain, read_params=plain.read_params + D, read_flops=plain.read_flops + 4 * sources * D
        )


class AttentionResidualBlockStream(AttentionResidualStream):
    @classmethod
    def block(cls, config: ModelConfig) -> int:
        return math.ceil(2 * config.layers / config.residual_blocks)
