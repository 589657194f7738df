"""The rollout side of a run as the loop sees it: the next prompts rolled out, benchmarks measured,
and the current draft pushed to the engines.
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

_UNUSABLE_SHARE = 0.05  # of a batch, and one sample more, may have log-probs that are not numbers


@dataclass(kw_only=True)
class Rollouts:
    """Prompts, engines and benchmarks of a run, and the way of the draft to the engines."""

    cfg: Config
    fleet: Fleet
    trainers: Trainers  # hold the draft that is pushed
    snapshots: SnapshotWriter
    position: Position  # next prompts, version of the draft
    benchmarks: Benchmarks
    clock: Stopwatch
    dropped: int = 0  # samples with log-probs that are not numbers
    drafting: bool = True  # whether engines were told to draft

    def __post_init__(self) -> None:
        self.fleet.snapshot = self._snapshot  # for an engine that is started again

    def next_batch(self, *, drafting: bool = True, score: bool = False) -> list[RolloutSample]:
        """The next batch of prompts, rolled out, without samples that cannot be trained on; with
        `drafting` off as plain decoding, where engines can; with `score`, and if there are teacher
        servers, with their scores.
        """
        rollout, data = self.cfg.rollout, self.cfg.data
        self._draft(drafting)
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
        self._draft(True)
        with self.clock.part("testing"):
            return self.benchmarks.run(self.fleet, self.position.progress.version)

    def prove_target(self) -> None:
        """WeightSyncError unless all engines still hold the target they started with."""
        self.fleet.prove_target()

    def sleep(self) -> None:
        """Release what the engines hold, for an update."""
        self.fleet.sleep()

    def sync(self) -> None:
        """Wake the engines with the current draft."""
        self.position.progress.sync = self.fleet.sync(self._snapshot())
        self.snapshots.clear()

    def metrics(self) -> dict[str, float]:
        """Counters, as they are logged with every step."""
        return {
            "training/epoch": self.position.prompts.epoch,
            "data/dropped_samples": self.dropped,
            **self.fleet.recorder_metrics(),
        }

    def _snapshot(self) -> DraftSnapshot:
        return self.trainers.snapshot(self.snapshots.path, self.position.progress.version)

    def _draft(self, on: bool) -> None:
        if on != self.drafting:
            self.fleet.set_drafting(on)
            self.drafting = on

    def _keep_finite(self, samples: list[RolloutSample]) -> list[RolloutSample]:
        """`samples` without those with a log-prob that is not a number; RolloutError when there are
        more of them than one and a twentieth.
        """
        bad = {sample.sample_id for sample in samples if not is_finite(sample)}
        kept, dropped = [sample for sample in samples if sample.sample_id not in bad], len(bad)
        self.dropped += dropped
        if dropped > 1 + _UNUSABLE_SHARE * len(samples) or not kept:
            raise RolloutError(
                f"{dropped} of {len(samples)} samples carry log-probs that are not numbers: "
                f"{', '.join(sorted(bad)[:8])}"
            )
        if dropped:
            log.warning(
                "dropped %d of %d samples: log-probs that are not numbers", dropped, len(samples)
            )
        return kept
