"""The DFlash draft network: queries from one block of slots, keys and values from target features
and the block itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from verl_opd.drafts.dflash.config import layer_attention, rope_theta, target_layer_ids
from verl_opd.drafts.layers import MLP, RMSNorm, Rotation, rotate, rotation


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the network needs of config.json."""

    hidden: int  # h, the width of slots; the target's as well
    layers: int  # decoder layers
    heads: int  # query heads of a layer
    kv_heads: int  # key and value heads of a layer; divides `heads`
    head_dim: int  # width of one head; heads * head_dim need not be h
    intermediate: int  # inner width of the MLP
    features: int  # n*h, concatenated outputs of n target layers
    eps: float  # of every RMSNorm
    theta: float  # base of the rotary angles

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        hidden = config["hidden_size"]
        return cls(
            hidden=hidden,
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            intermediate=config["intermediate_size"],
            features=hidden * len(target_layer_ids(config)),
            eps=config["rms_norm_eps"],
            theta=rope_theta(config),
        )


class Attention(nn.Module):
    """Slots attend to context and slots under a boolean mask. Context keys and values come from the
    normed features directly, without the layer's input norm, as the engine precomputes them (vLLM
    DFlashQwen3Model.precompute_and_store_context_kv).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """[b, L, heads*head_dim] -> [b, heads, L, head_dim]."""
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def forward(
        self, slots: Tensor, context: Tensor, slot_rope: Rotation, key_rope: Rotation, mask: Tensor
    ) -> Tensor:
        """slots [b, M, h]; context [b, C, h]; slot_rope for the M slots, key_rope for C+M; mask
        [b, 1, M, C+M] bool. Returns [b, M, h].
        """
        source = torch.cat((context, slots), dim=1)  # [b, C+M, h]
        # [b, heads, M, head_dim], [b, kv_heads, C+M, head_dim] twice
        query = rotate(self.q_norm(self._split(self.q_proj(slots), self.heads)), slot_rope)
        key = rotate(self.k_norm(self._split(self.k_proj(source), self.kv_heads)), key_rope)
        value = self._split(self.v_proj(source), self.kv_heads)
        groups = self.heads // self.kv_heads
        if groups > 1:  # [b, heads, C+M, head_dim]
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = MLP(shape.hidden, shape.intermediate)

    def forward(
        self, slots: Tensor, context: Tensor, slot_rope: Rotation, key_rope: Rotation, mask: Tensor
    ) -> Tensor:
        """As Attention.forward."""
        slots = slots + self.self_attn(
            self.input_layernorm(slots), context, slot_rope, key_rope, mask
        )
        return slots + self.mlp(self.post_attention_layernorm(slots))  # type: ignore[no-any-return]


class DFlashDraft(nn.Module):
    """Parameters have the public checkpoint names; embedding and LM head are the target's and are
    not part of the draft.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        shape = Shape.of(config)
        self.shape = shape
        self.attention = layer_attention(config)
        self.gradient_checkpointing = False
        self.fc = nn.Linear(shape.features, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)

    def forward(
        self, features: Tensor, slot_embeds: Tensor, slot_positions: Tensor, masks: Sequence[Tensor]
    ) -> Tensor:
        """features [b, C, n*h]; slot_embeds [b, M, h]; slot_positions [b, M] int64; masks: one
        [b, 1, M, C+M] bool per layer (True = visible). Returns [b, M, h] after the final norm.
        """
        context = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))  # [b, C, h]
        before = torch.arange(features.shape[1], device=features.device)  # [C]
        positions = torch.cat((before.expand(features.shape[0], -1), slot_positions), dim=1)
        # tables [b, 1, C+M, head_dim]; the last M rows are the slots'
        key_rope = rotation(positions, self.shape.head_dim, self.shape.theta, context.dtype)
        count = slot_positions.shape[1]
        slot_rope = (key_rope[0][:, :, -count:], key_rope[1][:, :, -count:])
        slots = slot_embeds.to(context.dtype)  # [b, M, h]
        for layer, mask in zip(self.layers, masks, strict=True):
            args = (slots, context, slot_rope, key_rope, mask)
            slots = (
                checkpoint(layer, *args, use_reentrant=False)
                if self.gradient_checkpointing and self.training
                else layer(*args)
            )
        return self.norm(slots)  # type: ignore[no-any-return]
