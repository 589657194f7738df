"""Layers that draft networks share, computed as vLLM computes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) in float32, cast back, times weight; over the last dimension (vLLM's RMSNorm)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.weight.to(x.dtype)


Rotation = tuple[Tensor, Tensor]  # cos and sin, [b, 1, L, head_dim] each


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """cos and sin [b, 1, L, head_dim] for integer positions [b, L] (half-split "neox" layout).

    Angles are float32, the tables are then rounded to the draft's `dtype` as the engine does (vLLM
    RotaryEmbedding.cos_sin_cache).
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    # the reciprocal first, as engines do: dividing instead moves float32 angles by milliradians at
    # position 30000
    angles = positions.float().unsqueeze(-1) * (1.0 / theta**exponent)  # [b, L, head_dim/2]
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [b, 1, L, head_dim]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rope: Rotation) -> Tensor:
    """Apply the rotation to x [b, heads, L, head_dim]."""
    cos, sin = rope
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)  # [b, heads, L, head_dim/2] each
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU without biases."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def random_init(module: nn.Module, seed: int, std: float) -> None:
    """Normal weights in every linear layer and embedding of `module`, biases 0; norms stay at 1."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std, generator=generator)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)


def masked_block_embeds(
    embed: Callable[[Tensor], Tensor], mask_token_id: int, anchor_ids: Tensor, slots: int
) -> Tensor:
    """Embeddings [b, N, slots, h] of blocks: the anchor token (anchor_ids [b, N]), then mask
    tokens.
    """
    mask = embed(torch.tensor(mask_token_id, device=anchor_ids.device))  # [h]
    embeds = mask.expand(*anchor_ids.shape, slots, -1).clone()
    embeds[:, :, 0] = embed(anchor_ids)  # [b, N, h]
    return embeds
