"""Forward and backward of the layers alone, on given embeddings: no embedding, no logits, no loss, no update.

Axes: B batch, T tokens, D model_dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rmt.bench.cases import Case
from rmt.bench.stock import StockTransformer
from rmt.model import LanguageModel, build
from rmt.streams.base import Embedded

Function = Callable[[], object]


def functions(case: Case) -> dict[str, Function]:
    """One forward and backward pass for each row. The rows of the RMT share one model."""
    config = case.config.replace(vocab_size=8)
    shape = (case.batch, config.context, config.model_dim)
    token_BTD, position_BTD, grad_BTD = (torch.randn(shape) for _ in range(3))
    token_BTD.requires_grad_()

    def trains(model: nn.Module, forward: Function) -> Function:
        def run() -> None:
            model.zero_grad(set_to_none=True)
            token_BTD.grad = None
            y_BTD = forward()
            assert isinstance(y_BTD, Tensor)
            y_BTD.backward(grad_BTD)

        return run

    made: dict[str, Function] = {}
    if "stock" in case.rows:
        stock = StockTransformer(config).stack
        made["stock"] = trains(stock, lambda: stock(token_BTD))
    if "vector" in case.rows:
        vector = build(config.replace(stream="vector"))
        made["vector"] = trains(vector, lambda: run_stack(vector, token_BTD, position_BTD))
    matrix = build(config)

    def with_ops(ops: str) -> Function:
        def run() -> Tensor:
            matrix.set_ops(ops)
            return run_stack(matrix, token_BTD, position_BTD)

        return run

    return made | {row: trains(matrix, with_ops(row)) for row in case.matrix_rows}


def run_stack(model: LanguageModel, token_BTD: Tensor, position_BTD: Tensor) -> Tensor:
    """The layers of `model` on given embeddings, with their last norm and read."""
    T = token_BTD.shape[1]
    ids_BT = torch.zeros(token_BTD.shape[:2], dtype=torch.long)
    embedded = Embedded(token_BTD, position_BTD)
    context = model._context(embedded, ids_BT, None, None, torch.arange(T)[None])
    state, x = model.stream[0](None, embedded)
    for layer in range(model.config.layers):
        state, x = model._layer(layer, state, x, context, None, None)
    return x
