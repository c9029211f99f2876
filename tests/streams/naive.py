"""The parts that all streams share, transcribed once more from their equations: one sequence, loops, float64.

Nothing here calls the package's own operations, so that a stream's test can write its method as a few lines of loops
and compare the result with the model. Covers layernorm, learned positions, gelu and plain heads.
"""

import math

import torch
from torch import Tensor

import rmt
from rmt.model import LanguageModel

IDS = [3, 14, 15, 9, 26, 5]


def config(stream: str, **changes) -> rmt.ModelConfig:
    sizes = dict(layers=4, heads=2, head_dim=6, key_dim=5, ff_dim=20, vocab_size=31, context=8)
    return rmt.ModelConfig(stream=stream, **{**sizes, **changes})


def model(stream: str, *, noise: float = 0.3, **changes) -> LanguageModel:
    """A model in float64 whose parameters are all away from the initial values that would hide a mistake."""
    built = rmt.build(config(stream, **changes), dtype=torch.float64)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return built


def logits_of(built: LanguageModel) -> Tensor:
    with torch.no_grad():
        return built(torch.tensor([IDS])).logits[0]


class Parts:
    """The weights of a model, and its embedding, cores, norm and logits as plain functions of [T, D] tensors."""

    def __init__(self, built: LanguageModel) -> None:
        self.config = built.config
        self.weights = {name: parameter.detach() for name, parameter in built.named_parameters()}

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name]

    def embed(self) -> Tensor:
        rows = [self["embedding.token_WD"][i] + self["embedding.position_ND"][t] for t, i in enumerate(IDS)]
        return torch.stack(rows)

    def norm(self, x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt() * self[name]

    def rms(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt()

    def attention(self, layer: int, x: Tensor) -> Tensor:
        """W_O of all heads, from the residual vectors that the layer reads."""
        return self.heads(layer, *self.qkv(layer, x)) @ self[f"stream.{2 * layer + 1}.output"].T

    def qkv(self, layer: int, x: Tensor) -> tuple[Tensor, ...]:
        n = self.norm(x, f"stream.{2 * layer}.norm.gain")
        return (n @ self[f"stream.{2 * layer}.qkv"].T).chunk(3, dim=-1)

    def heads(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        V, out = self.config.head_dim, torch.zeros_like(q)
        for head in range(self.config.heads):
            part = slice(head * V, (head + 1) * V)
            for t in range(len(q)):
                scores = k[: t + 1, part] @ q[t, part] / math.sqrt(V) / (layer + 1)
                weights = torch.exp(scores) / torch.exp(scores).sum()
                out[t, part] = weights @ v[: t + 1, part]
        return out

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        n = self.norm(x, f"stream.{2 * layer + 1}.norm.gain")
        return gelu(n @ self[f"feed_forward.{layer}.into_FD"].T) @ self[f"feed_forward.{layer}.out_DF"].T

    def core(self, index: int, x: Tensor) -> Tensor:
        """Core `index` of 2L, with its norm and, for attention, its projections."""
        return self.feed_forward(index // 2, x) if index % 2 else self.attention(index // 2, x)

    def logits(self, x: Tensor) -> Tensor:
        return self.norm(x, f"stream.{2 * self.config.layers}.norm.gain") @ self["unembedding.weight_WD"].T


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def assert_equal(actual: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
