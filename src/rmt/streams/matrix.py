"""The matrix stream: each token's residual state is an outer-product memory, a key_dim x head_dim matrix.

A core writes its H vectors of dimension V by associating each with a learned key of dimension K and adding the outer
products (`Store`); it reads by contracting the normalised memory with learned keys (`Retrieve`). No weight matrix
stands between a core and the stream, so K can grow with next to no parameters or FLOPs. With this stream the model is
the Residual Matrix Transformer.

`Store`, `Retrieve` and `MatrixNorm` are public: examples/matrix_stream_in_your_model.py puts a matrix stream around
somebody else's layers.

Axes: B batch, T tokens (`...` below: any leading axes), R vectors written or read, K key_dim, V head_dim,
H heads, G key/value heads, D = H * V.
"""

import torch
from torch import Tensor

from rmt.config import ModelConfig, Norm, NormGain
from rmt.ops.norm import normalise
from rmt.streams.base import Boundary, Core, Cost, Embedded, Site, Stream
from rmt.theory.mup import Described, Role


class Store(Described):
    """Write `rank` vectors to a memory: X += sum over r of keys[:, r] (outer product) data[r].

    Args:
        rank: how many vectors are written at once.
        key_dim: rows of the memory.
        writes: scale the initial keys by 1 / sqrt(2 * layers), as for every core that adds to the stream.
    """

    def __init__(self, rank: int, key_dim: int, *, writes: bool = False) -> None:
        super().__init__()
        role = Role("linear", fan_in=rank, fan_out=key_dim, scales_with=("heads",), writes=writes)
        self.keys_KR = self.describe("keys_KR", (key_dim, rank), role)

    def forward(self, X_KV: Tensor | None, data_RV: Tensor) -> Tensor:
        """`X_KV` [..., K, V] (None: an empty memory) and `data_RV` [..., R, V] -> the new memory [..., K, V]."""
        outer_KV = torch.matmul(self.keys_KR, data_RV)
        return outer_KV if X_KV is None else X_KV + outer_KV


class Retrieve(Described):
    """Read `rank` vectors from a memory: y[r] = keys[r] . X, a contraction over the key axis.

    Args:
        key_dim: rows of the memory.
        rank: how many vectors are read at once.
        query_rows: how many of them, from the first, are attention queries.
    """

    def __init__(self, key_dim: int, rank: int, *, query_rows: int = 0) -> None:
        super().__init__()
        role = Role("linear", fan_in=key_dim, fan_out=rank, scales_with=("key_dim",), query_rows=query_rows)
        self.keys_RK = self.describe("keys_RK", (rank, key_dim), role)

    def forward(self, X_KV: Tensor) -> Tensor:
        """`X_KV` [..., K, V] -> [..., R, V]."""
        return torch.matmul(self.keys_RK, X_KV)


class MatrixNorm(Described):
    """LayerNorm or RMSNorm over all K * V entries of a memory, with a gain per entry, per value index, or none."""

    def __init__(
        self, key_dim: int, value_dim: int, kind: Norm = "layernorm", gain: NormGain = "full", eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.kind: Norm = kind
        self.eps = eps
        shape = {"full": (key_dim, value_dim), "value": (value_dim,)}.get(gain)
        self.gain = self.describe("gain", shape, Role("gain")) if shape else None

    def forward(self, X_KV: Tensor) -> Tensor:
        return normalise(X_KV, 2, self.gain, self.kind, self.eps)


class MatrixBoundary(Boundary):
    """Store the last core's vectors, normalise, retrieve the next core's."""

    def __init__(self, config: ModelConfig, site: Site) -> None:
        super().__init__()
        self.site = site
        self.heads, self.head_dim, self.kv_heads = config.heads, config.head_dim, config.kv_groups
        self.store = Store(config.heads, config.key_dim, writes=site.after != "embedding")
        if site.after == "embedding" and config.position == "learned":
            self.store_position = Store(config.heads, config.key_dim)
        self.norm = MatrixNorm(config.key_dim, config.head_dim, config.norm, config.norm_gain, config.norm_eps)
        queries = config.heads if site.before == "attention" else 0
        self.retrieve = Retrieve(config.key_dim, read_rank(config, site.before), query_rows=queries)

    def forward(self, X_BTKV: Tensor | None, data: Tensor | Embedded) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
        X_BTKV = self.write(X_BTKV, data)
        return X_BTKV, self.read(X_BTKV)

    def write(self, X_BTKV: Tensor | None, data: Tensor | Embedded) -> Tensor:
        if isinstance(data, Embedded):
            X_BTKV = self.store(X_BTKV, self.split(data.token_BTD))
            if data.position_BTD is not None:
                X_BTKV = self.store_position(X_BTKV, self.split(data.position_BTD))
            return X_BTKV
        return self.store(X_BTKV, data if self.site.after == "attention" else self.split(data))

    def read(self, X_BTKV: Tensor) -> Tensor | tuple[Tensor, ...]:
        y_BTRV = self.retrieve(self.norm(X_BTKV))
        if self.site.before == "attention":
            return y_BTRV.split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        return y_BTRV.flatten(-2)

    def split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.heads, self.head_dim))


class MatrixStream(Stream):
    feed_forward_writes = False

    @staticmethod
    def boundary(config: ModelConfig, site: Site) -> Boundary:
        return MatrixBoundary(config, site)

    @staticmethod
    def cost(config: ModelConfig, site: Site) -> Cost:
        stores = 2 if site.after == "embedding" and config.position == "learned" else 1
        written, read = stores * config.heads, read_rank(config, site.before)
        size = config.key_dim * config.head_dim
        gain = {"full": size, "value": config.head_dim, "none": 0}[config.norm_gain]
        return Cost(
            write_params=written * config.key_dim,
            read_params=read * config.key_dim,
            norm_params=gain,
            write_flops=2 * written * size,
            read_flops=2 * read * size,
        )


def read_rank(config: ModelConfig, core: Core) -> int:
    """How many vectors a core reads."""
    return config.heads + 2 * config.kv_groups if core == "attention" else config.heads
