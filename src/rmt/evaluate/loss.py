"""Mean cross-entropy on the first windows of a split, without gradients."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from rmt.data import TokenDataset, document_ids
from rmt.model import LanguageModel
from rmt.train.distributed import ALONE, World, gathered


class EvalLoss(NamedTuple):
    ce: float
    accuracy: float
    tokens: int


class Stopped(Exception):
    """The evaluation was asked to stop before its end."""


@torch.no_grad()
def split_loss(
    model: LanguageModel,
    dataset: TokenDataset,
    split: str = "dev",
    *,
    tokens: int | None = None,
    batch_size: int = 16,
    document_mask: bool = False,
    world: World = ALONE,
    stop: Callable[[], bool] = lambda: False,
) -> EvalLoss:
    """Loss over about `tokens` tokens (None: all) from the start of a split, in whole windows of the context.

    The windows are the same at every call, so that losses can be compared along a run and between runs. Several
    processes share them and all get the mean over all. Raises `Stopped` in each when `stop()` is true in one.
    """
    context = model.config.context
    windows = dataset.windows(split, context)
    if tokens is not None:
        windows = min(windows, max(1, tokens // context))
    device = next(model.parameters()).device
    own = np.arange(world.rank, windows, world.size)
    sums = torch.zeros(3, dtype=torch.float64)  # cross-entropy, hits, and whether it was stopped
    was_training = model.training
    model.eval()
    with gathered(model):
        for start in range(0, len(own), batch_size):
            if stop():
                sums[2] = 1
                break
            ids = own[start : start + batch_size]
            rows = torch.from_numpy(dataset.window_batch(split, context, ids))
            documents = torch.from_numpy(document_ids(rows[:, :-1].numpy(), dataset.eot)) if document_mask else None
            output = model(
                rows[:, :-1].to(device),
                targets=rows[:, 1:].to(device),
                document_ids=None if documents is None else documents.to(device),
            )
            assert output.ce is not None
            assert output.accuracy is not None
            sums[0] += output.ce.item() * len(ids)
            sums[1] += output.accuracy.item() * len(ids)
    model.train(was_training)
    ce, correct, stopped = world.sum(sums).tolist()
    if stopped:
        raise Stopped
    return EvalLoss(ce / windows, correct / windows, windows * context)
