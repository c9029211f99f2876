"""The highway stream: a transformer whose every sublayer also adds a gated linear function of its own input.

Beside the core's output F(norm x), each of the 2L sublayers adds tanh(W1 n) * (W2 n), where n is the sublayer's input
normalised with a gain of its own: x <- x + F(norm x) + tanh(W1 n) * (W2 n). The gate lets a token update itself from
its own features next to what attention and feed-forward bring. Source: the self-gating units of Chai, Jin and Hou,
"Highway Transformer: Self-Gating Enhanced Self-Attentive Networks" (2020), in the form whose parameter count is that
of the matrix stream's paper. Where they are silent: W2's result is added to the stream, so its initial values are
scaled by 1 / sqrt(2L) like those of every weight that writes; there are no biases. With W2 = 0 this is the vector
stream.

Axes: B batch, T tokens, D model_dim.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from rmt.config import ModelConfig
from rmt.streams.base import Boundary, Cost, Embedded, Site, Stream
from rmt.streams.vector import VectorBoundary, VectorNorm, VectorStream
from rmt.theory.mup import Described, Role


class SelfGate(Described):
    """tanh(W1 n) * (W2 n) with n = norm(x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D = config.model_dim
        self.norm = VectorNorm(config)
        into = Role("linear", fan_in=D, fan_out=D, scales_with=("model_dim",))
        self.gate_DD = self.describe("gate_DD", (D, D), into)
        self.value_DD = self.describe("value_DD", (D, D), dataclasses.replace(into, writes=True))

    def forward(self, x_BTD: Tensor) -> Tensor:
        n_BTD = self.norm(x_BTD)
        return torch.tanh(F.linear(n_BTD, self.gate_DD)) * F.linear(n_BTD, self.value_DD)


class HighwayBoundary(VectorBoundary):
    """Add the last core's output and the gate of what that core had read."""

    def __init__(self, config: ModelConfig, site: Site) -> None:
        super().__init__(config, site)
        if site.after != "embedding":
            self.gate = SelfGate(config)

    def write(self, x_BTD: Tensor | None, data: Tensor | Embedded) -> Tensor:
        if x_BTD is None:
            return super().write(x_BTD, data)
        return super().write(x_BTD, data) + self.gate(x_BTD)


class HighwayStream(Stream):
    @staticmethod
    def boundary(config: ModelConfig, site: Site) -> Boundary:
        return HighwayBoundary(config, site)

    @staticmethod
    def cost(config: ModelConfig, site: Site) -> Cost:
        plain = VectorStream.cost(config, site)
        if site.after == "embedding":
            return plain
        gate = 2 * config.model_dim**2
        return dataclasses.replace(
            plain,
            write_params=plain.write_params + gate,
            norm_params=2 * plain.norm_params,
            write_flops=plain.write_flops + 2 * gate,
        )
