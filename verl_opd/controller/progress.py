"""How far a run is: the counters and results of its checkpoints, and its last draft push."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_opd.opd.trace import RolloutSample, VerifyTrace
from verl_opd.report.acceptance import BenchmarkResult, results_by_stage
from verl_opd.rollout.sync import SyncReport

SFT, OPD = "sft", "opd"  # names of the stages
_STEP = "_step"  # ends the keys of step counters in a checkpoint, behind the name of the stage
_FORMER_NAMES = {"warmup": SFT}  # of stages, in older checkpoints


@dataclass
class Progress:
    """Counters and results of a run."""

    steps: Counter[str] = field(default_factory=Counter)  # stage -> steps done
    version: int = 0  # optimiser steps done = version of the draft
    # point of the run ("before", "after_sft", "after_opd") -> benchmarks measured there
    results: dict[str, list[BenchmarkResult]] = field(default_factory=dict)
    # text that supervised steps draw from (token ids; traces are not needed there)
    pool: list[RolloutSample] = field(default_factory=list)
    # report of the last push of a draft to the engines
    sync: SyncReport = field(default_factory=lambda: SyncReport(0, 0.0, 0, 0))

    @property
    def global_step(self) -> int:
        return self.steps.total()

    def metrics(self) -> dict[str, float]:
        """Counters and the last push, logged with every step."""
        return {
            "opd/weight_sync/version": self.sync.version,
            "opd/weight_sync/seconds": self.sync.seconds,
            "opd/weight_sync/bytes": self.sync.bytes,
            "opd/weight_sync/draft_tensor_count": self.sync.tensor_count,
            "training/global_step": self.global_step,
            "training/update_step": self.version,
        }

    def state(self) -> dict[str, Any]:
        """JSON form; `from_state` inverts it except for `sync` and the pool's traces."""
        return {
            **{f"{name}{_STEP}": done for name, done in self.steps.items()},
            "version": self.version,
            "results": {
                point: [result.as_dict() for result in results]
                for point, results in self.results.items()
            },
            "pool": [
                [sample.sample_id, sample.data_source, sample.prompt_ids, sample.response_ids]
                for sample in self.pool
            ],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """Also reads the state of checkpoints that call the supervised stage `warmup`."""
        done = {
            key.removesuffix(_STEP): count for key, count in state.items() if key.endswith(_STEP)
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
        return cls(
            steps=Counter({_FORMER_NAMES.get(name, name): n for name, n in done.items()}),
            version=state["version"],
            results=results_by_stage(state["results"]),
            pool=pool,
        )
