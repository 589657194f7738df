"""What is reported after a step: metrics, put together once, for the trackers and the progress bar;
a sample for samples.log; and symptoms of a run that learns nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from verl_opd.opd.metrics import StepMetrics, reduce_metrics
from verl_opd.opd.trace import RolloutSample
from verl_opd.report.acceptance import BenchmarkResult
from verl_opd.report.console import Console, StageBar
from verl_opd.report.diagnosis import Diagnosis, checklist
from verl_opd.report.sample_log import SampleLog
from verl_opd.report.timing import Stopwatch
from verl_opd.report.trackers import Trackers

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """What is reported about one step."""

    number: int  # global step
    parts: Sequence[StepMetrics]  # measurements of rollouts, ranks and plans
    counters: Mapping[str, float]  # metrics that are final values already
    results: Sequence[BenchmarkResult]  # benchmarks measured after the step; empty = none
    shown: RolloutSample  # for samples.log
    on_policy: bool  # whether symptoms are looked for
    checksum: str  # of the draft in the engines


@dataclass(kw_only=True)
class StepReporter:
    """Reports every step of a run, each once."""

    trackers: Trackers
    console: Console
    samples: SampleLog
    clock: Stopwatch
    diagnostics: Mapping[str, object]  # printed with a symptom, see Job.diagnostics
    diagnosis: Diagnosis = field(default_factory=Diagnosis)

    def stage(self, name: str, steps: int, done: int) -> AbstractContextManager[StageBar]:
        """The progress bar of a stage of `steps`, of which `done` were done before."""
        return self.console.stage(name.upper(), steps, done)

    def step(self, bar: StageBar, step: FinishedStep) -> None:
        """Log one step to all trackers, show a sample of it and advance `bar`."""
        final = dict(step.counters)
        for result in step.results:
            final.update(result.metrics())
        metrics = reduce_metrics(step.parts, {**final, **self.clock.lap()})
        if "perf/total_num_tokens" in metrics:
            metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / metrics["timing_s/step"]
        self.trackers.log(step.number, metrics)
        self.samples.write(step.number, step.shown)
        bar.advance(metrics)
        if step.on_policy:
            known = {**self.diagnostics, "checksum in engine": step.checksum}
            for symptom in self.diagnosis.look(metrics):
                log.warning(checklist(symptom, metrics, known))

    def benchmarks(self, step: int, point: str, results: Sequence[BenchmarkResult]) -> None:
        """Log and show benchmarks that were measured at a named `point` of the run."""
        self.trackers.log(
            step, {name: value for result in results for name, value in result.metrics().items()}
        )
        self.console.acceptance(
            f"held-out accept length, {point.replace('_', ' ')}", {point: results}
        )
