"""Composition scores of a transformer: the usual measure of how one head feeds another, for comparison.

In a transformer what head 1 writes reaches head 2 through products of weight matrices. Elhage et al. (2021, "A
Mathematical Framework for Transformer Circuits") measure how much two of them have in common by Frobenius norms:

    query   |W_QK2^T W_OV1| / (|W_QK2| |W_OV1|)     key   |W_QK2 W_OV1| / (...)     value   |W_OV2 W_OV1| / (...)

with W_QK = W_Q^T W_K and W_OV = W_O W_V of one head, D x D, here with the norms' gains multiplied in. A score says how
large a product is, not what passes through it: that is what the matrix stream's table replaces. Random matrices do not
score zero; `random` is what Gaussian matrices of the same shapes score, root mean square.

Axes: D model_dim, V head_dim, H heads.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rmt.errors import InputError
from rmt.model import LanguageModel
from rmt.streams.vector import VectorBoundary

ROLES = ("query", "key", "value")


@dataclass
class Composition:
    """Scores [layers * heads * 3, layers * heads]: rows are a head's query, key and value input, columns heads."""

    reads: list[str]
    writes: list[str]
    scores: Tensor
    random: float

    def top(self, number: int) -> list[tuple[str, str, float]]:
        """The pairs with the largest scores."""
        order = self.scores.flatten().argsort(descending=True)[:number].tolist()
        columns = len(self.writes)
        pairs = [(place // columns, place % columns) for place in order]
        found = [(self.reads[r], self.writes[w], float(self.scores[r, w])) for r, w in pairs]
        return [pair for pair in found if pair[2] > 0]

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "composition.csv"
        with open(path, "w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(("read", "write", "score"))
            for name, row in zip(self.reads, self.scores.tolist(), strict=True):
                table.writerows((name, write, f"{s:.6f}") for write, s in zip(self.writes, row, strict=True) if s > 0)
        return path


@torch.no_grad()
def composition(model: nn.Module) -> Composition:
    """Composition scores between all pairs of heads of a transformer (a model with the vector stream)."""
    network = next((part for part in model.modules() if isinstance(part, LanguageModel)), None)
    if network is None or network.config.stream != "vector":
        stream = "no model of ours" if network is None else f"a model with the stream {network.config.stream!r}"
        raise InputError(f"composition scores are of transformers (stream vector), this is {stream}.")
    config = network.config
    heads = [head for layer in range(config.layers) for head in layer_heads(network, layer)]
    count, H = len(heads), config.heads
    scores = torch.zeros(3 * count, count)
    for later in range(count):
        for earlier in range(later // H * H):  # heads of the same layer do not see each other
            scores[3 * later : 3 * later + 3, earlier] = pair_scores(heads[later], heads[earlier])
    names = [f"layer{place // H}.head{place % H}" for place in range(count)]
    return Composition(
        [f"{name}.{role}" for name in names for role in ROLES], names, scores, random_score(config.model_dim)
    )


@dataclass
class Head:
    """One head's weights: queries, keys and values [V, D], output [D, V]."""

    q_VD: Tensor
    k_VD: Tensor
    v_VD: Tensor
    o_DV: Tensor


def layer_heads(network: LanguageModel, layer: int) -> list[Head]:
    config, V = network.config, network.config.head_dim
    reading, writing = network.stream[2 * layer], network.stream[2 * layer + 1]
    assert isinstance(reading, VectorBoundary)
    assert isinstance(writing, VectorBoundary)
    weight = reading.qkv.double()
    if reading.norm.gain is not None:
        weight = weight * reading.norm.gain.double()
    H, G = config.heads, config.kv_groups
    q, k, v = weight.unflatten(0, (-1, V)).split((H, G, G))
    output = writing.output.double().unflatten(1, (H, V))
    return [Head(q[h], k[h * G // H], v[h * G // H], output[:, h]) for h in range(H)]


def pair_scores(later: Head, earlier: Head) -> Tensor:
    """Query, key and value composition. The D x D products have rank V, so V x V matrices say it all."""
    ov_norm = product_norm(earlier.o_DV, torch.eye(earlier.o_DV.shape[1]).double(), earlier.v_VD)
    qk_norm = product_norm(later.q_VD.T, torch.eye(later.q_VD.shape[0]).double(), later.k_VD)
    own_norm = product_norm(later.o_DV, torch.eye(later.o_DV.shape[1]).double(), later.v_VD)
    through = (
        product_norm(later.k_VD.T, later.q_VD @ earlier.o_DV, earlier.v_VD) / qk_norm,
        product_norm(later.q_VD.T, later.k_VD @ earlier.o_DV, earlier.v_VD) / qk_norm,
        product_norm(later.o_DV, later.v_VD @ earlier.o_DV, earlier.v_VD) / own_norm,
    )
    return torch.nan_to_num(torch.stack(through) / ov_norm).float()


def product_norm(left_DV: Tensor, middle_VV: Tensor, right_VD: Tensor) -> Tensor:
    """The Frobenius norm of left @ middle @ right, without the large product."""
    outer = left_DV.T @ left_DV @ middle_VV @ (right_VD @ right_VD.T)
    return (outer * middle_VV).sum().clamp_min(0).sqrt()


def random_score(D: int) -> float:
    """|A B| / (|A| |B|) of independent Gaussian D x D matrices of any rank: 1 / sqrt(D), root mean square."""
    return D**-0.5
