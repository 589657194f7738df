"""A published state of the draft: what travels from trainer to engine, with the proof that it
arrived.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hex digest over names, shapes, dtypes and raw bytes of `tensors`, in name order; independent
    of device and of how engines fuse them.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


@dataclass(frozen=True)
class DraftSnapshot:
    """The draft after one optimiser step, in a file that engines load."""

    version: int  # optimiser steps taken; 0 = initial weights
    path: str  # safetensors file: bf16 tensors under public checkpoint names
    shapes: dict[str, tuple[int, ...]]  # name -> shape of every tensor in the file
    checksum: str  # `checksum` of the tensors in the file
