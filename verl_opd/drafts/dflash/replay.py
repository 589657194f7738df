"""Positions and visibility of replayed blocks: exactly what each slot saw when the engine drafted
it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_opd.drafts.dflash.config import LayerAttention
from verl_opd.opd.layout import Layout


def slot_positions(layout: Layout) -> Tensor:
    """Position ids [b, N*B]: anchor, anchor + 1, ..., anchor + B - 1 per block."""
    offsets = torch.arange(layout.block_size, device=layout.anchors.device)  # [B]
    return (layout.anchors.unsqueeze(-1) + offsets).flatten(1)


def visibility(
    layout: Layout, context_len: int, window: int | None = None, causal: bool = False
) -> Tensor:
    """Mask [b, 1, N*B, context_len + N*B], True = visible.

    A slot sees the context strictly before its anchor (the anchor's own features do not exist yet
    when the block is drafted) and every slot of its own block, never another block. Slots of padded
    blocks see their own block only, so that no row is empty. window W: only context at most W - 1
    positions before the slot. causal: of its own block only the slots up to itself.
    """
    size, device = layout.block_size, layout.anchors.device
    blocks = layout.anchors.shape[1]
    positions = torch.arange(context_len, device=device)  # [C]
    context = (positions < layout.anchors.unsqueeze(-1)) & layout.block_keep.unsqueeze(-1)
    context = context.repeat_interleave(size, dim=1)  # [b, N, C] -> [b, N*B, C]
    if window is not None:
        context = context & (slot_positions(layout).unsqueeze(-1) - positions < window)
    owner = torch.arange(blocks, device=device).repeat_interleave(size)  # [N*B]: slot -> block
    own = owner.unsqueeze(0) == owner.unsqueeze(1)  # [N*B, N*B]
    own = (own.tril() if causal else own).expand(layout.anchors.shape[0], -1, -1)
    return torch.cat((context, own), dim=-1).unsqueeze(1)


def layer_masks(
    layout: Layout, context_len: int, attention: Sequence[LayerAttention]
) -> list[Tensor]:
    """The `visibility` of every layer; layers of one kind share a mask."""
    masks = {kind: visibility(layout, context_len, *kind) for kind in set(attention)}
    return [masks[kind] for kind in attention]
