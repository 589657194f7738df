"""The EAGLE-3 draft network: one decoder layer over [embedding of the next token ; hidden state],
unrolled along each drafted chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from verl_opd.drafts import files
from verl_opd.drafts.eagle3.config import draft_vocab_size, head_dim, target_layer_ids
from verl_opd.drafts.layers import MLP, RMSNorm, Rotation, rotate, rotation


class Attention(nn.Module):
    """Attention whose input is twice as wide as its output (vLLM
    llama_eagle3.LlamaDecoderLayer).
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, size
        self.q_proj = nn.Linear(2 * hidden, heads * size, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, hidden, bias=False)

    def project(self, x: Tensor, rope_tables: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [b, heads, L, head_dim] of x [b, L, 2h]; k and v repeated to all heads."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        groups = self.heads // self.kv_heads
        k = rotate(k, rope_tables).repeat_interleave(groups, dim=1)  # kv_heads -> heads
        return rotate(q, rope_tables), k, v.repeat_interleave(groups, dim=1)

    def out(self, mixed: Tensor) -> Tensor:
        """[b, heads, L, head_dim] -> [b, L, h]."""
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Midlayer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.norm_before_residual = bool(config.get("norm_before_residual"))
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = Attention(
            hidden, config["num_attention_heads"], config["num_key_value_heads"], head_dim(config)
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(hidden, config["intermediate_size"])

    def enter(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """embeds, hidden [.., h] -> (attention input [.., 2h], residual [.., h])."""
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        return x, normed if self.norm_before_residual else hidden

    def leave(self, attended: Tensor, residual: Tensor) -> Tensor:
        """[.., h] each -> the layer's output [.., h]."""
        x = residual + attended
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Eagle3Draft(nn.Module):
    """Parameters have the public checkpoint names; the embedding is the target's. d2t and t2d
    exist only where the draft's vocabulary is smaller than the target's.
    """

    d2t: Tensor  # [Vd] int64: target id - draft id, of every draft id
    t2d: Tensor  # [V] bool: the draft can propose this target id

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        count = len(target_layer_ids(config))
        self.head_dim = head_dim(config)
        self.theta = float(files.rope_settings(config, "draft")["rope_theta"])
        self.norm_output = bool(config.get("norm_output"))
        self.gradient_checkpointing = False
        self.fc = nn.Linear(count * hidden, hidden, bias=False)
        if config.get("fc_norm"):
            self.fc_norm = nn.ModuleList(RMSNorm(hidden, eps) for _ in range(count))
        self.midlayer = Midlayer(config)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, draft_vocab_size(config), bias=False)
        if draft_vocab_size(config) != config["vocab_size"]:
            self.register_buffer("d2t", torch.zeros(draft_vocab_size(config), dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool))

    def combine(self, features: Tensor) -> Tensor:
        """[b, C, n*h] -> [b, C, h] (vLLM combine_hidden_states)."""
        if hasattr(self, "fc_norm"):
            parts = features.chunk(len(self.fc_norm), dim=-1)  # n of [b, C, h]
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.fc(features)  # type: ignore[no-any-return]

    def forward(
        self, features: Tensor, context_embeds: Tensor, block_embeds: Tensor, anchors: Tensor
    ) -> Tensor:
        """Hidden states [b, N, B, h] after the final norm; slot j predicts the token at anchor + j,
        slot 0 is zero.

        features [b, C, n*h]; context_embeds [b, C, h]: row x holds the token at x + 1; block_embeds
        [b, N, B-1, h]: anchor token, then proposals; anchors [b, N] full-sequence positions F. The
        first proposal comes from context row F-1; proposal j reads proposal j-1 and the hidden
        state before it, at position F+j-2, and sees the context rows before F and its own chain.
        """
        dtype, layer = self.fc.weight.dtype, self.midlayer
        context = self.combine(features.to(dtype))  # [b, C, h]
        positions = torch.arange(features.shape[1], device=features.device)
        positions = positions.expand(features.shape[0], -1)  # [b, C]
        rope = rotation(positions, self.head_dim, self.theta, dtype)
        x, residual = layer.enter(context_embeds.to(dtype), context)  # [b, C, 2h], [b, C, h]
        query, keys, values = layer.self_attn.project(x, rope)  # [b, heads, C, head_dim] each
        mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=True)
        raw = layer.leave(layer.self_attn.out(mixed), residual)  # [b, C, h]
        before = (anchors - 1).clamp(min=0)  # [b, N]
        hidden = raw.gather(1, before.unsqueeze(-1).expand(-1, -1, raw.shape[-1]))  # [b, N, h]
        visible = positions.unsqueeze(1) < anchors.unsqueeze(-1)  # [b, N, C]
        chain: list[
            Tensor
        ] = []  # key, value, key, ... of the links so far, [b, heads, N, head_dim]
        slots = [torch.zeros_like(hidden), self.norm(hidden)]  # B of [b, N, h] in the end
        saving = self.gradient_checkpointing and self.training
        for step in range(1, block_embeds.shape[2]):
            embeds = block_embeds[:, :, step].to(dtype)  # [b, N, h]
            link = (hidden, embeds, anchors + step - 1, keys, values, visible, *chain)
            hidden, key, value = (
                checkpoint(self._step, *link, use_reentrant=False) if saving else self._step(*link)
            )
            chain += [key, value]
            slots.append(self.norm(hidden))
        return torch.stack(slots, dim=2)

    def _step(
        self,
        hidden: Tensor,
        embeds: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Tensor,
        *chain: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One more link of every chain.

        hidden, embeds [b, N, h] and positions [b, N] of the link; keys, values [b, heads, C,
        head_dim] of the context; visible [b, N, C] bool; chain: key and value [b, heads, N,
        head_dim] of every link before. Returns hidden states [b, N, h] and the link's own key and
        value.
        """
        layer = self.midlayer
        x, residual = layer.enter(embeds, self.norm(hidden) if self.norm_output else hidden)
        rope = rotation(positions, self.head_dim, self.theta, x.dtype)
        query, key, value = layer.self_attn.project(x, rope)  # [b, heads, N, head_dim] each
        own_keys, own_values = [*chain[::2], key], [*chain[1::2], value]  # L links
        query = query * self.head_dim**-0.5
        scores = (query @ keys.transpose(-1, -2)).float()  # [b, heads, N, C]
        scores = scores.masked_fill(~visible.unsqueeze(1), float("-inf"))
        own = torch.stack([(query * k).sum(-1) for k in own_keys], dim=-1).float()  # [.., N, L]
        weights = torch.cat((scores, own), dim=-1).softmax(-1).to(x.dtype)  # [.., N, C+L]
        mixed = weights[..., : keys.shape[2]] @ values  # [b, heads, N, head_dim]
        for index, v in enumerate(own_values):
            mixed = mixed + weights[..., keys.shape[2] + index, None] * v
        return layer.leave(layer.self_attn.out(mixed), residual), key, value
