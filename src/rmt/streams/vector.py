"""The vector stream: each token's residual state is one vector. With this stream the model is the transformer.

Attention reads through W_Q, W_K, W_V (packed) and writes through W_O; the feed-forward core reads and writes the
stream directly.

Axes: B batch, T tokens, D model_dim (the stream's width), H heads, G key/value heads, V head_dim.
"""

import torch.nn.functional as F
from torch import Tensor

from rmt.config import ModelConfig
from rmt.ops.norm import normalise
from rmt.ops.pieces import divide
from rmt.streams.base import Boundary, Cost, Embedded, Site, Stream
from rmt.theory.mup import Described, Role


class VectorNorm(Described):
    """LayerNorm or RMSNorm over the width, with a gain per entry or none."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        self.kind = config.norm
        self.eps = config.norm_eps
        shape = (width or config.model_dim,)
        self.gain = None if config.norm_gain == "none" else self.describe("gain", shape, Role("gain"))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return normalise(x_BTD, 1, self.gain, self.kind, self.eps)


class VectorBoundary(Boundary):
    """Add the last core's output, normalise, project for the next core."""

    def __init__(self, config: ModelConfig, site: Site) -> None:
        super().__init__()
        self.site = site
        self.heads, self.head_dim, self.kv_heads = config.heads, config.head_dim, config.kv_groups
        D, inner = config.model_dim, config.heads * config.head_dim
        self.norm = VectorNorm(config)
        if site.after == "attention":
            role = Role("linear", fan_in=inner, fan_out=D, scales_with=("heads", "head_dim"), writes=True)
            self.output = self.describe("output", (D, inner), role)
        if site.before == "attention":
            rows = qkv_rows(config)
            role = Role("linear", fan_in=D, fan_out=rows, scales_with=("model_dim",), query_rows=inner)
            self.qkv = self.describe("qkv", (rows, D), role)

    def forward(self, x_BTD: Tensor | None, data: Tensor | Embedded) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
        x_BTD = self.write(x_BTD, data)
        return x_BTD, self.read(x_BTD)

    def write(self, x_BTD: Tensor | None, data: Tensor | Embedded) -> Tensor:
        y_BTD = self.project(data)
        return y_BTD if x_BTD is None else x_BTD + y_BTD

    def project(self, data: Tensor | Embedded) -> Tensor:
        """What the last core produced, as a vector of the stream."""
        if isinstance(data, Embedded):
            return data.token_BTD if data.position_BTD is None else data.token_BTD + data.position_BTD
        return F.linear(data.flatten(-2), self.output) if self.site.after == "attention" else data

    def read(self, x_BTD: Tensor) -> Tensor | tuple[Tensor, ...]:
        x_BTD = self.norm(x_BTD)
        if self.site.before != "attention":
            return x_BTD
        heads_BTHV = F.linear(x_BTD, self.qkv).unflatten(-1, (-1, self.head_dim))
        return divide(heads_BTHV, (self.heads, self.kv_heads, self.kv_heads))


class VectorStream(Stream):
    @staticmethod
    def boundary(config: ModelConfig, site: Site) -> Boundary:
        return VectorBoundary(config, site)

    @staticmethod
    def cost(config: ModelConfig, site: Site) -> Cost:
        D = config.model_dim
        written = D * config.heads * config.head_dim if site.after == "attention" else 0
        read = D * qkv_rows(config) if site.before == "attention" else 0
        return Cost(
            write_params=written,
            read_params=read,
            norm_params=0 if config.norm_gain == "none" else D,
            write_flops=2 * written,
            read_flops=2 * read,
        )

    @classmethod
    def saved(cls, config: ModelConfig, site: Site) -> int:
        # The norm keeps its input, mean and deviation; RMSNorm with a gain also the normalised values. W_QKV keeps its
        # input; that of W_O is kept by attention already.
        D = config.model_dim
        normalised = D if config.norm == "rmsnorm" and config.norm_gain != "none" else 0
        norm = D + normalised + (2 if config.norm == "layernorm" else 1)
        return norm + (D if site.before == "attention" else 0)


def qkv_rows(config: ModelConfig) -> int:
    return (config.heads + 2 * config.kv_groups) * config.head_dim
