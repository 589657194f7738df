"""What leaves the trainer: the draft's weights, as a snapshot for engines or as a directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_opd.drafts.base import DraftFamily
from verl_opd.snapshot import DraftSnapshot, checksum


def published(draft: nn.Module) -> dict[str, Tensor]:
    """The draft's weights by public name: whole, bf16, on the CPU of rank 0; empty on other ranks.
    Collective.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in draft.named_parameters():
        # rounded before the gather, which halves what travels
        narrow = value.detach().to(torch.bfloat16)
        whole = narrow.full_tensor() if isinstance(narrow, DTensor) else narrow
        if dist.get_rank() == 0:
            tensors[name] = whole.cpu().contiguous()
    return tensors


def write_snapshot(draft: nn.Module, path: str, version: int) -> DraftSnapshot | None:
    """Rank 0 writes the bf16 draft to the safetensors file `path` (temporary name, rename) and
    describes it; others return None. Collective.
    """
    tensors = published(draft)
    if not tensors:
        return None
    temporary = f"{path}.tmp"
    save_file(tensors, temporary)
    os.replace(temporary, path)
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    return DraftSnapshot(version, path, shapes, checksum(tensors))


def write_export(
    family: DraftFamily, draft: nn.Module, config: Mapping[str, Any], directory: str
) -> None:
    """Rank 0 writes an HF-format draft directory. Collective."""
    tensors = published(draft)
    if tensors:
        token_maps = {name: buffer.cpu() for name, buffer in draft.named_buffers()}
        family.save_pretrained({**tensors, **token_maps}, config, Path(directory))
    dist.barrier()
