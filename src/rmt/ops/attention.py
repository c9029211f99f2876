"""Causal attention of all heads: the mask, the position biases and rotations, and the product itself.

`Attend` is made once per forward pass and shared by all layers: it holds what depends on positions and documents
only. Axes: B batch, T queries, S keys, H query heads, G key/value heads, V head_dim.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rmt.config import ModelConfig


@dataclass(frozen=True)
class Attend:
    """Who may attend to whom in this forward pass, and how positions enter.

    Args:
        mask: None for plain causal attention over the whole sequence; else boolean (True: may attend) or an additive
            bias, broadcastable to [B, H, T, S].
        rotation: cosines and sines [B or 1, T, 1, V], for rotary positions.
    """

    mask: Tensor | None = None
    rotation: tuple[Tensor, Tensor] | None = None


def prepare(
    config: ModelConfig,
    past: int,
    position_BT: Tensor,
    document_BT: Tensor | None,
    document_BS: Tensor | None,
    dtype: torch.dtype,
) -> Attend:
    """Everything about positions and documents that the layers share.

    Args:
        past: tokens in the cache, before the T tokens of this pass. The order of the sequence decides causality.
        position_BT: positions of the new tokens, for the rotation.
        document_BT: documents of the new tokens, or None.
        document_BS: documents of all tokens, the cached ones first.
        dtype: of the biases and rotations.
    """
    rotation = rope(position_BT, config.head_dim, config.rope_theta, dtype) if config.position == "rope" else None
    T = position_BT.shape[-1]
    if document_BT is None and config.position != "alibi" and past == 0:
        return Attend(None, rotation)
    place_S = torch.arange(past + T, device=position_BT.device)
    distance_TS = place_S[past:, None] - place_S[None, :]
    allowed_BTS = (distance_TS >= 0)[None]
    if document_BT is not None and document_BS is not None:
        allowed_BTS = allowed_BTS & (document_BT[:, :, None] == document_BS[:, None, :])
    allowed = allowed_BTS[:, None]
    if config.position != "alibi":
        return Attend(allowed, rotation)
    slopes_H = alibi_slopes(config.heads).to(position_BT.device, dtype)
    bias = -slopes_H[:, None, None] * distance_TS.to(dtype)
    return Attend(bias.masked_fill(~allowed, float("-inf")), None)


def attend(q_BTHV: Tensor, k_BGSV: Tensor, v_BGSV: Tensor, context: Attend, scale: float) -> Tensor:
    """softmax(scale * q k^T + mask) v for each head -> [B, T, H, V]. Without a mask: causal."""
    mask = context.mask
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q_BTHV.dtype)
    y_BHTV = F.scaled_dot_product_attention(
        q_BTHV.transpose(1, 2),
        k_BGSV,
        v_BGSV,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q_BTHV.shape[2] != k_BGSV.shape[1],
    )
    return y_BHTV.transpose(1, 2)


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
