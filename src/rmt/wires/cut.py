"""Cutting edges: take away what a read receives of a write, exactly, and see what that does to the model.

A cut changes one boundary's read and nothing else there: read' = read - contribution, the contribution being that of
`rmt.wires.trace` with the vectors, the mean and the deviation of the stream as it is in this very pass. The stream
keeps the write, so all other reads still see it; what comes later follows from the changed read. (Making the read key
orthogonal to the write key would be another edit: it also changes what the read receives of all other writes.)

`rank_edges` asks which edges matter. Cutting each one is too much, so an estimate orders them and the first are cut
exactly. With p_t = the gradient of the summed loss at the read of token t, times the edge's contribution there, cutting
the edge changes the mean loss by about

    estimate = mean over t of (-p_t + p_t^2 / 2)

The first term is exact for a small cut; training makes it vanish on average, so the second matters: it is the loss's
curvature by the usual approximation (the empirical Fisher, tokens taken as independent).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmt.data import TokenDataset
from rmt.evaluate.loss import split_loss
from rmt.model import LanguageModel
from rmt.streams.matrix import MatrixBoundary
from rmt.wires.slots import Edges, Level, grouped
from rmt.wires.table import Wiring, find_network, wiring
from rmt.wires.trace import Passage, Watch, inverse_deviation

ESTIMATE_WINDOWS = 4  # sequences at a time when gradients are kept


def cut(model: nn.Module, *edges: str | Edges) -> AbstractContextManager:
    """Inside `with cut(model, "layer3.head2.query <- layer1.head0"):` the model runs without these edges.

    Args:
        model: from `rmt.build` or `rmt.load_model(...).model`.
        edges: "READ <- WRITE", by names of single slots or of groups (see `rmt.wires.slots`).
    """
    table = wiring(model)
    found = [table.edges(edge) if isinstance(edge, str) else edge for edge in edges]
    return cut_mask(model, table, np.any([edge.mask_RW for edge in found], axis=0))


def cut_mask(model: nn.Module, table: Wiring, mask_RW: np.ndarray) -> AbstractContextManager:
    """Run the model without the edges [R, W] that are true."""
    device = table.write_KW.device
    masks: dict[int, Tensor] = {}
    for site, (rows, columns) in enumerate(zip(table.read_rows, table.write_columns, strict=True)):
        if mask_RW[rows, : columns.stop].any():
            masks[site] = torch.from_numpy(mask_RW[rows, : columns.stop]).to(device, table.write_KW.dtype)
    written: list[Tensor] = []

    def remove(boundary: MatrixBoundary, written_BTNV: Tensor, X_BTKV: Tensor, read_BTPV: Tensor) -> Tensor | None:
        site = boundary.site.index
        if site == 0:
            written.clear()
        written.append(written_BTNV.to(X_BTKV.dtype))
        if site not in masks:
            return None
        scale_BT = inverse_deviation(X_BTKV, boundary.norm.kind, boundary.norm.eps)
        gone_BTPV = Passage(table, site, torch.cat(written, dim=-2), scale_BT).chosen(masks[site])
        return (read_BTPV - gone_BTPV).to(read_BTPV.dtype)

    return Watch(model, remove, until=max(masks, default=-1))


@dataclass
class Effect:
    """What cutting some edges does to the loss (nats per token): as estimated, and exactly."""

    edges: str
    number: int
    estimate: float | None
    change: float


@dataclass
class Ranking:
    """Edges by what they are worth: the loss without any cut, what was measured on, and the effects, largest first."""

    loss: float
    tokens: int
    level: Level
    candidates: int
    agreement: float
    effects: list[Effect]


def cut_effects(
    model: LanguageModel, edges: Sequence[str], dataset: TokenDataset, *, tokens: int, split: str = "dev"
) -> tuple[float, int, list[Effect]]:
    """The loss as it is, the tokens it was measured on, and what cutting each of some edges, then all, changes."""
    table = wiring(model)
    found = [table.edges(text) for text in edges]
    before = split_loss(model, dataset, split, tokens=tokens)
    effects = []
    if len(found) > 1:
        found.append(Edges("all of these", np.any([edge.mask_RW for edge in found], axis=0)))
    for name, mask_RW in found:
        with cut_mask(model, table, mask_RW):
            after = split_loss(model, dataset, split, tokens=tokens)
        effects.append(Effect(name, int(mask_RW.sum()), None, after.ce - before.ce))
    return before.ce, before.tokens, effects


def rank_edges(
    model: nn.Module,
    dataset: TokenDataset,
    *,
    tokens: int = 8192,
    top: int = 20,
    level: Level = "heads",
    split: str = "dev",
) -> Ranking:
    """Which edges matter: their effects on the loss, estimated for all and exact for the `top` largest estimates.

    Args:
        model: a matrix model.
        dataset: what to measure the loss on.
        tokens: about how many tokens, from the start of the split.
        top: how many edges to cut exactly, those with the largest estimates.
        level: slots (single reads and writes), heads (of attention; feed-forward cores whole) or cores.
        split: of the dataset.
    """
    network = find_network(model)
    table = wiring(network)
    estimate = np.sum(estimates(network, table, dataset, level=level, tokens=tokens, split=split), axis=0)
    before = split_loss(network, dataset, split, tokens=tokens)
    reads, read_place = grouped(table.reads, level)
    writes, write_place = grouped(table.writes, level)
    exists = table.blocks(level).causal
    order = np.argsort(-np.abs(np.where(exists, estimate, 0.0)), axis=None)[: min(top, int(exists.sum()))]
    effects = []
    for read, write in zip(*np.unravel_index(order, exists.shape), strict=True):
        mask_RW = np.outer(read_place == read, write_place == write) & table.causal
        with cut_mask(network, table, mask_RW):
            after = split_loss(network, dataset, split, tokens=tokens)
        name = f"{reads[read]} <- {writes[write]}"
        effects.append(Effect(name, int(mask_RW.sum()), float(estimate[read, write]), after.ce - before.ce))
    agreement = rank_agreement([(effect.estimate or 0.0, effect.change) for effect in effects])
    effects.sort(key=lambda effect: -abs(effect.change))
    return Ranking(before.ce, before.tokens, level, int(exists.sum()), agreement, effects)


def estimates(
    network: LanguageModel, table: Wiring, dataset: TokenDataset, *, level: Level, tokens: int, split: str = "dev"
) -> np.ndarray:
    """[2, reads, writes] at a level: the first and the second term of the estimate of every edge."""
    context = network.config.context
    windows = min(dataset.windows(split, context), max(1, tokens // context))
    device = table.write_KW.device
    total = np.zeros(())
    with plain_ops(network):
        for start in range(0, windows, ESTIMATE_WINDOWS):
            ids = np.arange(start, min(start + ESTIMATE_WINDOWS, windows))
            rows = torch.from_numpy(dataset.window_batch(split, context, ids)).to(device)
            total = total + batch_estimates(network, table, rows[:, :-1], rows[:, 1:], level)
    return total / (windows * context)


def batch_estimates(
    network: LanguageModel, table: Wiring, ids_BT: Tensor, targets_BT: Tensor, level: Level
) -> np.ndarray:
    """[2, reads, writes]: both terms, summed over the tokens of a batch."""
    written: list[Tensor] = []
    scale: list[Tensor] = []
    probes: list[Tensor] = []

    def probe(boundary: MatrixBoundary, written_BTNV: Tensor, X_BTKV: Tensor, read_BTPV: Tensor) -> Tensor:
        written.append(written_BTNV.detach().to(X_BTKV.dtype))
        scale.append(inverse_deviation(X_BTKV.detach(), boundary.norm.kind, boundary.norm.eps))
        probes.append(torch.zeros_like(read_BTPV, requires_grad=True))
        return read_BTPV + probes[-1]

    with torch.enable_grad(), Watch(network, probe):
        logits_BTW = network(ids_BT).logits
        loss = F.cross_entropy(logits_BTW.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum")
    slopes = torch.autograd.grad(loss, probes)
    reads, read_place = grouped(table.reads, level)
    writes, write_place = grouped(table.writes, level)
    column_W = torch.from_numpy(write_place).to(ids_BT.device)
    result = np.zeros((2, len(reads), len(writes)))
    for site, rows in enumerate(table.read_rows):
        data_BTNV = torch.cat(written[: site + 1], dim=-2)
        for read in np.unique(read_place[rows]):
            own_P = torch.from_numpy(np.flatnonzero(read_place[rows] == read)).to(ids_BT.device)
            passage = Passage(table, site, data_BTNV, scale[site], own_P)
            p_BTN = passage.project(slopes[site][:, :, own_P].to(data_BTNV.dtype))
            p_BTG = torch.zeros(*ids_BT.shape, len(writes), device=ids_BT.device, dtype=p_BTN.dtype)
            p_BTG.index_add_(-1, column_W[: p_BTN.shape[-1]], p_BTN)
            result[0, read] = -p_BTG.sum((0, 1)).cpu().numpy()
            result[1, read] = p_BTG.square().sum((0, 1)).cpu().numpy() / 2
    return result


@contextmanager
def plain_ops(network: LanguageModel) -> Iterator[None]:
    """The definitions of the operations: the fused ones keep no stream that a gradient could pass through twice."""
    before = network.ops
    network.set_ops("plain")
    try:
        yield
    finally:
        network.set_ops(before)


def rank_agreement(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's correlation between estimates and exact changes; NaN for fewer than three."""
    if len(pairs) < 3:
        return float("nan")
    ranks = np.argsort(np.argsort(np.array(pairs), axis=0), axis=0)
    return float(np.corrcoef(ranks[:, 0], ranks[:, 1])[0, 1])
