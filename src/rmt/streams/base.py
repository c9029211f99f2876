"""The contract between the model and its residual stream.

A model of L layers has 2L cores (attention, feed-forward, attention, ...) and 2L + 1 boundaries between them:

    embedding | attention 0 | feed-forward 0 | attention 1 | ... | feed-forward L-1 | unembedding

At a boundary the stream writes what the last core produced and reads what the next core needs, in one call:
`state, x = boundary(state, data)`. A stream is a list of 2L + 1 boundaries; the state is its own business. What a
boundary is given and what it must return depend on its neighbours only:

    written after     data                                       read for         x
    embedding         Embedded(token_BTD, position_BTD or None)  attention        (q_BTHV, k_BTGV, v_BTGV)
    attention         heads_BTHV                                 feed-forward     x_BTD
    feed-forward      y_BTD                                      unembedding      x_BTD

Axes: B batch, T tokens, H query heads, G key/value heads, V head_dim, D model_dim, K key_dim.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn

from rmt.config import ModelConfig
from rmt.theory.mup import Described

Core = Literal["embedding", "attention", "feed_forward", "unembedding"]


class Embedded(NamedTuple):
    """What the embedding produces: token vectors and, with learned positions, position vectors."""

    token_BTD: Tensor
    position_BTD: Tensor | None


@dataclass(frozen=True)
class Site:
    """One of the 2L + 1 boundaries of a model: which core it writes for and which it reads for."""

    index: int
    layers: int

    @property
    def after(self) -> Core:
        if self.index == 0:
            return "embedding"
        return "attention" if self.index % 2 else "feed_forward"

    @property
    def before(self) -> Core:
        if self.index == 2 * self.layers:
            return "unembedding"
        return "feed_forward" if self.index % 2 else "attention"


def sites(layers: int) -> list[Site]:
    return [Site(index, layers) for index in range(2 * layers + 1)]


class Boundary(Described):
    """Writes `data` to the stream, then reads for the next core: `state, x = boundary(state, data)`.

    `state` is None at the first boundary. Sub-classes define `forward`.
    """


class Stream(ABC):
    """One way to carry information from layer to layer: how to build its boundaries, and what they cost."""

    #: The feed-forward core's output matrix writes to the stream itself (there are no write weights after it), so
    #: that its initial values are scaled by 1 / sqrt(2L).
    feed_forward_writes: bool = True

    @staticmethod
    @abstractmethod
    def boundary(config: ModelConfig, site: Site) -> Boundary:
        """The boundary at `site`."""

    @classmethod
    def boundaries(cls, config: ModelConfig) -> list[Boundary]:
        """All 2L + 1 boundaries, in order. Overridden where several of them use one common part."""
        return [cls.boundary(config, site) for site in sites(config.layers)]

    @staticmethod
    @abstractmethod
    def cost(config: ModelConfig, site: Site) -> "Cost":
        """What that boundary costs, in closed form."""

    @classmethod
    def feed_forward(cls, config: ModelConfig, layer: int) -> nn.Module | None:
        """The stream's own feed-forward core, where its method demands one; None for the shared core."""
        return None

    @classmethod
    def feed_forward_cost(cls, config: ModelConfig) -> tuple[int, int] | None:
        """Parameters, and forward matrix-multiplication FLOPs per token, of one such core; None for the shared core."""
        return None

    @classmethod
    def saved(cls, config: ModelConfig, site: Site) -> int | None:
        """Numbers per token that autograd keeps for this boundary, beyond parameters and what the cores keep already.

        Attention keeps what it was given and what it gave; the feed-forward core what it was given and its neurons.
        What is kept once for all boundaries is counted with the first.
        None: not derived for this stream, and `rmt count` leaves the activations out.
        """
        return None


@dataclass(frozen=True)
class Cost:
    """Parameters, and matrix-multiplication FLOPs of a forward pass per token, of one boundary."""

    write_params: int = 0
    read_params: int = 0
    norm_params: int = 0
    write_flops: int = 0
    read_flops: int = 0
