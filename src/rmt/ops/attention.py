"""Causal attention of all heads: who sees whom, the position biases and rotations, and the product itself.

`Attend` is made once per forward pass and shared by all layers: it holds what depends on positions and documents
only. `definition` says what attention computes; `attend` computes the same with the fastest kernel at hand: ours in
C++ on the CPU (`rmt.ops.native.attention`), one for whole sequences and one for decoding, else PyTorch's.

Axes: B batch, T queries, S keys, H query heads, G key/value heads, V head_dim.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from rmt.config import ModelConfig, Ops
from rmt.ops import choice
from rmt.ops.native import attention as native


@dataclass
class Attend:
    """Who may attend to whom in this forward pass, and how positions enter.

    Args:
        past: tokens in the cache, before the T tokens of this pass. The order of the sequence decides causality.
        tokens: T.
        document_BT: documents of the new tokens, or None.
        document_BS: documents of all tokens, the cached ones first.
        slopes_H: of the ALiBi biases, or None.
        rotation: cosines and sines [B or 1, T, 1, V] of rotary positions, or None.
        start_B: for one new token after a cache, the first token that it sees; None: not known, or all of them.
    """

    past: int
    tokens: int
    document_BT: Tensor | None = None
    document_BS: Tensor | None = None
    slopes_H: Tensor | None = None
    rotation: tuple[Tensor, Tensor] | None = None
    start_B: Tensor | None = None

    @cached_property
    def mask(self) -> Tensor | None:
        """None if the order of the tokens says it all; else boolean (True: sees) or a bias to add, as [B, H, T, S]."""
        one_after_all = self.tokens == 1 and self.past > 0
        if self.document_BT is None and self.slopes_H is None and (self.past == 0 or one_after_all):
            return None
        some = self.slopes_H if self.document_BT is None else self.document_BT
        place_S = torch.arange(self.past + self.tokens, device=None if some is None else some.device)
        distance_TS = place_S[self.past :, None] - place_S[None, :]
        allowed_BTS = (distance_TS >= 0)[None]
        if self.document_BT is not None and self.document_BS is not None:
            allowed_BTS = allowed_BTS & (self.document_BT[:, :, None] == self.document_BS[:, None, :])
        allowed = allowed_BTS[:, None]
        if self.slopes_H is None:
            return allowed
        bias = -self.slopes_H[:, None, None] * distance_TS.to(self.slopes_H.dtype)
        return bias.masked_fill(~allowed, float("-inf"))

    @property
    def is_causal(self) -> bool:
        """Without a mask: a token sees the tokens before it; a single new token sees all."""
        return self.past == 0

    @cached_property
    def start_BT(self) -> Tensor | None:
        """The first key that each query sees, if documents are contiguous; None where there are no documents."""
        if self.document_BT is None:
            return None
        changes_BT = self.document_BT[:, 1:] != self.document_BT[:, :-1]
        place_T = torch.arange(1, self.tokens, device=changes_BT.device)
        start_BT = torch.where(changes_BT, place_T, 0).cummax(-1).values
        return F.pad(start_BT, (1, 0)).contiguous()

    @cached_property
    def documents_are_contiguous(self) -> bool:
        """No document comes back after another one began."""
        if self.document_BT is None:
            return True
        pieces_B = (self.document_BT[:, 1:] != self.document_BT[:, :-1]).sum(-1)
        ordered_BT = self.document_BT.sort(-1).values
        return bool((pieces_B == (ordered_BT[:, 1:] != ordered_BT[:, :-1]).sum(-1)).all())


def prepare(
    config: ModelConfig,
    past: int,
    position_BT: Tensor,
    document_BT: Tensor | None,
    document_BS: Tensor | None,
    dtype: torch.dtype,
    start_B: Tensor | None = None,
) -> Attend:
    """Everything about positions and documents that the layers share; `dtype` is that of biases and rotations."""
    rotation = rope(position_BT, config.head_dim, config.rope_theta, dtype) if config.position == "rope" else None
    slopes_H = None
    if config.position == "alibi":
        slopes_H = alibi_slopes(config.heads).to(position_BT.device, dtype)
    return Attend(past, position_BT.shape[-1], document_BT, document_BS, slopes_H, rotation, start_B)


def definition(q_BTHV: Tensor, k_BGSV: Tensor, v_BGSV: Tensor, context: Attend, scale: float) -> Tensor:
    """The truth: softmax(scale * q k^T + mask) v for each head -> [B, T, H, V]."""
    group = q_BTHV.shape[2] // k_BGSV.shape[1]
    k_BHSV, v_BHSV = k_BGSV.repeat_interleave(group, dim=1), v_BGSV.repeat_interleave(group, dim=1)
    logits_BHTS = torch.matmul(q_BTHV.transpose(1, 2), k_BHSV.transpose(2, 3)) * scale
    mask = context.mask
    if mask is None and context.is_causal:
        mask = torch.ones(logits_BHTS.shape[-2:], dtype=torch.bool, device=q_BTHV.device).tril()
    if mask is not None and mask.is_floating_point():
        logits_BHTS = logits_BHTS + mask
    elif mask is not None:
        logits_BHTS = logits_BHTS.masked_fill(~mask, float("-inf"))
    return torch.matmul(logits_BHTS.softmax(-1).to(v_BHSV.dtype), v_BHSV).transpose(1, 2)


def attend(q_BTHV: Tensor, k_BGSV: Tensor, v_BGSV: Tensor, context: Attend, scale: float, ops: Ops = "auto") -> Tensor:
    """`definition`, by the kernel that `ops` names (see `rmt.ops.choice`)."""
    if ops == "plain" or choice.is_counted():
        return definition(q_BTHV, k_BGSV, v_BGSV, context, scale)
    if choice.choose(ops, q_BTHV) == "native":
        if context.past == 0 and native.takes(q_BTHV, k_BGSV, v_BGSV) and context.documents_are_contiguous:
            return native.attend(q_BTHV, k_BGSV, v_BGSV, context.start_BT, context.slopes_H, scale)
        known = context.document_BT is None or context.start_B is not None
        if context.past and known and native.takes_token(q_BTHV, k_BGSV, v_BGSV):
            return native.attend_token(q_BTHV, k_BGSV, v_BGSV, context.start_B, context.slopes_H, scale)
    mask = context.mask
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q_BTHV.dtype)
    y_BHTV = F.scaled_dot_product_attention(
        q_BTHV.transpose(1, 2),
        k_BGSV,
        v_BGSV,
        attn_mask=mask,
        is_causal=mask is None and context.is_causal,
        scale=scale,
        enable_gqa=q_BTHV.shape[2] != k_BGSV.shape[1],
    )
    return y_BHTV.transpose(1, 2)


def first_visible(document_BS: Tensor) -> Tensor | None:
    """Where the last token's document begins [B]; None if in some sequence another document lies within it."""
    same_BS = document_BS == document_BS[:, -1:]
    start_B = document_BS.shape[1] - same_BS.sum(-1)
    place_S = torch.arange(document_BS.shape[1], device=document_BS.device)
    return start_B if torch.equal(same_BS, place_S >= start_B[:, None]) else None


def alibi_slopes(heads: int) -> Tensor:
    """Geometric from 2^(-8/heads) to 2^-8, for every number of heads."""
    return torch.tensor([2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)], dtype=torch.float64)


def rope(position_BT: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, [B, T, 1, head_dim]."""
    half = torch.arange(0, head_dim, 2, device=position_BT.device, dtype=torch.float64)
    frequency = torch.exp(-math.log(theta) * half / head_dim)
    angle = position_BT[..., None].to(torch.float64) * frequency
    angle = torch.cat((angle, angle), dim=-1)[:, :, None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_BTHV: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + V/2) of a head by its position's angle."""
    cos, sin = rotation
    first, second = x_BTHV.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BTHV * cos + turned * sin).to(x_BTHV.dtype)
