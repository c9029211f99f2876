"""Initial values, multipliers and learning rates of every parameter, from one description of what it does.

Each parameter is created with a `Role`. The table of the paper's muTransfer setup follows from it: with sigma the
global standard deviation, eta the global learning rate and r(x) = dimension / base dimension,

    kind         initial std                       learning rate        decay
    embedding    sigma                             eta                  no
    linear       sigma / sqrt(fan in) [/ sqrt(2L)] eta / r(fan in)      yes
    unembedding  0 (or as linear)                  eta                  no
    gain         1 everywhere                      eta                  no
    connection   given by the role                 eta                  no

where / sqrt(2L) holds for weights that write to the stream. A connection is a coefficient that mixes parts of the
stream, as in hyper-connections: its initial values are part of the method, so the role itself gives them (`initial`).
A linear weight may give them too, where its method starts it at zero; the rest of its line holds.
The embedding's output is multiplied by alpha_in, the logits by alpha_out / r(model_dim), the attention logits by
alpha_attn * sqrt(base head_dim) / head_dim.
`init: lecun` is the same table with sigma = 1 and every ratio and multiplier 1; `init: xavier` takes
sqrt(2 / (fan in + fan out)) in place of 1 / sqrt(fan in).
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from rmt.config import ModelConfig

Dimension = Literal["heads", "head_dim", "key_dim", "ff_dim", "model_dim"]


@dataclass(frozen=True)
class Role:
    """What a parameter does.

    Args:
        kind: embedding, linear, unembedding, gain or connection (see the table at the top of this file).
        fan_in: numbers that are summed into one output.
        fan_out: outputs that one input reaches.
        scales_with: the dimensions of the configuration that make up fan_in, for muTransfer's ratios.
        writes: the result is added to the residual stream, so its initial std is divided by sqrt(2 * layers).
        query_rows: how many rows, from the first, make queries (muTransfer can start them at zero).
        initial: the initial value where the method prescribes it: one number, or nested tuples of the right shape.
    """

    kind: Literal["embedding", "linear", "unembedding", "gain", "connection"]
    fan_in: int = 1
    fan_out: int = 1
    scales_with: tuple[Dimension, ...] = ()
    writes: bool = False
    query_rows: int = 0
    initial: float | tuple | None = None

    def __post_init__(self) -> None:
        if self.kind == "gain" and self.initial is None:
            object.__setattr__(self, "initial", 1.0)
        assert self.kind != "connection" or self.initial is not None, "a connection's role gives its initial values"

    @property
    def decays(self) -> bool:
        return self.kind == "linear"


class Described(nn.Module):
    """A module whose parameters know their role. Sub-classes create parameters with `describe`."""

    def __init__(self) -> None:
        super().__init__()
        self.roles: dict[str, Role] = {}

    def describe(self, name: str, shape: tuple[int, ...], role: Role) -> nn.Parameter:
        """A new parameter, to be assigned to the attribute `name`; it has LeCun values until the model sets others."""
        self.roles[name] = role
        if role.initial is not None:
            return nn.Parameter(torch.tensor(role.initial).expand(shape).clone())
        return nn.Parameter(torch.randn(shape) / math.sqrt(role.fan_in))


def roles_of(model: nn.Module) -> dict[str, Role]:
    """The role of every parameter of `model`, by its full name; refuses a parameter without one."""
    found = {}
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            roles = getattr(module, "roles", {})
            if name not in roles:
                raise TypeError(f"parameter {full} has no role: create it with Described.describe")
            found[full] = roles[name]
    return found


def ratio(config: ModelConfig, dimension: Dimension) -> float:
    """r(x): a dimension over its base; 1 where no base is given or the parametrisation is not muP."""
    if config.init != "mup":
        return 1.0
    mup = config.mup
    if dimension == "model_dim":
        if config.width is None and mup.base_width is None:
            return ratio(config, "heads") * ratio(config, "head_dim")
        base = mup.base_width
        if base is None and mup.base_heads and mup.base_head_dim:
            base = mup.base_heads * mup.base_head_dim
        return config.model_dim / base if base else 1.0
    base = getattr(mup, f"base_{dimension}")
    return getattr(config, dimension) / base if base else 1.0


def initial_std(config: ModelConfig, role: Role) -> float:
    sigma = config.mup.sigma if config.init == "mup" else 1.0
    if role.kind == "embedding":
        return sigma
    if role.kind == "unembedding" and config.init == "mup":
        return 0.0 if config.mup.zero_unembedding else sigma
    if config.init == "xavier":
        std = math.sqrt(2 / (role.fan_in + role.fan_out))
    else:
        std = sigma / math.sqrt(role.fan_in)
    return std / math.sqrt(2 * config.layers) if role.writes else std


def lr_scale(config: ModelConfig, role: Role) -> float:
    """A parameter's learning rate as a multiple of the global one."""
    if role.kind != "linear":
        return 1.0
    return 1.0 / math.prod(ratio(config, dimension) for dimension in role.scales_with)


def embedding_scale(config: ModelConfig) -> float:
    return config.mup.alpha_in if config.init == "mup" else 1.0


def logit_scale(config: ModelConfig) -> float:
    return config.mup.alpha_out / ratio(config, "model_dim") if config.init == "mup" else 1.0


def attention_scale(config: ModelConfig, layer: int) -> float:
    """What the attention logits of a layer (counted from 0) are multiplied by."""
    scale = config.head_dim**-0.5
    if config.init == "mup":
        scale = config.mup.alpha_attn * math.sqrt(config.mup.base_head_dim or config.head_dim) / config.head_dim
    return scale / (layer + 1) if config.inverse_layer_scaling else scale


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Give every parameter its initial value.

    A parameter's values depend on the seed and its own name only, not on what was created before it: mirrored models
    share the initial values of all that they share, and the order of construction does not matter.
    """
    for name, role in roles_of(model).items():
        parameter = model.get_parameter(name)
        if role.initial is not None:
            parameter.copy_(torch.tensor(role.initial, dtype=torch.float64))
            continue
        parameter.copy_(normal(parameter.shape, initial_std(config, role), f"{seed}/{name}"))
        if role.query_rows and config.init == "mup" and config.mup.zero_query:
            parameter[: role.query_rows].zero_()


def normal(shape: torch.Size, std: float, key: str) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little", signed=True)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std
