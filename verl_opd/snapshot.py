"""A published state of the draft: the file from trainer to engine, and the checksum by which an
engine proves that it holds it.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from verl_opd.process import clean_up_after


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
    """The draft at one version, in a file that engines load."""

    version: int  # optimiser steps taken; 0 = initial weights
    path: str  # safetensors file: bf16 tensors under public checkpoint names
    shapes: dict[str, tuple[int, ...]]  # name -> shape of every tensor in the file
    checksum: str  # `checksum` of the tensors in the file


class SnapshotWriter:
    """The file through which trainer and engines exchange the draft: shared memory when all of them
    run on this node and it has room for two drafts (containers often have 64 MB), else the run
    directory, which all nodes share.
    """

    def __init__(self, run_dir: Path, one_node: bool, draft_bytes: int) -> None:
        shared = Path("/dev/shm")
        roomy = shared.is_dir() and shutil.disk_usage(shared).free > 2 * draft_bytes
        parent = shared if one_node and roomy else run_dir
        self.path = parent / f".verl-opd-draft-{secrets.token_hex(8)}.safetensors"
        clean_up_after([self.path])

    def clear(self) -> None:
        """Remove the file: it is not needed after a push."""
        self.path.unlink(missing_ok=True)
