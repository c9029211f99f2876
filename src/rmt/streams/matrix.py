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
from torch.nn.modules import module

from rmt.config import ModelConfig, Norm, NormGain, Ops
from rmt.ops.boundary import Norming, State, write_read
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
    """LayerNorm or RMSNorm over all K * V entries of a memory.

    Args:
        key_dim: rows of the memory.
        value_dim: columns of the memory.
        kind: layernorm or rmsnorm.
        gain: learned factors: one per entry (full), one per value index (value), or none.
        eps: added to the variance.
    """

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
        self.ops: Ops = "auto"
        self.heads, self.head_dim, self.kv_heads = config.heads, config.head_dim, config.kv_groups
        self.store = Store(config.heads, config.key_dim, writes=site.after != "embedding")
        if site.after == "embedding" and config.position == "learned":
            self.store_position = Store(config.heads, config.key_dim)
        self.norm = MatrixNorm(config.key_dim, config.head_dim, config.norm, config.norm_gain, config.norm_eps)
        queries = config.heads if site.before == "attention" else 0
        self.retrieve = Retrieve(config.key_dim, read_rank(config, site.before), query_rows=queries)

    def forward(
        self, state: State | Tensor | None, data: Tensor | Embedded
    ) -> tuple[State | Tensor, Tensor | tuple[Tensor, ...]]:
        d_BTRV, write_KR = self.written(data)
        sizes = (self.heads, self.kv_heads, self.kv_heads) if self.site.before == "attention" else (self.heads,)
        # What a hook captures must not change afterwards, so it gets the stream as a tensor of its own.
        hooked = bool(self._forward_hooks or module._global_forward_hooks)
        norming = Norming(self.norm.kind, self.norm.eps)
        state, pieces = write_read(
            state, d_BTRV, write_KR, self.norm.gain, norming, self.retrieve.keys_RK, sizes, self.ops, hooked
        )
        return state, pieces if self.site.before == "attention" else pieces[0].flatten(-2)

    def written(self, data: Tensor | Embedded) -> tuple[Tensor, Tensor]:
        """The vectors to write and their keys. Tokens and positions are one write of twice as many vectors."""
        if not isinstance(data, Embedded):
            return (data if self.site.after == "attention" else self.split(data)), self.store.keys_KR
        token_BTRV = self.split(data.token_BTD)
        if data.position_BTD is None:
            return token_BTRV, self.store.keys_KR
        d_BTRV = torch.cat((token_BTRV, self.split(data.position_BTD)), dim=-2)
        return d_BTRV, torch.cat((self.store.keys_KR, self.store_position.keys_KR), dim=-1)

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

    @classmethod
    def saved(cls, config: ModelConfig, site: Site) -> int:
        # Mean and deviation, and the vectors written (attention keeps its own). The memory itself is one buffer for all
        # boundaries, and so is its gradient: they are counted with the first.
        written = 0 if site.after == "attention" else config.heads * config.head_dim
        if site.after != "embedding":
            return 2 + written
        stores = 2 if config.position == "learned" else 1
        return 2 + stores * written + 2 * config.key_dim * config.head_dim


def read_rank(config: ModelConfig, core: Core) -> int:
    """How many vectors a core reads."""
    return config.heads + 2 * config.kv_groups if core == "attention" else config.heads
