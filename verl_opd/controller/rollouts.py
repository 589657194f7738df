"""The rollout side of a run for the loop: roll out the next prompts, measure benchmarks, push the
current draft to the engines.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from verl_opd.config.schema import Config
from verl_opd.controller.benchmarks import Benchmarks
from verl_opd.controller.fleet import Fleet
from verl_opd.controller.position import Position
from verl_opd.controller.trainers import Trainers
from verl_opd.errors import RolloutError
from verl_opd.opd.trace import RolloutSample, is_finite
from verl_opd.report.acceptance import BenchmarkResult
from verl_opd.report.timing import Stopwatch
from verl_opd.snapshot import DraftSnapshot, SnapshotWriter

log = logging.getLogger(__name__)

_UNUSABLE_SHARE = 0.05  # of a batch, plus one sample, may have log-probs that are not numbers


@dataclass(kw_only=True)
class Rollouts:
    """Prompts, engines and benchmarks of a run, and the push of the draft to the engines."""

    cfg: Config
    fleet: Fleet
    trainers: Trainers  # hold the draft that is pushed
    snapshots: SnapshotWriter
    position: Position  # next prompts, version of the draft
    benchmarks: Benchmarks
    clock: Stopwatch
    dropped: int = 0  # samples with log-probs that are not numbers

    def __post_init__(self) -> None:
        self.fleet.snapshot = self._snapshot  # for an engine that replaces a lost one

    def next_batch(self, *, drafting: bool = True, score: bool = False) -> list[RolloutSample]:
        """Roll out the next batch of prompts; samples that cannot be trained on are dropped.

        drafting: False decodes with the target alone, where engines support that. score: add the
        scores of teacher servers, in runs that have any.
        """
        rollout, data = self.cfg.rollout, self.cfg.data
        self.fleet.set_drafting(drafting)
        prompts = self.position.prompts.next_batch()
        sampling = {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "max_tokens": data.max_response_length,
        }
        with self.clock.part("gen"):
            version = self.position.progress.version
            return self._keep_finite(self.fleet.generate(prompts, sampling, version, score))

    def measure(self) -> list[BenchmarkResult]:
        """All benchmarks with the current draft."""
        self.fleet.set_drafting(True)
        with self.clock.part("testing"):
            return self.benchmarks.run(self.fleet, self.position.progress.version)

    def prove_target(self) -> None:
        """WeightSyncError unless all engines still hold the target they started with."""
        self.fleet.prove_target()

    def sleep(self) -> None:
        """Release the engines' memory for an update."""
        self.fleet.sleep()

    def sync(self) -> None:
        """Wake the engines with the current draft."""
        self.position.progress.sync = self.fleet.sync(self._snapshot())
        self.snapshots.clear()

    def metrics(self) -> dict[str, float]:
        """Counters, logged with every step."""
        return {
            "training/epoch": self.position.prompts.epoch,
            "data/dropped_samples": self.dropped,
            **self.fleet.recorder_metrics(),
        }

    def _snapshot(self) -> DraftSnapshot:
        return self.trainers.snapshot(self.snapshots.path, self.position.progress.version)

    def _keep_finite(self, samples: list[RolloutSample]) -> list[RolloutSample]:
        """`samples` without those with a log-prob that is not a number. RolloutError when more than
        one sample plus _UNUSABLE_SHARE of the batch are dropped, or all of it.
        """
        bad = {sample.sample_id for sample in samples if not is_finite(sample)}
        kept, dropped = [sample for sample in samples if sample.sample_id not in bad], len(bad)
        self.dropped += dropped
        if dropped > 1 + _UNUSABLE_SHARE * len(samples) or not kept:
            raise RolloutError(
                f"{dropped} of {len(samples)} samples have log-probs that are not numbers: "
                f"{', '.join(sorted(bad)[:8])}"
            )
        if dropped:
            log.warning(
                "dropped %d of %d samples: log-probs that are not numbers", dropped, len(samples)
            )
        return kept
