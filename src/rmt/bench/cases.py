"""The shapes that are measured and the rows of each table: which model runs with which operations.

stock      a transformer of torch modules (`rmt.bench.stock`)
vector     our transformer, with every kernel that it shares with the RMT
plain      the RMT as ordinary tensor expressions
portable   the RMT with operations in PyTorch only
native     the RMT with operations in C++
gpt2       transformers' GPT-2 (decoding only)
"""

from dataclasses import dataclass
from typing import Any

from rmt.config import ModelConfig, Ops
from rmt.errors import InputError, suggest
from rmt.ops.native import build
from rmt.theory.accounting import Count

MATRIX_ROWS: tuple[Ops, ...] = ("plain", "portable", "native")
ROWS = ("stock", "vector", *MATRIX_ROWS, "gpt2")
PARTS = ("stack", "step", "decode", "memory", "loss", "keydim")

#: Dimensions and batch. The vocabulary is GPT-2's, the context 512.
SHAPES: dict[str, tuple[dict[str, int], int]] = {
    "tiny": (dict(layers=2, key_dim=8, head_dim=8, heads=4, ff_dim=64, vocab_size=503, context=64), 2),
    "S": (dict(layers=6, key_dim=32, head_dim=32, heads=12, ff_dim=1536), 4),
    "small": (dict(layers=12, key_dim=32, head_dim=64, heads=12, ff_dim=3072), 2),
    "medium": (dict(layers=24, key_dim=64, head_dim=64, heads=16, ff_dim=4096), 1),
}


@dataclass(frozen=True)
class Case:
    """What one run of the benchmark measures."""

    shape: str
    config: ModelConfig  # of the matrix stream
    batch: int
    rows: tuple[str, ...]
    whole: bool  # with all the shape's layers

    @property
    def tokens(self) -> int:
        return self.batch * self.config.context

    @property
    def vector(self) -> ModelConfig:
        return self.config.replace(stream="vector")

    @property
    def matrix_rows(self) -> list[Ops]:
        return [row for row in MATRIX_ROWS if row in self.rows]

    @property
    def best(self) -> Ops:
        """The fastest row of the RMT among those that run."""
        return self.matrix_rows[-1]

    def to_dict(self) -> dict[str, Any]:
        dims = ("layers", "key_dim", "head_dim", "heads", "ff_dim", "vocab_size", "context")
        return {"name": self.shape, "batch": self.batch, **{name: getattr(self.config, name) for name in dims}}


def find_case(shape: str, layers: int | None = None, rows: tuple[str, ...] | None = None) -> Case:
    if shape not in SHAPES:
        raise InputError(f"bench: there is no shape {shape!r}. {suggest(shape, SHAPES)}")
    for row in rows or ():
        if row not in ROWS:
            raise InputError(f"bench: there is no row {row!r}. {suggest(row, ROWS)}")
    if rows and not set(rows) & set(MATRIX_ROWS):
        raise InputError(f"bench: --rows must name one of {', '.join(MATRIX_ROWS)}: the ratios are of the RMT.")
    dims, batch = SHAPES[shape]
    config = ModelConfig(**(dims | ({} if layers is None else {"layers": layers})))  # type: ignore[arg-type]
    rows = rows or tuple(row for row in ROWS if row != "native" or not build.problem())
    return Case(shape, config, batch, rows, config.layers == dims["layers"])


def training_flops(counted: Count, tokens: int) -> float:
    """Matrix-multiplication FLOPs of a training step that are needed: attention only looks back, so half of it."""
    parts = counted.flops.per_token.parts
    return 3 * tokens * (int(counted.flops.per_token) - parts["softmax"] - parts["attention"] / 2)
