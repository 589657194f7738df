"""Pushes a draft to all replicas and checks what each of them reads back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from verl_opd.errors import WeightSyncError
from verl_opd.snapshot import DraftSnapshot


@dataclass(frozen=True)
class SyncReport:
    """One push of a draft to all replicas."""

    version: int  # of the draft that all replicas hold now
    seconds: float  # of the push, read-back included
    bytes: int  # pushed to each replica
    tensor_count: int  # pushed to each replica
    checksum: str = ""  # of the draft that all replicas hold now


def push_draft(servers: Sequence[Any], snapshot: DraftSnapshot, first: int = 0) -> SyncReport:
    """Load `snapshot` on every server, which are replicas `first` and following. WeightSyncError
    names the replica and both values unless each of them reads back exactly that draft.
    """
    started = time.monotonic()
    replies = ray.get([server.load_draft.remote(snapshot) for server in servers])
    for replica, reply in enumerate(replies, start=first):
        for rank, worker in enumerate(reply["workers"]):
            prove(worker, snapshot, f"replica {replica}, engine worker {rank}")
    return SyncReport(
        snapshot.version,
        time.monotonic() - started,
        Path(snapshot.path).stat().st_size,
        len(snapshot.shapes),
        snapshot.checksum,
    )


def prove(worker: dict[str, Any], snapshot: DraftSnapshot, where: str) -> None:
    """WeightSyncError unless the read-back of one engine worker is exactly `snapshot`."""
    if worker["error"]:
        raise WeightSyncError(
            f"{where} did not load draft version {snapshot.version} and still serves "
            f"{worker['version']}: {worker['error']}"
        )
    expected = {
        "version": snapshot.version,
        "checksum": snapshot.checksum,
        "tensors": len(snapshot.shapes),
        "fused_consistent": True,
    }
    wrong = [
        f"{name} is {worker[name]!r}, pushed {value!r}"
        for name, value in expected.items()
        if worker[name] != value
    ]
    if wrong:
        raise WeightSyncError(
            f"{where} does not hold the draft that was pushed: {'; '.join(wrong)}"
        )
