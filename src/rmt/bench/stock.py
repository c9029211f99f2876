"""A transformer as a user would write it: torch modules, scaled_dot_product_attention, cross_entropy, fused AdamW.

Pre-norm GPT-2 without biases, as in nanoGPT, with an unembedding of its own, so that it has exactly the parameters of
our vector stream. `imitate` gives it the vector stream's weights: with them both compute the same function.

Axes: B batch, T tokens, D width, W vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmt.config import ModelConfig
from rmt.model import LanguageModel

CLIP = 1.0


class StockLayer(nn.Module):
    def __init__(self, width: int, heads: int, neurons: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, eps, bias=False), nn.LayerNorm(width, eps, bias=False)
        self.qkv, self.output = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.into, self.out = nn.Linear(width, neurons, bias=False), nn.Linear(neurons, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x_BTD)).chunk(3, -1)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x_BTD = x_BTD + self.output(heads)
        return x_BTD + self.out(F.gelu(self.into(self.norm_2(x_BTD)), approximate="tanh"))


class StockTransformer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.heads * config.head_dim
        self.token = nn.Embedding(config.vocab_size, width)
        self.position = nn.Embedding(config.context, width)
        layers = [StockLayer(width, config.heads, config.ff_dim, config.norm_eps) for _ in range(config.layers)]
        self.stack = nn.Sequential(*layers, nn.LayerNorm(width, config.norm_eps, bias=False))
        self.head = nn.Linear(width, config.vocab_size, bias=False)

    def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The loss."""
        x_BTD = self.token(ids_BT) + self.position(torch.arange(ids_BT.shape[1]))
        logits_BTW = self.head(self.stack(x_BTD))
        return F.cross_entropy(logits_BTW.flatten(0, 1), targets_BT.flatten())


class StockStepper:
    """A training step: forward, backward, clipping, update."""

    def __init__(self, config: ModelConfig) -> None:
        self.model = StockTransformer(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, ids_BT: Tensor, targets_BT: Tensor) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(ids_BT, targets_BT)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return loss.item()


@torch.no_grad()
def imitate(stock: StockTransformer, model: LanguageModel) -> None:
    """Copy the weights of a vector stream (without layer scaling, with embeddings of scale 1)."""
    stock.token.weight.copy_(model.embedding.token_WD)
    stock.position.weight.copy_(model.embedding.position_ND)  # type: ignore[arg-type]
    stock.head.weight.copy_(model.unembedding.weight_WD)
    theirs = dict(model.named_parameters())
    *layers, last = stock.stack
    for index, layer in enumerate(layers):
        assert isinstance(layer, StockLayer)
        before, between = f"stream.{2 * index}", f"stream.{2 * index + 1}"
        layer.norm_1.weight.copy_(theirs[f"{before}.norm.gain"])
        layer.qkv.weight.copy_(theirs[f"{before}.qkv"])
        layer.output.weight.copy_(theirs[f"{between}.output"])
        layer.norm_2.weight.copy_(theirs[f"{between}.norm.gain"])
        layer.into.weight.copy_(theirs[f"feed_forward.{index}.into_FD"])
        layer.out.weight.copy_(theirs[f"feed_forward.{index}.out_DF"])
    assert isinstance(last, nn.LayerNorm)
    last.weight.copy_(theirs[f"stream.{2 * len(layers)}.norm.gain"])
