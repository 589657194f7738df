"""Pushes a draft to all replicas and believes only what they read back."""

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
    """version and checksum now served everywhere; seconds of the push, read-back included; bytes
    and tensors pushed to each replica.
    """

    version: int
    seconds: float
    bytes: int
    tensor_count: int
    checksum: str = ""


def push_draft(servers: Sequence[Any], snapshot: DraftSnapshot, first: int = 0) -> SyncReport:
    """Load `snapshot` on every server, replicas `first` and following; WeightSyncError names the
    replica and both values unless all of them prove to hold it.
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
            f"{where} refused draft version {snapshot.version} and still serves "
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
