"""The depth-wise LSTM stream: an LSTM over the layers of each token takes the place of the residual sum.

The stream is an LSTM's output o and cell c. One layer attends, a = W_O attention(norm o), and then steps the LSTM on
u = [a; o]: i, f, g = sigmoid(norm(W u)), h = W2 gelu(norm(W1 u)), c <- f * c + i * h, o <- g * c. The hidden
computation h is the layer's feed-forward core, so this stream brings its own; nothing is added to o. It starts from
o = embedding and c = 0, and the unembedding reads norm(o). Source: Xu, Song, Liu and van Genabith, "Rewiring the
Transformer with Depth-Wise LSTMs" (2024), in the form whose parameter count is that of the matrix stream's paper.
Where they are silent: no weight adds to a residual sum, so none is scaled by 1 / sqrt(2L); there are no biases, in the
gates neither. The method has no setting in which it is the transformer.

Axes: B batch, T tokens, D model_dim, F ff_dim, U = 2D.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmt.config import ModelConfig
from rmt.errors import InputError
from rmt.streams.base import Boundary, Cost, Embedded, Site, Stream
from rmt.streams.vector import VectorBoundary, VectorNorm, VectorStream
from rmt.theory.mup import Described, Role

State = tuple[Tensor, Tensor]  # (o, c), and between attention and feed-forward (u, c)


class HiddenCore(Described):
    """The feed-forward core of the LSTM: W2 gelu(norm(W1 u))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, neurons = config.model_dim, config.ff_dim
        into = Role("linear", fan_in=2 * D, fan_out=neurons, scales_with=("model_dim",))
        out = Role("linear", fan_in=neurons, fan_out=D, scales_with=("ff_dim",))
        self.into_FU = self.describe("into_FU", (neurons, 2 * D), into)
        self.norm = VectorNorm(config, neurons)
        self.out_DF = self.describe("out_DF", (D, neurons), out)

    def forward(self, u_BTU: Tensor) -> Tensor:
        h_BTF = self.norm(F.linear(u_BTU, self.into_FU))
        return F.linear(F.gelu(h_BTF, approximate="tanh"), self.out_DF)


class Gates(Described):
    """sigmoid(norm(W u)) for the input, forget and output gates, whose three W are packed."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D = config.model_dim
        role = Role("linear", fan_in=2 * D, fan_out=3 * D, scales_with=("model_dim",))
        self.weight = self.describe("weight", (3 * D, 2 * D), role)
        self.norms = nn.ModuleList(VectorNorm(config) for _ in range(3))

    def forward(self, u_BTU: Tensor) -> list[Tensor]:
        gates_BTD = F.linear(u_BTU, self.weight).chunk(3, dim=-1)
        return [torch.sigmoid(norm(gate)) for norm, gate in zip(self.norms, gates_BTD, strict=True)]


class DepthwiseLSTMBoundary(VectorBoundary):
    """After attention: join its output with o for the core. After the core: step the LSTM."""

    def __init__(self, config: ModelConfig, site: Site) -> None:
        super().__init__(config, site)
        if site.after == "attention":
            del self.norm  # the core reads u as it is
            self.roles["output"] = dataclasses.replace(self.roles["output"], writes=False)
        if site.after == "feed_forward":
            self.gates = Gates(config)

    def forward(self, state: State | None, data: Tensor | Embedded) -> tuple[State, Tensor | tuple[Tensor, ...]]:  # type: ignore[override]
        if state is None:
            o_BTD = self.project(data)
            return (o_BTD, torch.zeros_like(o_BTD)), self.read(o_BTD)
        if self.site.after == "attention":
            o_BTD, c_BTD = state
            u_BTU = torch.cat((self.project(data), o_BTD), dim=-1)
            return (u_BTU, c_BTD), u_BTU
        u_BTU, c_BTD = state
        enter_BTD, forget_BTD, leave_BTD = self.gates(u_BTU)
        c_BTD = forget_BTD * c_BTD + enter_BTD * self.project(data)
        o_BTD = leave_BTD * c_BTD
        return (o_BTD, c_BTD), self.read(o_BTD)


class DepthwiseLSTMStream(Stream):
    @staticmethod
    def boundary(config: ModelConfig, site: Site) -> Boundary:
        return DepthwiseLSTMBoundary(config, site)

    @staticmethod
    def cost(config: ModelConfig, site: Site) -> Cost:
        plain = VectorStream.cost(config, site)
        if site.after == "embedding":
            return plain
        if site.after == "attention":
            return dataclasses.replace(plain, norm_params=0)
        gates = 6 * config.model_dim**2
        return dataclasses.replace(plain, write_params=gates, norm_params=4 * plain.norm_params, write_flops=2 * gates)

    @classmethod
    def feed_forward(cls, config: ModelConfig, layer: int) -> nn.Module:
        if config.ff != "gelu":
            raise InputError(f"the depthwise_lstm stream has its own feed-forward core, without {config.ff}: use gelu.")
        return HiddenCore(config)

    @classmethod
    def feed_forward_cost(cls, config: ModelConfig) -> tuple[int, int]:
        weights = 3 * config.model_dim * config.ff_dim
        return weights + (config.ff_dim if config.norm_gain != "none" else 0), 2 * weights
