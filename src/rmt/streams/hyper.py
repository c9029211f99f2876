"""Hyper-connections: n residual vectors side by side, and learned coefficients that connect the cores to them.

With S the n x D state, a core reads h = A_m^T S and its output y is written as S <- A_r^T S + B (outer) y. Three
streams share that rule and differ in where the coefficients A = [A_m | A_r] and B come from:

- hyper: learned constants. Zhu et al., "Hyper-Connections" (2024).
- hyper_dynamic: constants plus s * tanh(norm(S) W), a bounded function of each token's state. Same source.
- mhc: functions of each token's state under constraints that keep the stream's size: A_m = sigmoid, B = 2 sigmoid, and
  A_r doubly stochastic by 20 Sinkhorn steps. Xie et al., "mHC: Manifold-Constrained Hyper-Connections" (2025).

Hyper-connections start with A_m = e_(k mod n) for core k, A_r = I, B = 1, W = 0 and s = 0.01. Our choices: the
unembedding reads the mean of the n vectors where the authors sum them, which is the same after its norm, and so we do
not scale the cores' output weights by sqrt(n) as they do to make up for the sum. All coefficients and the mixing are
computed in float32 or wider. The source of mhc gives no initial values but s = 0.01: it starts as close to the same
point as its constraints allow, with zero weights and biases of +-4 (A_m), 0 (B), and 0 or -8 (A_r); Sinkhorn works on
logarithms, which cannot divide by zero. So the initial values are the identity setting of all three: the n vectors
stay equal, and the model is the vector stream's.

Axes: B batch, T tokens, N residual vectors (hyper_streams), M = N + 1, D model_dim.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from rmt.config import ModelConfig
from rmt.streams.base import Boundary, Cost, Embedded, Site, Stream
from rmt.streams.vector import VectorBoundary, VectorNorm, VectorStream
from rmt.theory.mup import Described, Role

SINKHORN_STEPS = 20


class Connections(Described):
    """Hyper-connections around one core, with learned constants as coefficients.

    Args:
        core: which of the 2L cores, from 0; it starts by reading residual vector `core` mod N.
    """

    def __init__(self, config: ModelConfig, core: int) -> None:
        super().__init__()
        self.N = config.hyper_streams
        start_NM = tuple(
            (float(row == core % self.N), *(float(row == column) for column in range(self.N))) for row in range(self.N)
        )
        self.mix_NM = self.describe("mix_NM", (self.N, self.N + 1), Role("connection", initial=start_NM))
        self.write_N = self.describe("write_N", (self.N,), Role("connection", initial=1.0))

    def coefficients(self, S_BTND: Tensor) -> tuple[Tensor, Tensor]:
        """A = [A_m | A_r], shape [..., N, M], and B, shape [..., N]."""
        # A copy of B: it waits in the state for the core's output, and a sharded run frees parameters before that.
        return self.mix_NM, self.write_N.clone()

    def forward(self, S_BTND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the core reads, the mixed residual vectors, and B, by which they will take up the core's output."""
        dtype = S_BTND.dtype
        with torch.autocast(S_BTND.device.type, enabled=False):
            S_BTND = S_BTND.to(torch.promote_types(dtype, torch.float32))
            mix_NM, write_N = self.coefficients(S_BTND)
            out_BTMD = torch.matmul(mix_NM.mT.to(S_BTND.dtype), S_BTND).to(dtype)
        return out_BTMD[..., 0, :], out_BTMD[..., 1:, :], write_N.to(dtype)

    @staticmethod
    def cost(config: ModelConfig) -> Cost:
        N = config.hyper_streams
        return Cost(read_params=N * (N + 2), read_flops=2 * N * (N + 1) * config.model_dim)


class DynamicConnections(Connections):
    """Learned constants plus s * tanh(norm(S) W)."""

    def __init__(self, config: ModelConfig, core: int) -> None:
        super().__init__(config, core)
        D, rows = config.model_dim, self.N + 2
        role = Role("linear", fan_in=D, fan_out=rows, scales_with=("model_dim",), initial=0.0)
        self.norm = VectorNorm(config)
        self.weight = self.describe("weight", (rows, D), role)
        self.scale = self.describe("scale", (2,), Role("connection", initial=0.01))

    def coefficients(self, S_BTND: Tensor) -> tuple[Tensor, Tensor]:
        normed_BTND = self.norm(S_BTND.to(self.weight.dtype))
        change_BTNM, change_BTN1 = torch.tanh(F.linear(normed_BTND, self.weight)).split((self.N + 1, 1), dim=-1)
        mix_scale, write_scale = self.scale
        return self.mix_NM + mix_scale * change_BTNM, self.write_N + write_scale * change_BTN1[..., 0]

    @staticmethod
    def cost(config: ModelConfig) -> Cost:
        static, D, rows = Connections.cost(config), config.model_dim, config.hyper_streams + 2
        return Cost(
            read_params=static.read_params + D * rows + 2,
            norm_params=0 if config.norm_gain == "none" else D,
            read_flops=static.read_flops + 2 * config.hyper_streams * D * rows,
        )


class ManifoldConnections(Connections):
    """sigmoid, 2 sigmoid and Sinkhorn of scale * (W rms(vec S)) + bias."""

    def __init__(self, config: ModelConfig, core: int) -> None:
        Described.__init__(self)
        self.N, self.eps = config.hyper_streams, config.norm_eps
        rows, fan_in = self.N * (self.N + 2), self.N * config.model_dim
        read = tuple(4.0 if row == core % self.N else -4.0 for row in range(self.N))
        mix = tuple(0.0 if row == column else -8.0 for row in range(self.N) for column in range(self.N))
        role = Role("linear", fan_in=fan_in, fan_out=rows, scales_with=("model_dim",), initial=0.0)
        self.weight = self.describe("weight", (rows, fan_in), role)
        self.bias = self.describe("bias", (rows,), Role("connection", initial=(*read, *((0.0,) * self.N), *mix)))
        self.scale = self.describe("scale", (3,), Role("connection", initial=0.01))

    def coefficients(self, S_BTND: Tensor) -> tuple[Tensor, Tensor]:
        dtype, N = S_BTND.dtype, self.N
        vec_BTC = S_BTND.flatten(-2)
        z_BTR = F.linear(F.rms_norm(vec_BTC, vec_BTC.shape[-1:], eps=self.eps), self.weight.to(dtype))
        parts = zip(z_BTR.split((N, N, N * N), -1), self.scale, self.bias.split((N, N, N * N)), strict=True)
        read_BTN, write_BTN, mix_BTNN = (scale * z + bias for z, scale, bias in parts)
        mix_BTNN = sinkhorn(mix_BTNN.unflatten(-1, (N, N)))
        return torch.cat((torch.sigmoid(read_BTN)[..., None], mix_BTNN), dim=-1), 2 * torch.sigmoid(write_BTN)

    @staticmethod
    def cost(config: ModelConfig) -> Cost:
        N = config.hyper_streams
        rows, fan_in = N * (N + 2), N * config.model_dim
        mixing = 2 * N * (N + 1) * config.model_dim
        return Cost(read_params=rows * fan_in + rows + 3, read_flops=2 * rows * fan_in + mixing)


def sinkhorn(logits_NN: Tensor, steps: int = SINKHORN_STEPS) -> Tensor:
    """A doubly stochastic matrix from exp(logits): rows, then columns, made to sum to one, `steps` times, then rounded.

    The steps converge slowly where logits are large. The rounding ends that: rows that are too large are scaled down,
    and what rows and columns then lack is added as an outer product, so that all of them sum to one.
    """
    for _ in range(steps):
        logits_NN = torch.log_softmax(torch.log_softmax(logits_NN, dim=-1), dim=-2)
    mix_NN = logits_NN.exp()
    mix_NN = mix_NN / mix_NN.sum(dim=-1, keepdim=True).clamp(min=1)
    row_N1 = (1 - mix_NN.sum(dim=-1, keepdim=True)).clamp(min=0)
    column_1N = (1 - mix_NN.sum(dim=-2, keepdim=True)).clamp(min=0)
    lack_11 = row_N1.sum(dim=-2, keepdim=True).clamp(min=torch.finfo(mix_NN.dtype).tiny ** 0.5)
    return mix_NN + row_N1 * (column_1N / lack_11)


class HyperBoundary(VectorBoundary):
    """Write the last core's output to all residual vectors, mix them, and read one vector for the next core."""

    def __init__(self, config: ModelConfig, site: Site, kind: type[Connections]) -> None:
        super().__init__(config, site)
        self.N = config.hyper_streams
        if site.before != "unembedding":
            self.connections = kind(config, site.index)

    def forward(  # type: ignore[override]
        self, state: tuple[Tensor, Tensor] | None, data: Tensor | Embedded
    ) -> tuple[tuple[Tensor, ...], Tensor | tuple[Tensor, ...]]:
        y_BT1D = self.project(data).unsqueeze(-2)
        if state is None:
            S_BTND = y_BT1D.expand(*y_BT1D.shape[:-2], self.N, -1)
        else:
            S_BTND, write_BTN = state
            S_BTND = S_BTND + write_BTN[..., None] * y_BT1D
        if self.site.before == "unembedding":
            return (S_BTND,), self.read(S_BTND.mean(dim=-2))
        h_BTD, S_BTND, write_BTN = self.connections(S_BTND)
        return (S_BTND, write_BTN), self.read(h_BTD)


class HyperStream(Stream):
    connections: type[Connections] = Connections

    @classmethod
    def boundary(cls, config: ModelConfig, site: Site) -> Boundary:
        return HyperBoundary(config, site, cls.connections)

    @classmethod
    def cost(cls, config: ModelConfig, site: Site) -> Cost:
        plain = VectorStream.cost(config, site)
        if site.before == "unembedding":
            return plain
        added = cls.connections.cost(config)
        return dataclasses.replace(
            plain,
            read_params=plain.read_params + added.read_params,
            norm_params=plain.norm_params + added.norm_params,
            read_flops=plain.read_flops + added.read_flops,
        )


class HyperDynamicStream(HyperStream):
    connections = DynamicConnections


class ManifoldHyperStream(HyperStream):
    connections = ManifoldConnections
