"""The paper's own formulas for size and cost, as printed, mistakes included.

They stand here so that `rmt count` can show them next to the exact numbers, and so that docs/errata.md and its tests
can say where they go wrong. Nothing is computed from them. Symbols are the paper's: L layers, R heads, Dv head_dim,
Dk key_dim, D width, F ff_dim, V vocabulary, N context. The paper describes the matrix and the vector stream only, with
learned positions, full attention heads and a two-matrix feed-forward.
"""

from dataclasses import dataclass

from rmt.config import ModelConfig

TEXT = {
    "matrix": (
        "R(2Dk(3L+1) + Dv(2LF+V+N))",
        "6NRDkDv(1+L) + NR(4VDv + L(4NDv+3N+4DvF))",
    ),
    "vector": (
        "D(L(4HDh+2F)+V)",
        "4N(V + LD(2DhH+F) + L(NDhH + 3/4 NH))",
    ),
}


@dataclass(frozen=True)
class Printed:
    """What the paper's formulas give for a configuration: parameters, and forward FLOPs of one example."""

    params: int
    params_formula: str
    flops_per_example: int
    flops_formula: str


def printed(config: ModelConfig) -> Printed | None:
    """The paper's numbers for a configuration; None for a model that its formulas do not describe."""
    described = config.position == "learned" and config.ff == "gelu" and config.kv_groups == config.heads
    if config.stream not in TEXT or not described or config.qk_norm:
        return None
    params, flops = (rmt_params, rmt_flops) if config.stream == "matrix" else (transformer_params, transformer_flops)
    return Printed(params(config), TEXT[config.stream][0], flops(config), TEXT[config.stream][1])


def rmt_params(c: ModelConfig) -> int:
    return c.heads * (
        2 * c.key_dim * (3 * c.layers + 1) + c.head_dim * (2 * c.layers * c.ff_dim + c.vocab_size + c.context)
    )


def rmt_flops(c: ModelConfig) -> int:
    """Forward FLOPs of one example, as totalled in the paper."""
    N, R, Dv = c.context, c.heads, c.head_dim
    streams = 6 * N * R * c.key_dim * Dv * (1 + c.layers)
    cores = N * R * (4 * c.vocab_size * Dv + c.layers * (4 * N * Dv + 3 * N + 4 * Dv * c.ff_dim))
    return streams + cores


def rmt_flops_items(c: ModelConfig) -> dict[str, int]:
    """The same, as the paper lists it item by item before it totals."""
    N, R, V, L = c.context, c.heads, c.vocab_size, c.layers
    keys = N * c.key_dim * c.head_dim * R
    return {
        "word embeddings": 2 * N * V * R * c.head_dim,
        "position embeddings": 2 * N * V * R * c.head_dim,
        "embedding keys": 4 * keys,
        "query, key and value keys": L * 6 * keys,
        "attention": L * (4 * N * N * c.head_dim * R + 3 * R * N * N),
        "attention output keys": L * 2 * keys,
        "feed-forward input keys": L * 2 * keys,
        "feed-forward": L * 4 * N * R * c.head_dim * c.ff_dim,
        "feed-forward output keys": L * 2 * keys,
        "unembedding keys": 2 * keys,
        "unembedding": 2 * N * V * R * c.head_dim,
    }


def transformer_params(c: ModelConfig) -> int:
    return c.model_dim * (c.layers * (4 * c.heads * c.head_dim + 2 * c.ff_dim) + c.vocab_size)


def transformer_flops(c: ModelConfig) -> int:
    """Forward FLOPs of one example."""
    N, L, inner = c.context, c.layers, c.heads * c.head_dim
    layers = L * c.model_dim * (2 * inner + c.ff_dim) + L * N * inner
    return 4 * N * (c.vocab_size + layers) + 3 * L * N * N * c.heads
