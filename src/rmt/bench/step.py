"""A whole training step: embedding, layers, loss over the full vocabulary, clipping, fused AdamW, by the trainer's own
`Stepper`; for the stock transformer the same in torch modules. And the same for wider memories.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rmt.bench.cases import Case
from rmt.bench.stock import StockStepper
from rmt.config import ModelConfig, Recompute, TrainConfig
from rmt.model import build
from rmt.train.step import Stepper

Function = Callable[[], object]
TRAIN = TrainConfig(steps=1000, batch_size=1, lr=1e-4)
MIDDLE = 500  # a step after the warm-up, so that weights change as they do in training
ONE_SEQUENCE = "one sequence"
KEPT_STOCK = "stock, memory kept"  # with our trainer's memory management (`rmt.train.heap`)
WIDER = (1, 2, 4)  # times key_dim


def functions(case: Case) -> dict[str, Function]:
    """One step for each row, the stock one with either memory management, and the fastest RMT on a single sequence."""
    ids_BT, targets_BT = batch_of(case.config, case.batch)
    made: dict[str, Function] = {}
    if "stock" in case.rows:
        stock = StockStepper(case.config)
        made["stock"] = made[KEPT_STOCK] = lambda: stock.step(ids_BT, targets_BT)
    if "vector" in case.rows:
        vector = new_stepper(case.vector)
        made["vector"] = lambda: vector.step(MIDDLE, ids_BT, targets_BT)
    matrix = new_stepper(case.config)

    def steps(ops: str, ids_BT: Tensor, targets_BT: Tensor) -> Function:
        def run() -> None:
            matrix.model.set_ops(ops)
            matrix.step(MIDDLE, ids_BT, targets_BT)

        return run

    made |= {row: steps(row, ids_BT, targets_BT) for row in case.matrix_rows}
    if case.batch > 1:
        made[ONE_SEQUENCE] = steps(case.best, ids_BT[:1], targets_BT[:1])
    return made


def wider_functions(case: Case) -> dict[str, Function]:
    """One step of the fastest RMT for each key_dim."""
    ids_BT, targets_BT = batch_of(case.config, case.batch)

    def steps(key_dim: int) -> Function:
        stepper = new_stepper(case.config.replace(key_dim=key_dim), case.best)
        return lambda: stepper.step(MIDDLE, ids_BT, targets_BT)

    return {str(times * case.config.key_dim): steps(times * case.config.key_dim) for times in WIDER}


def new_stepper(config: ModelConfig, ops: str = "auto", recompute: Recompute = "none") -> Stepper:
    train = TRAIN.replace(ops=ops, recompute=recompute)
    return Stepper(build(config), train, TRAIN.total_steps(config.context))


def batch_of(config: ModelConfig, batch: int) -> tuple[Tensor, Tensor]:
    ids_BT = torch.randint(0, config.vocab_size, (batch, config.context + 1))
    return ids_BT[:, :-1].contiguous(), ids_BT[:, 1:].contiguous()
