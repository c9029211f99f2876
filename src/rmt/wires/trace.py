"""What passed over the wires on a text: which write supplied how much of what each read saw, and of each logit.

The norm divides a token's stream by one number, its deviation, and (LayerNorm) subtracts one mean, to which every
write adds its own. Both are linear once the deviation is taken as it was, so what a read saw is an exact sum over the
writes before it:

    read[v] = sum over w of (coupling[w, v] d_w[v] - mean_w offset[v]) / deviation
    offset[v] = sum over k of r[k] gain[k, v]      mean_w = the mean of w (outer product) d_w; 0 with RMSNorm

`trace(model, ids)` runs the model once and remembers d, the deviations and the reads. Logits are linear in the last
read, so each is an exact sum over writes too.

Axes: B batch, T tokens, P reads of a boundary, N writes up to it, R and W all reads and writes, K key_dim, V head_dim,
C cores.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rmt.config import Norm
from rmt.streams.matrix import MatrixBoundary
from rmt.wires.slots import grouped
from rmt.wires.table import Wiring, find_network, wiring

#: Looks at one boundary while the model runs: the boundary, the vectors written at it [B, T, N, V], the stream after it
#: [B, T, K, V] and the reads [B, T, P, V]. Returns other reads for the model to go on with, or None.
Watcher = Callable[[MatrixBoundary, Tensor, Tensor, Tensor], Tensor | None]


class Watch(AbstractContextManager):
    """Show a watcher every boundary of a matrix model while the model runs inside `with Watch(...)`."""

    def __init__(self, model: nn.Module, watcher: Watcher, until: int | None = None) -> None:
        """`until`: the last boundary to look at (None: all)."""
        self.network, self.watcher, self.until = find_network(model), watcher, until

    def __enter__(self) -> Watch:
        stop = None if self.until is None else self.until + 1
        self._hooks = [boundary.register_forward_hook(self._hook) for boundary in list(self.network.stream)[:stop]]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, boundary: MatrixBoundary, arguments: tuple[Any, Any], output: tuple[Any, Any]) -> Any:
        written_BTNV, _ = boundary.written(arguments[1])
        X_BTKV, read = output
        is_attention = boundary.site.before == "attention"
        read_BTPV = torch.cat(read, dim=-2) if is_attention else boundary.split(read)
        changed_BTPV = self.watcher(boundary, written_BTNV, X_BTKV, read_BTPV)
        if changed_BTPV is None:
            return None
        if is_attention:
            return X_BTKV, changed_BTPV.split([part.shape[-2] for part in read], dim=-2)
        return X_BTKV, changed_BTPV.flatten(-2)


def inverse_deviation(X_BTKV: Tensor, kind: Norm, eps: float) -> Tensor:
    """[B, T]: what the norm multiplies each token's stream by."""
    if kind == "layernorm":
        return (X_BTKV.var((-2, -1), correction=0) + eps).rsqrt()
    return (X_BTKV.square().mean((-2, -1)) + eps).rsqrt()


class Passage:
    """One boundary of one pass, as far as the sources of its reads need it.

    Args:
        table: the wiring.
        site: the boundary.
        data_BTNV: all vectors written up to it.
        scale_BT: the inverse deviation of the stream there.
        rows: only these reads of the boundary.
    """

    def __init__(
        self, table: Wiring, site: int, data_BTNV: Tensor, scale_BT: Tensor, rows: slice | Tensor | None = None
    ) -> None:
        keys = table.boundaries[site]
        self.data_BTNV, self.scale_BT = data_BTNV, scale_BT
        self.coupling_PNV = table.coupling(site, rows)
        read_PK = keys.read_PK if rows is None else keys.read_PK[rows]
        N, V = data_BTNV.shape[-2:]
        gain_KV = torch.ones(V, device=read_PK.device, dtype=read_PK.dtype) if keys.gain is None else keys.gain
        self.offset_PV = read_PK @ gain_KV.expand(read_PK.shape[1], V)
        key_mean_N = table.write_KW[:, :N].mean(0)
        if table.config.norm == "rmsnorm":
            key_mean_N = torch.zeros_like(key_mean_N)
        self.mean_BTN = key_mean_N * data_BTNV.mean(-1)

    def contributions(self) -> Tensor:
        """[B, T, P, N, V]: what each read received of each write. Their sum over N is the read."""
        c_BTPNV = self.coupling_PNV * self.data_BTNV[:, :, None]
        c_BTPNV = c_BTPNV - self.mean_BTN[:, :, None, :, None] * self.offset_PV[:, None]
        return c_BTPNV * self.scale_BT[..., None, None, None]

    def chosen(self, mask_PN: Tensor) -> Tensor:
        """[B, T, P, V]: what the reads received over the edges in `mask_PN` (weights 0 and 1)."""
        y_BTPV = torch.einsum("pnv,btnv->btpv", self.coupling_PNV * mask_PN[..., None], self.data_BTNV)
        mean_BTP = torch.einsum("pn,btn->btp", mask_PN, self.mean_BTN)
        return (y_BTPV - mean_BTP[..., None] * self.offset_PV) * self.scale_BT[..., None, None]

    def project(self, probe_BTPV: Tensor) -> Tensor:
        """[B, T, N]: how each write's contributions project on `probe`, summed over the reads and value indices."""
        left_BTPV = probe_BTPV * self.scale_BT[..., None, None]
        through_BTNV = torch.einsum("btpv,pnv->btnv", left_BTPV, self.coupling_PNV)
        offset_BT1 = (left_BTPV * self.offset_PV).sum((-2, -1))[..., None]
        return (through_BTNV * self.data_BTNV).sum(-1) - offset_BT1 * self.mean_BTN

    def project_total(self, probe_BTPV: Tensor) -> Tensor:
        """[P, N]: the same for each read by itself, summed over all tokens."""
        left_BTPV = probe_BTPV * self.scale_BT[..., None, None]
        joint_PNV = torch.einsum("btpv,btnv->pnv", left_BTPV, self.data_BTNV)
        offset_BTP = (left_BTPV * self.offset_PV).sum(-1)
        return (joint_PNV * self.coupling_PNV).sum(-1) - torch.einsum("btp,btn->pn", offset_BTP, self.mean_BTN)


class Lens(NamedTuple):
    """What the unembedding would say of the stream after each boundary's write.

    `after`: what had been written last; `ids`, `probability`: the likeliest tokens [sites, B, T, top];
    `target`: the probability of the token that followed [sites, B, T] (of the last one: 0).
    """

    after: list[str]
    ids: Tensor
    probability: Tensor
    target: Tensor


@dataclass
class Trace:
    """One pass of a model over `ids_BT`, taken apart. Lists are by boundary."""

    network: Any
    table: Wiring
    ids_BT: Tensor
    logits_BTW: Tensor
    data: list[Tensor]
    scale: list[Tensor]
    read: list[Tensor]

    def passage(self, site: int, rows: slice | Tensor | None = None) -> Passage:
        return Passage(self.table, site, torch.cat(self.data[: site + 1], dim=-2), self.scale[site], rows)

    def place(self, read: str) -> tuple[int, slice]:
        """The boundary of a read, and its row there."""
        index = self.table.read_index(read)
        site = self.table.reads[index].site
        row = index - self.table.read_rows[site].start
        return site, slice(row, row + 1)

    def read_vector(self, read: str) -> Tensor:
        """[B, T, V]: what the model itself read."""
        site, row = self.place(read)
        return self.read[site][:, :, row.start]

    def contributions(self, read: str) -> Tensor:
        """[B, T, N, V]: what a read received of each write before it. The sum over writes is `read_vector`."""
        return self.passage(*self.place(read)).contributions()[:, :, 0]

    def shares(self, read: str) -> Tensor:
        """[B, T, N]: each write's share of what a read saw of a token; 1 in sum, single ones may be negative.

        It is the contribution's projection on the read vector, by that vector's squared length.
        """
        site, row = self.place(read)
        y_BTPV = self.read[site][:, :, row]
        return self.passage(site, row).project(y_BTPV / squared_length(y_BTPV))

    def total_shares(self) -> Tensor:
        """[R, W]: each write's share of what each read saw over the whole text (products and lengths are summed)."""
        result_RW = torch.zeros(len(self.table.reads), len(self.table.writes))
        for site, rows in enumerate(self.table.read_rows):
            y_BTPV = self.read[site]
            length_P1 = y_BTPV.square().sum((0, 1, 3))[:, None].clamp_min(TINY)
            shares_PN = self.passage(site).project_total(y_BTPV) / length_P1
            result_RW[rows, : shares_PN.shape[1]] = shares_PN.float().cpu()
        return result_RW

    def core_shares(self) -> Tensor:
        """[B, T, C reading, C writing]: each writing core's share of all that a reading core saw of a token."""
        names, place = grouped(self.table.writes, "cores")
        place_W = torch.from_numpy(place).to(self.ids_BT.device)
        B, T = self.ids_BT.shape
        result = torch.zeros(B, T, len(self.read), len(names), device=self.ids_BT.device)
        for site, y_BTPV in enumerate(self.read):
            probe_BTPV = y_BTPV / y_BTPV.square().sum((-2, -1), keepdim=True).clamp_min(TINY)
            shares_BTN = self.passage(site).project(probe_BTPV).float()
            result[:, :, site].index_add_(-1, place_W[: shares_BTN.shape[-1]], shares_BTN)
        return result

    def attribution(self, targets_BT: Tensor) -> Tensor:
        """[B, T, W]: what each write contributed to the logit of one token id per position; the sum is that logit."""
        unembedding = self.network.unembedding
        rows_BTPV = unembedding.weight_WD[targets_BT].detach().unflatten(-1, self.read[-1].shape[-2:])
        return self.passage(len(self.read) - 1).project(rows_BTPV.to(self.read[-1].dtype) * unembedding.scale)

    @torch.no_grad()
    def lens(self, top: int = 5) -> Lens:
        """The model's last norm, read and unembedding, applied to the stream as it was after every boundary."""
        last, unembedding = self.network.stream[-1], self.network.unembedding
        next_BT = self.ids_BT.roll(-1, dims=1)
        ids, probability, target = [], [], []
        X_BTKV: Tensor | None = None
        for keys, data_BTNV in zip(self.table.boundaries, self.data, strict=True):
            written_BTKV = keys.write_KN @ data_BTNV
            X_BTKV = written_BTKV if X_BTKV is None else X_BTKV + written_BTKV
            hidden_BTD = last.retrieve(last.norm(X_BTKV.to(last.retrieve.keys_RK.dtype))).flatten(-2)
            chances_BTW = unembedding(hidden_BTD).float().softmax(-1)
            best = chances_BTW.topk(top, dim=-1)
            ids.append(best.indices)
            probability.append(best.values)
            target.append(chances_BTW.gather(-1, next_BT[..., None])[..., 0])
        target_SBT = torch.stack(target)
        target_SBT[..., -1] = 0
        after = [self.table.writes[columns.stop - 1].core for columns in self.table.write_columns]
        after[0] = "embedding"
        return Lens(after, torch.stack(ids), torch.stack(probability), target_SBT)


TINY = 1e-30  # a read of nothing has no shares


def squared_length(y_BTPV: Tensor) -> Tensor:
    return y_BTPV.square().sum(-1, keepdim=True).clamp_min(TINY)


@torch.no_grad()
def trace(model: nn.Module, ids_BT: Tensor) -> Trace:
    """Run a matrix model on token ids and take apart what every read saw.

    Args:
        model: from `rmt.build` or `rmt.load_model(...).model`.
        ids_BT: token ids [batch, tokens].
    """
    network = find_network(model)
    data: list[Tensor] = []
    scale: list[Tensor] = []
    read: list[Tensor] = []

    def remember(boundary: MatrixBoundary, written_BTNV: Tensor, X_BTKV: Tensor, read_BTPV: Tensor) -> None:
        data.append(written_BTNV.to(X_BTKV.dtype))
        scale.append(inverse_deviation(X_BTKV, boundary.norm.kind, boundary.norm.eps))
        read.append(read_BTPV.to(X_BTKV.dtype))

    with Watch(network, remember):
        logits_BTW = network(ids_BT).logits
    return Trace(network, wiring(network), ids_BT, logits_BTW, data, scale, read)
