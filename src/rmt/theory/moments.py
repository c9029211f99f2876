"""How mean and variance move through the operations between a core and its residual stream, at initialisation.

All four operations of the paper's Table 1 are one law. If an output is a sum of n products of independent weights
(mean 0, variance s) and inputs (mean m, variance v), it has mean 0 and variance n s (v + m^2). Forward, n is the number
of inputs of one output (fan in); backward, the gradient of one input sums over the outputs it reached (fan out):

    operation                    fan in   fan out
    store     X = sum w (x) d      R        K        R vectors into a memory of K rows
    retrieve  y = r . X            K        R        R vectors out of it
    linear    y = W x             d_in     d_out

With Xavier's s = 2 / (fan in + fan out) and m = 0, variance is multiplied by 2 fan_in / (fan in + fan out) forward and
by 2 fan_out / (fan in + fan out) backward: both are 1 only when the two are equal. `moments` puts the dimensions in,
measures the same on the real modules with random data, and sets the paper's Table 2 beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rmt.config import ModelConfig
from rmt.errors import InputError
from rmt.model import FeedForward
from rmt.streams.base import Site
from rmt.streams.matrix import Retrieve, Store
from rmt.streams.vector import VectorBoundary
from rmt.theory.mup import Described

#: The paper's Table 1, in this file's letters: s variance of the weights, v and m variance and mean of what comes in.
TABLE_1 = {
    "store": ("0", "R s (v + m^2)", "0", "K s (v + m^2)"),
    "retrieve": ("0", "K s (v + m^2)", "0", "R s (v + m^2)"),
    "linear": ("0", "d_in s (v + m^2)", "0", "d_out s (v + m^2)"),
}

#: The paper's Table 2 (GPT2-medium), forward and backward.
PRINTED = {
    ("attention", "store", "matrix"): (0.4, 1.6),
    ("attention", "store", "vector"): (1.0, 1.0),
    ("attention", "retrieve", "matrix"): (1.14, 0.86),
    ("attention", "retrieve", "vector"): (0.5, 1.5),
    ("feed_forward", "store", "matrix"): (1.0, 1.0),
    ("feed_forward", "store", "vector"): (1.6, 0.4),
    ("feed_forward", "retrieve", "matrix"): (1.0, 1.0),
    ("feed_forward", "retrieve", "vector"): (0.4, 1.6),
}
PRINTED_FOR = {"key_dim": 64, "heads": 16, "head_dim": 64, "ff_dim": 4096}
ROUNDING = 0.005  # the table has two decimals


@dataclass(frozen=True)
class Moment:
    """One operation: what theory says, what was measured, what the paper prints.

    `forward` is the variance of the output over that of the input, `backward` the variance of the input's gradient over
    that of the output's. For inputs of mean m and variance v it is taken over v + m^2.
    """

    layer: str
    operation: str
    stream: str
    weights: str
    fan_in: int
    fan_out: int
    forward: float
    backward: float
    measured_forward: float | None = None
    measured_backward: float | None = None
    measured_mean: float | None = None  # of the output, in standard deviations of it
    paper_forward: float | None = None
    paper_backward: float | None = None

    @property
    def paper_is_wrong(self) -> bool:
        if self.paper_forward is None or self.paper_backward is None:
            return False
        gaps = (abs(self.paper_forward - self.forward), abs(self.paper_backward - self.backward))
        return max(gaps) > ROUNDING

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "paper_is_wrong": self.paper_is_wrong}


@dataclass(frozen=True)
class Moments:
    """The rows of Table 2 for some dimensions."""

    dims: dict[str, int]
    input_mean: float
    rows: list[Moment] = field(default_factory=list)

    def find(self, layer: str, operation: str, stream: str) -> Moment:
        wanted = (layer, operation, stream)
        return next(row for row in self.rows if (row.layer, row.operation, row.stream) == wanted)

    def to_dict(self) -> dict[str, Any]:
        return {
            "dims": self.dims,
            "input_mean": self.input_mean,
            "rows": [row.to_dict() for row in self.rows],
            "closed_forms": TABLE_1,
        }


def propagate(fan: int, weight_variance: float, variance: float, mean: float = 0.0) -> tuple[float, float]:
    """Mean and variance of a sum of `fan` products of zero-mean weights and inputs of the given mean and variance."""
    return 0.0, fan * weight_variance * (variance + mean**2)


def xavier(fan_in: int, fan_out: int) -> float:
    """Xavier's variance of a weight."""
    return 2 / (fan_in + fan_out)


def moments(
    key_dim: int = 64,
    heads: int = 16,
    head_dim: int = 64,
    ff_dim: int = 4096,
    *,
    samples: int = 200_000,
    input_mean: float = 0.0,
    seed: int = 0,
) -> Moments:
    """Theory, measurement and paper for the given dimensions (default: GPT2-medium, the paper's).

    Args:
        key_dim: rows of the memory.
        heads: vectors written or read at once by a core; attention reads three times as many.
        head_dim: dimension of each.
        ff_dim: feed-forward neurons.
        samples: outputs measured per operation, at least; weights are drawn anew until there are as many. 0: theory
            only.
        input_mean: mean of the random inputs (their variance is 1).
        seed: of the random numbers.
    """
    dims = {"key_dim": key_dim, "heads": heads, "head_dim": head_dim, "ff_dim": ff_dim}
    if samples < 0:
        raise InputError(f"samples = {samples}: must be zero or more.")
    if not math.isfinite(input_mean):
        raise InputError(f"input_mean = {input_mean}: must be a finite number.")
    config = ModelConfig(**dims, layers=1, vocab_size=1, context=1, init="xavier")  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for operation in operations(config):
        row = operation.theory(printed=dims == PRINTED_FOR)
        rows.append(operation.measure(row, samples, input_mean, generator) if samples else row)
    return Moments(dims, input_mean, rows)


@dataclass(frozen=True)
class Operation:
    """One operation of the real model: how to make its module, and how to apply it to `shape` inputs per token."""

    layer: str
    operation: str
    stream: str
    weights: str
    make: Callable[[], Described]
    parameter: str
    apply: Callable[[Any, Tensor], Tensor]
    shape: tuple[int, ...]

    def structure(self) -> Described:
        """The module without values."""
        with torch.device("meta"):
            return self.make()

    def theory(self, printed: bool) -> Moment:
        role = self.structure().roles[self.parameter]
        s = xavier(role.fan_in, role.fan_out)
        paper = PRINTED[self.layer, self.operation, self.stream] if printed else (None, None)
        return Moment(
            layer=self.layer,
            operation=self.operation,
            stream=self.stream,
            weights=self.weights,
            fan_in=role.fan_in,
            fan_out=role.fan_out,
            forward=propagate(role.fan_in, s, 1.0)[1],
            backward=propagate(role.fan_out, s, 1.0)[1],
            paper_forward=paper[0],
            paper_backward=paper[1],
        )

    def measure(self, row: Moment, samples: int, mean: float, generator: torch.Generator) -> Moment:
        """Draw weights, inputs and output gradients, and push them through the module both ways."""
        module = self.structure().to_empty(device="cpu")
        weight = module.get_parameter(self.parameter)
        std = math.sqrt(xavier(row.fan_in, row.fan_out))
        # Entries of one draw share its weights, so that it takes as many weights as outputs to know a variance well.
        draws = math.ceil(samples / weight.numel())
        tokens = max(2, math.ceil(samples / draws / math.prod(self.shape)))
        outputs, gradients = Pool(), Pool()
        for _ in range(draws):
            with torch.no_grad():
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
            x = torch.randn(tokens, *self.shape, generator=generator).add_(mean).requires_grad_()
            y = self.apply(module, x)
            outputs.add(y.detach())
            (grad,) = torch.autograd.grad(y, x, torch.randn(y.shape, generator=generator))
            gradients.add(grad)
        return Moment(
            **{
                **vars(row),
                "measured_forward": outputs.variance / (1 + mean**2),
                "measured_backward": gradients.variance,
                "measured_mean": outputs.mean / math.sqrt(outputs.variance),
            }
        )


class Pool:
    """Mean and variance of numbers that come in pieces."""

    def __init__(self) -> None:
        self.count, self.sum, self.squares = 0, 0.0, 0.0

    def add(self, values: Tensor) -> None:
        self.count += values.numel()
        self.sum += values.double().sum().item()
        self.squares += values.double().square().sum().item()

    @property
    def mean(self) -> float:
        return self.sum / self.count

    @property
    def variance(self) -> float:
        return self.squares / self.count - self.mean**2


def operations(config: ModelConfig) -> list[Operation]:
    """The eight operations of the paper's Table 2, in its order, as modules of the model."""
    K, R, V = config.key_dim, config.heads, config.head_dim
    D, neurons = R * V, config.ff_dim
    vector = config.replace(stream="vector")
    after_attention, before_attention = Site(1, 1), Site(0, 1)

    def store(module: Store, data: Tensor) -> Tensor:
        return module(None, data)

    def retrieve(module: Retrieve, memory: Tensor) -> Tensor:
        return module(memory)

    def linear(name: str) -> Callable[[Any, Tensor], Tensor]:
        return lambda module, x: F.linear(x, module.get_parameter(name))

    def core() -> Described:
        return FeedForward(vector, writes=True)

    return [
        Operation("attention", "store", "matrix", "keys", lambda: Store(R, K), "keys_KR", store, (R, V)),
        Operation(
            "attention",
            "store",
            "vector",
            "W_O",
            lambda: VectorBoundary(vector, after_attention),
            "output",
            linear("output"),
            (D,),
        ),
        Operation("attention", "retrieve", "matrix", "keys", lambda: Retrieve(K, 3 * R), "keys_RK", retrieve, (K, V)),
        Operation(
            "attention",
            "retrieve",
            "vector",
            "W_QKV",
            lambda: VectorBoundary(vector, before_attention),
            "qkv",
            linear("qkv"),
            (D,),
        ),
        Operation("feed_forward", "store", "matrix", "keys", lambda: Store(R, K), "keys_KR", store, (R, V)),
        Operation("feed_forward", "store", "vector", "W2", core, "out_DF", linear("out_DF"), (neurons,)),
        Operation("feed_forward", "retrieve", "matrix", "keys", lambda: Retrieve(K, R), "keys_RK", retrieve, (K, V)),
        Operation("feed_forward", "retrieve", "vector", "W1", core, "into_FD", linear("into_FD"), (D,)),
    ]
