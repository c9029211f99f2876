"""The last linear layer with cross-entropy and z-loss, forward and backward: as torch writes it, and ours.

Axes: N tokens, D features, W vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from rmt.bench.cases import Case
from rmt.config import Ops
from rmt.ops.cross_entropy import linear_cross_entropy

Function = Callable[[], object]


def functions(case: Case) -> dict[str, Function]:
    """`stock` is F.linear and F.cross_entropy, which has no z-loss; `plain` holds all logits, the others one chunk."""
    D, W = case.config.model_dim, case.config.vocab_size
    hidden_ND = torch.randn(case.tokens, D, requires_grad=True)
    weight_WD = torch.nn.Parameter(torch.randn(W, D) / D**0.5)
    targets_N = torch.randint(0, W, (case.tokens,))

    def stock() -> None:
        hidden_ND.grad = weight_WD.grad = None
        F.cross_entropy(F.linear(hidden_ND, weight_WD), targets_N).backward()

    def with_ops(ops: Ops) -> Function:
        def run() -> None:
            hidden_ND.grad = weight_WD.grad = None
            linear_cross_entropy(hidden_ND, weight_WD, targets_N, case.config.z_loss, ops=ops).total.backward()

        return run

    made: dict[str, Function] = {"stock": stock} if "stock" in case.rows else {}
    return made | {row: with_ops(row) for row in case.matrix_rows}
