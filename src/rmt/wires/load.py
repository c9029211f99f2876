"""How full a matrix stream is: how many vectors share its key dimensions, and how much they disturb each other.

K key dimensions hold at most K vectors without any overlap. A model writes more, so their keys overlap, and each read
receives a little of what it did not ask for. `load` looks at the keys alone, `crosstalk` at the vectors of a text; both
stand beside what random keys would give, and interference also beside the least that is possible (Welch's bound).

Axes: N writes so far, P reads, K key_dim; B batch, T tokens, W writes, V head_dim.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rmt.wires.table import Wiring
from rmt.wires.trace import Trace

DRAWS = 16  # of random keys, for the baselines that have no formula


@dataclass
class Load:
    """The stream as the reads of one core find it.

    Args:
        core: that reads.
        writes: vectors written before.
        writes_per_key_dim: the same by K; above 1 they cannot all be apart.
        effective_rank: directions that the write keys fill: exp of the entropy of their Gram matrix's eigenvalues.
        effective_rank_random: the same for random keys, mean over draws.
        interference: mean squared cosine between different write keys.
        interference_random: the same for random keys, 1 / K.
        interference_least: the least that N keys can have in K dimensions (Welch's bound).
        sources: how many writes a read sees, counting by squared normalised numbers: (sum c^2)^2 / sum c^4.
        sources_random: the same for random read and write keys.
    """

    core: str
    writes: int
    writes_per_key_dim: float
    effective_rank: float
    effective_rank_random: float
    interference: float
    interference_random: float
    interference_least: float
    sources: float
    sources_random: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def load(table: Wiring) -> list[Load]:
    """The load that each core meets, in the order of depth."""
    K = table.config.key_dim
    generator = torch.Generator().manual_seed(0)
    result = []
    for rows, columns in zip(table.read_rows, table.write_columns, strict=True):
        N = columns.stop
        keys_KN = unit(table.write_KW[:, :N].cpu().double())
        random_DKN = unit(torch.randn(DRAWS, K, N, generator=generator, dtype=torch.float64))
        read_DK = unit(torch.randn(DRAWS, K, 1, generator=generator, dtype=torch.float64))
        seen_PN = torch.from_numpy(table.normalised[rows, :N]).double()
        result.append(
            Load(
                core=table.reads[rows.start].core,
                writes=N,
                writes_per_key_dim=N / K,
                effective_rank=float(effective_rank(keys_KN)),
                effective_rank_random=float(effective_rank(random_DKN).mean()),
                interference=float(interference(keys_KN)),
                interference_random=1 / K,
                interference_least=max(0.0, (N - K) / (K * (N - 1))) if N > 1 else 0.0,
                sources=float(effective_number(seen_PN).mean()),
                sources_random=float(effective_number((random_DKN.mT @ read_DK)[..., 0]).mean()),
            )
        )
    return result


def unit(keys_KN: Tensor) -> Tensor:
    return keys_KN / keys_KN.norm(dim=-2, keepdim=True).clamp_min(1e-30)


def effective_rank(keys_KN: Tensor) -> Tensor:
    """exp of the entropy of the squared singular values, as shares of their sum."""
    energy = torch.linalg.eigvalsh(keys_KN @ keys_KN.mT).clamp_min(0)
    share = energy / energy.sum(-1, keepdim=True)
    return torch.exp(torch.special.entr(share).sum(-1))


def interference(keys_KN: Tensor) -> Tensor:
    """Mean squared cosine between different columns of unit length."""
    N = keys_KN.shape[-1]
    # The K x K product has the same squared norm as the N x N matrix of all cosines.
    squares = (keys_KN @ keys_KN.mT).square().sum((-2, -1)) - keys_KN.square().sum(-2).square().sum(-1)
    return squares / max(1, N * (N - 1))


def effective_number(c: Tensor) -> Tensor:
    """How many entries of the last axis matter, between 1 and all."""
    return c.square().sum(-1).square() / c.pow(4).sum(-1).clamp_min(1e-30)


@dataclass
class Crosstalk:
    """What comes back when a write is read with its own key, at the end of the stream, on a text.

    `noise` is the energy of what other writes mix in, by the write's own energy; `random` the same, expected for random
    keys of the same lengths. Below 1 the write can still be told from the rest; below `random` the keys avoid each
    other, above it they gather.
    """

    write: str
    noise: float
    random: float


def crosstalk(seen: Trace) -> list[Crosstalk]:
    """The crosstalk of every write on the traced text."""
    table = seen.table
    data_BTWV = torch.cat(seen.data, dim=-2).double()
    keys_KW = table.write_KW.double()
    gram_WW = keys_KW.T @ keys_KW
    moment_WW = torch.einsum("btuv,btwv->uw", data_BTWV, data_BTWV)
    length_W, energy_W = gram_WW.diagonal(), moment_WW.diagonal()
    other_WW = gram_WW - torch.diag(length_W)
    mixed_W = torch.einsum("wu,ux,wx->w", other_WW, moment_WW, other_WW) / length_W.square().clamp_min(1e-30)
    expected_W = ((length_W * energy_W).sum() - length_W * energy_W) / (table.config.key_dim * length_W).clamp_min(
        1e-30
    )
    own_W = energy_W.clamp_min(1e-30)
    return [
        Crosstalk(slot.name, noise, random)
        for slot, noise, random in zip(
            table.writes, (mixed_W / own_W).tolist(), (expected_W / own_W).tolist(), strict=True
        )
    ]
