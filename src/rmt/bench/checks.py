"""Do all rows compute the same? Asked on a small input before anything is timed; a red check ends the benchmark.

Every version of the operations is held against the plain definition in float64, loss and all gradients; the stock
transformer against our vector stream with the same weights; decoding with a cache against a pass without one.
"""

import torch
from torch import Tensor

from rmt.bench.cases import Case
from rmt.bench.stock import StockTransformer, imitate
from rmt.config import ModelConfig, Ops
from rmt.errors import RunFailed
from rmt.model import LanguageModel, build

TOLERANCE = 1e-4  # of loss and gradients, relative, in float32
TOKENS = 37  # not a multiple of any block


def check(case: Case) -> dict[str, float]:
    """The largest relative difference of each row. Raises where one is too large."""
    small = case.config.replace(layers=2, vocab_size=101, context=TOKENS)
    found: dict[str, float] = {}
    for row in case.matrix_rows:
        found[row] = difference(small, row)
    if "vector" in case.rows:
        found["vector"] = difference(small.replace(stream="vector"), "auto")
    if "stock" in case.rows:
        found["stock"] = stock_difference(small.replace(stream="vector", inverse_layer_scaling=False, z_loss=0.0))
    found["decode"] = max(decode_difference(config) for config in (small, small.replace(stream="vector")))
    for name, size in found.items():
        if not size < TOLERANCE:
            raise RunFailed(
                f"bench: {name} differs from its definition by {size:.1e} (relative; {TOLERANCE:g} is allowed): "
                "nothing was timed, because a speed-up with wrong numbers is none."
            )
    return found


def example(config: ModelConfig) -> tuple[Tensor, Tensor]:
    ids_BT = torch.randint(0, config.vocab_size, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return ids_BT[:, :-1], ids_BT[:, 1:]


def gradients(model: LanguageModel, ids_BT: Tensor, targets_BT: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(ids_BT, targets=targets_BT).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def difference(config: ModelConfig, ops: Ops) -> float:
    """Of loss and gradients from those of the definition in float64: the largest, relative to each one's norm."""
    model, truth = build(config), build(config, dtype=torch.float64)
    truth.load_state_dict(model.state_dict())
    model.set_ops(ops)
    truth.set_ops("plain")
    ours, theirs = (gradients(each, *example(config)) for each in (model, truth))
    return max(relative(ours[name], theirs[name]) for name in theirs)


def stock_difference(config: ModelConfig) -> float:
    model, stock = build(config), StockTransformer(config)
    imitate(stock, model)
    ids_BT, targets_BT = example(config)
    with torch.no_grad():
        return relative(stock(ids_BT, targets_BT), model(ids_BT, targets=targets_BT).ce)


def decode_difference(config: ModelConfig) -> float:
    """Logits, token by token with a cache, from those of one pass."""
    model = build(config)
    ids_BT, _ = example(config)
    cache = model.new_cache(len(ids_BT))
    with torch.no_grad():
        each = [model(ids_BT[:, t : t + 1], cache=cache).logits for t in range(TOKENS)]
        return relative(torch.cat(each, dim=1), model(ids_BT).logits)


def relative(ours: Tensor, theirs: Tensor) -> float:
    theirs = theirs.double()
    return ((ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-12)).item()
