"""Forward and backward of the layers alone: a stock transformer of torch modules, our vector stream, our matrix stream.

    python -m benchmarks.stack --shape small --layers 3 --rounds 8 [--threads 1 --cpu] [--key-dim 64]

The stock transformer is what a user would write: nn.LayerNorm, nn.Linear, GELU, scaled_dot_product_attention. All
stacks have the same heads, head dimension and neurons, and end with their last norm and read; no embedding, no loss.
"""

import argparse

import torch
import torch.nn.functional as F
from benchmarks.harness import interleave, table
from torch import Tensor, nn

from rmt.config import ModelConfig
from rmt.model import LanguageModel, build
from rmt.streams.base import Embedded

SHAPES = {
    "S": (dict(layers=6, key_dim=32, head_dim=32, heads=12, ff_dim=1536), 4),
    "small": (dict(layers=12, key_dim=32, head_dim=64, heads=12, ff_dim=3072), 2),
    "medium": (dict(layers=24, key_dim=64, head_dim=64, heads=16, ff_dim=4096), 1),
}


class StockLayer(nn.Module):
    def __init__(self, width: int, heads: int, neurons: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.output = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.into, self.out = nn.Linear(width, neurons, bias=False), nn.Linear(neurons, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x_BTD)).chunk(3, -1)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x_BTD = x_BTD + self.output(heads)
        return x_BTD + self.out(F.gelu(self.into(self.norm_2(x_BTD)), approximate="tanh"))


class StockStack(nn.Sequential):
    def __init__(self, config: ModelConfig) -> None:
        width = config.heads * config.head_dim
        layers = [StockLayer(width, config.heads, config.ff_dim) for _ in range(config.layers)]
        super().__init__(*layers, nn.LayerNorm(width, bias=False))


def run_stack(model: LanguageModel, token_BTD: Tensor, position_BTD: Tensor | None) -> Tensor:
    """The layers of `model` on given embeddings."""
    T = token_BTD.shape[1]
    ids_BT = torch.zeros(token_BTD.shape[:2], dtype=torch.long)
    embedded = Embedded(token_BTD, position_BTD)
    context = model._context(embedded, ids_BT, None, None, torch.arange(T)[None])
    state, x = model.stream[0](None, embedded)
    for layer in range(model.config.layers):
        state, x = model._layer(layer, state, x, context, None, None)
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--key-dim", type=int)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu", action="store_true", help="CPU time instead of wall time (with --threads 1)")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--rows", default="stock,vector,plain,portable,native")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dims, batch = SHAPES[args.shape]
    dims = {
        **dims,
        **({"layers": args.layers} if args.layers else {}),
        **({"key_dim": args.key_dim} if args.key_dim else {}),
    }
    batch = args.batch or batch
    config = ModelConfig(**dims, vocab_size=8, context=args.tokens)
    D = config.model_dim
    token_BTD, position_BTD, grad = (torch.randn(batch, args.tokens, D) for _ in range(3))
    token_BTD.requires_grad_()

    def trains(model: nn.Module, forward):
        def step() -> None:
            model.zero_grad(set_to_none=True)
            token_BTD.grad = None
            forward().backward(grad)

        return step

    functions = {}
    for row in args.rows.split(","):
        if row == "stock":
            stock = StockStack(config)
            functions[row] = trains(stock, lambda stock=stock: stock(token_BTD))
            continue
        model = build(config.replace(stream="vector") if row.startswith("vector") else config)
        ops = {"vector": "auto", "vector-portable": "portable"}.get(row, row)
        model.set_ops(ops)
        model.recompute = args.recompute
        functions[row] = trains(model, lambda model=model: run_stack(model, token_BTD, position_BTD))
    samples = interleave(functions, args.rounds, args.cpu)
    clock = "CPU" if args.cpu else "wall"
    print(f"{args.shape}: {dims} batch {batch} x {args.tokens}, {args.threads} threads, {clock} time")
    print(table(samples, [name for name in ("stock", "vector") if name in functions]))


if __name__ == "__main__":
    main()
