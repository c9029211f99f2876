"""The aggregation stream: a transformer whose layers are merged two by two by one shared aggregation node.

After every second layer the node sees the outputs x, y of the last two layers and its own previous result z, and the
stream goes on from y + W2 sigmoid(W1 norm([x; y; z])); z starts as the embedding, and the last result is what the
unembedding reads. Source: the hierarchical aggregation of Dou, Tu, Wang, Shi and Zhang, "Exploiting Deep
Representations for Neural Machine Translation" (2018), in the form whose parameter count is that of the matrix
stream's paper: one node for all depths. Where they are silent: the residual of the node is y alone (x + y + z would
triple the stream at every node); W2 writes to the stream, so its initial values are scaled by 1 / sqrt(2L); with an
odd number of layers the last one has no partner, and the unembedding reads its output as it is. With W2 = 0 this is
the vector stream.

Axes: B batch, T tokens, D model_dim.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from rmt.config import ModelConfig
from rmt.streams.base import Boundary, Cost, Embedded, Site, Stream, sites
from rmt.streams.vector import VectorBoundary, VectorNorm, VectorStream
from rmt.theory.mup import Described, Role

State = tuple[Tensor, Tensor, Tensor]  # the stream, the output of the last odd layer, the last node's result


class AggregationNode(Described):
    """y + W2 sigmoid(W1 norm([x; y; z]))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D = config.model_dim
        self.norm = VectorNorm(config, 3 * D)
        into = Role("linear", fan_in=3 * D, fan_out=D, scales_with=("model_dim",))
        out = Role("linear", fan_in=D, fan_out=D, scales_with=("model_dim",), writes=True)
        self.into_D3D = self.describe("into_D3D", (D, 3 * D), into)
        self.out_DD = self.describe("out_DD", (D, D), out)

    def forward(self, x_BTD: Tensor, y_BTD: Tensor, z_BTD: Tensor) -> Tensor:
        all_BT3D = self.norm(torch.cat((x_BTD, y_BTD, z_BTD), dim=-1))
        return y_BTD + F.linear(torch.sigmoid(F.linear(all_BT3D, self.into_D3D)), self.out_DD)


class AggregationBoundary(VectorBoundary):
    """A vector boundary that remembers every odd layer's output and merges after every even one."""

    node: AggregationNode

    def forward(self, state: State | None, data: Tensor | Embedded) -> tuple[State, Tensor | tuple[Tensor, ...]]:  # type: ignore[override]
        if state is None:
            x_BTD = self.project(data)
            return (x_BTD, x_BTD, x_BTD), self.read(x_BTD)
        x_BTD, odd_BTD, merged_BTD = state
        x_BTD = self.write(x_BTD, data)
        if merges(self.site):
            x_BTD = merged_BTD = self.node(odd_BTD, x_BTD, merged_BTD)
        elif self.site.after == "feed_forward":
            odd_BTD = x_BTD
        return (x_BTD, odd_BTD, merged_BTD), self.read(x_BTD)


class AggregationStream(Stream):
    @staticmethod
    def boundary(config: ModelConfig, site: Site) -> Boundary:
        return AggregationBoundary(config, site)

    @classmethod
    def boundaries(cls, config: ModelConfig) -> list[Boundary]:
        """The first boundary that merges owns the node; the others only refer to it, so that it is saved once."""
        boundaries = [AggregationBoundary(config, site) for site in sites(config.layers)]
        merging = [boundary for boundary in boundaries if merges(boundary.site)]
        if merging:
            merging[0].node = AggregationNode(config)
        for boundary in merging[1:]:
            object.__setattr__(boundary, "node", merging[0].node)
        return list(boundaries)

    @staticmethod
    def cost(config: ModelConfig, site: Site) -> Cost:
        plain = VectorStream.cost(config, site)
        if not merges(site):
            return plain
        weights, owns = 4 * config.model_dim**2, site.index == 4
        gain = 3 * config.model_dim if owns and config.norm_gain != "none" else 0
        return dataclasses.replace(
            plain,
            write_params=plain.write_params + (weights if owns else 0),
            norm_params=plain.norm_params + gain,
            write_flops=plain.write_flops + 2 * weights,
        )


def merges(site: Site) -> bool:
    """Whether the node works at this boundary: after the feed-forward core of every second layer."""
    return site.index > 0 and site.index % 4 == 0
