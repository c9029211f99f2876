"""Mean cross-entropy on the first windows of a split, without gradients."""

from typing import NamedTuple

import numpy as np
import torch

from rmt.data import TokenDataset, document_ids
from rmt.model import LanguageModel


class EvalLoss(NamedTuple):
    ce: float
    accuracy: float
    tokens: int


@torch.no_grad()
def split_loss(
    model: LanguageModel,
    dataset: TokenDataset,
    split: str = "dev",
    *,
    tokens: int | None = None,
    batch_size: int = 16,
    document_mask: bool = False,
) -> EvalLoss:
    """Loss over about `tokens` tokens (None: all) from the start of a split, in whole windows of the context.

    The windows are the same at every call, so that losses can be compared along a run and between runs.
    """
    context = model.config.context
    windows = dataset.windows(split, context)
    if tokens is not None:
        windows = min(windows, max(1, tokens // context))
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    ce = correct = 0.0
    for start in range(0, windows, batch_size):
        ids = np.arange(start, min(start + batch_size, windows))
        rows = torch.from_numpy(dataset.window_batch(split, context, ids))
        documents = torch.from_numpy(document_ids(rows[:, :-1].numpy(), dataset.eot)) if document_mask else None
        output = model(
            rows[:, :-1].to(device),
            targets=rows[:, 1:].to(device),
            document_ids=None if documents is None else documents.to(device),
        )
        assert output.ce is not None
        assert output.accuracy is not None
        ce += output.ce.item() * len(ids)
        correct += output.accuracy.item() * len(ids)
    model.train(was_training)
    return EvalLoss(ce / windows, correct / windows, windows * context)
