"""Put a matrix residual stream around your own layers, with rmt.Store, rmt.Retrieve and rmt.MatrixNorm.

`OnMatrixStream` below is all of it. It takes any module that maps vectors of `heads * head_dim` features to vectors of
the same size, for instance torch's attention or your own MLP, and lets it read from and write to a memory of
`key_dim x head_dim` numbers per token. No matrix is added, so a larger key_dim costs next to nothing.

    python examples/matrix_stream_in_your_model.py

trains such a model for a moment on a toy task: say which token came two places before.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rmt


class OnMatrixStream(nn.Module):
    """Read from the memory, apply a module of yours, write what it gives."""

    def __init__(self, core: nn.Module, heads: int, head_dim: int, key_dim: int) -> None:
        super().__init__()
        self.core, self.shape = core, (heads, head_dim)
        self.norm = rmt.MatrixNorm(key_dim, head_dim)
        self.retrieve = rmt.Retrieve(key_dim, heads)
        self.store = rmt.Store(heads, key_dim)

    def forward(self, memory: Tensor) -> Tensor:
        x = self.retrieve(self.norm(memory)).flatten(-2)  # [batch, tokens, heads * head_dim]
        return self.store(memory, self.core(x).unflatten(-1, self.shape))


class YourAttention(nn.Module):
    """torch's own attention, made causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


class YourModel(nn.Module):
    def __init__(self, vocabulary: int, context: int, heads: int = 4, head_dim: int = 8, key_dim: int = 16) -> None:
        super().__init__()
        width, self.shape = heads * head_dim, (heads, head_dim)
        mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.begin = rmt.Store(heads, key_dim)
        self.layers = nn.Sequential(
            OnMatrixStream(YourAttention(width, heads), heads, head_dim, key_dim),
            OnMatrixStream(mlp, heads, head_dim, key_dim),
        )
        self.end = nn.Sequential(rmt.MatrixNorm(key_dim, head_dim), rmt.Retrieve(key_dim, heads))
        self.logits = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.token(ids) + self.position.weight[: ids.shape[1]]
        memory = self.begin(None, embedded.unflatten(-1, self.shape))  # [batch, tokens, key_dim, head_dim]
        return self.logits(self.end(self.layers(memory)).flatten(-2))


def train(steps: int = 60, vocabulary: int = 12, context: int = 16, seed: int = 0) -> list[float]:
    """Train on random sequences; the target of each token is the token two places before it."""
    torch.manual_seed(seed)
    model = YourModel(vocabulary, context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        ids = torch.randint(0, vocabulary, (64, context))
        loss = F.cross_entropy(model(ids)[:, 2:].flatten(0, 1), ids[:, :-2].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:>2}  loss {loss.item():.3f}")
    return losses


if __name__ == "__main__":
    train()
