"""Where a run stands: the counters and results that a checkpoint carries, and where snapshots are
handed over.
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_opd.opd.trace import RolloutSample, VerifyTrace
from verl_opd.process import clean_up_after
from verl_opd.report.acceptance import BenchmarkResult
from verl_opd.rollout.sync import SyncReport


@dataclass
class Progress:
    """warmup_step, opd_step: rollout steps done. version: optimiser steps done = version of the
    draft. results: stage -> benchmarks. pool: target text that warm-up steps draw from (token ids;
    traces are not needed there). sync: report of the last push.
    """

    warmup_step: int = 0
    opd_step: int = 0
    version: int = 0
    results: dict[str, list[BenchmarkResult]] = field(default_factory=dict)
    pool: list[RolloutSample] = field(default_factory=list)
    sync: SyncReport = field(default_factory=lambda: SyncReport(0, 0.0, 0, 0))

    @property
    def global_step(self) -> int:
        return self.warmup_step + self.opd_step

    def state(self) -> dict[str, Any]:
        """JSON form; `from_state` inverts it except for `sync` and the pool's traces."""
        return {
            "warmup_step": self.warmup_step,
            "opd_step": self.opd_step,
            "version": self.version,
            "results": {
                stage: [result.as_dict() for result in results]
                for stage, results in self.results.items()
            },
            "pool": [
                [sample.sample_id, sample.data_source, sample.prompt_ids, sample.response_ids]
                for sample in self.pool
            ],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        results = {
            stage: [
                BenchmarkResult(**{**row, "by_position": tuple(row["by_position"])}) for row in rows
            ]
            for stage, rows in state["results"].items()
        }
        pool = [
            RolloutSample(
                sample_id=sample_id,
                data_source=source,
                prompt_ids=tuple(prompt),
                response_ids=tuple(response),
                trace=VerifyTrace(len(response), ()),
                draft_version=0,
                finish_reason="stop",
            )
            for sample_id, source, prompt, response in state["pool"]
        ]
        return cls(state["warmup_step"], state["opd_step"], state["version"], results, pool)


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
        """Remove the file: nobody needs it once a push is proven."""
        self.path.unlink(missing_ok=True)
