"""The one training loop: for each stage collect, sleep, update, sync, report, until its steps are
done; with measurements and checkpoints in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from verl_opd.config.schema import TrainerConfig
from verl_opd.controller.checkpoints import Checkpoints
from verl_opd.controller.progress import Progress
from verl_opd.controller.rollouts import Rollouts
from verl_opd.controller.stages import Collected, Stage, Update
from verl_opd.controller.trainers import Trainers
from verl_opd.opd.losses import stream_totals
from verl_opd.opd.metrics import StepMetrics
from verl_opd.opd.plan import plan_counts
from verl_opd.report.acceptance import mean_tau
from verl_opd.report.console import StageBar
from verl_opd.report.step_report import FinishedStep, StepReporter
from verl_opd.signals import Stopped


def due(every: int, step: int, steps: int) -> bool:
    """Whether one of the last `steps` steps, up to `step`, is a multiple of `every`; -1 = never."""
    return every > 0 and step // every > (step - steps) // every


@dataclass(kw_only=True)
class Loop:
    """A run while it trains. `run` returns when all steps are done; it can be resumed from any
    checkpoint it wrote.
    """

    stages: Sequence[Stage]  # in this order
    rollouts: Rollouts
    trainers: Trainers
    checkpoints: Checkpoints
    reporter: StepReporter
    progress: Progress
    schedule: TrainerConfig  # when to measure and to save
    stopping: Callable[[], bool] = lambda: False  # whether to stop before the next step

    def run(self) -> None:
        """Train to the end. Raises Stopped, after a checkpoint, when `stopping` becomes true."""
        self._stop_if_asked()
        with self.reporter.clock.part("update_weights"):
            self.rollouts.sleep()
            self.rollouts.sync()
        if self.schedule.val_before_train:
            self._measure("before")
        for stage in self.stages:
            self._train(stage)
        self.checkpoints.save(required=True)

    def _train(self, stage: Stage) -> None:
        done, point = self.progress.steps[stage.name], f"after_{stage.name}"
        if done < stage.steps:
            self.progress.results.pop(point, None)  # of a shorter stage
            with self.reporter.stage(stage.name, stage.steps, done) as bar:
                while self.progress.steps[stage.name] < stage.steps:
                    self._stop_if_asked()
                    self._step(stage, bar)
        stage.finish()
        if stage.steps:
            self._measure(point)

    def _step(self, stage: Stage, bar: StageBar) -> None:
        """Collect, learn from it, and give the engines the new draft."""
        collected = stage.collect(self.progress.steps[stage.name], partial(bar.advance, {}))
        self.rollouts.sleep()
        self.progress.steps[stage.name] += collected.steps
        parts = list(collected.metrics)
        with self.reporter.clock.part("update_actor"):
            for update in stage.updates(self.progress.steps[stage.name] - 1, collected):
                parts.extend(self._update(update))
        with self.reporter.clock.part("update_weights"):
            self.rollouts.sync()
        self._finish(stage, collected, parts, bar)

    def _update(self, update: Update) -> list[StepMetrics]:
        """One optimiser step. The normalisers are counted here, over the whole mini-batch, so no
        split can change the result.
        """
        items, plans = update.items, [item.plan for item in update.items]
        lengths = [len(sample.response_ids) for sample in update.samples]
        totals = stream_totals(plans, lengths, update.loss.options)
        supervised = [
            item for item in items if item.plan.response_block or item.plan.rejected_block
        ]
        measured = StepMetrics()
        check = update.check is not None
        for part in self.trainers.update(supervised, totals, update.loss, update.lr, check):
            measured.merge(part)
        self.progress.version += 1
        # micro-batches and ranks add up to one update's loss; updates of a step average
        if (loss := measured.sums.pop("actor/distillation/loss", None)) is not None:
            measured.add_mean("actor/distillation/loss", loss, 1)
        counts = [
            plan_counts(plan, sample) for plan, sample in zip(plans, update.samples, strict=True)
        ]
        parts = [measured, *counts]
        if update.check is not None:
            update.check(parts)
        return parts

    def _finish(
        self, stage: Stage, collected: Collected, parts: Sequence[StepMetrics], bar: StageBar
    ) -> None:
        """Measure when due, report the step once, then save when due, so that every step in a
        checkpoint has been logged.
        """
        step, steps = self.progress.global_step, collected.steps
        measure = stage.on_policy and due(
            self.schedule.test_freq, self.progress.steps[stage.name], steps
        )
        results = self.rollouts.measure() if measure else []
        finished = FinishedStep(
            number=step,
            parts=parts,
            counters={
                **self.progress.metrics(),
                **self.rollouts.metrics(),
                **self.checkpoints.metrics(),
            },
            results=results,
            shown=collected.shown,
            on_policy=stage.on_policy,
            checksum=self.progress.sync.checksum,
        )
        self.reporter.step(bar, finished)
        if results or due(self.schedule.save_freq, step, steps):
            self.checkpoints.save(tau=mean_tau(results))

    def _measure(self, point: str) -> None:
        """Measure at a named point of the run, once: a resumed run keeps its earlier result."""
        if point in self.progress.results or not self.rollouts.benchmarks.prompts:
            return
        results = self.rollouts.measure()
        self.rollouts.prove_target()
        self.progress.results[point] = results
        self.reporter.benchmarks(self.progress.global_step, point, results)
        if point != "before":
            self.checkpoints.save(tau=mean_tau(results))

    def _stop_if_asked(self) -> None:
        if self.stopping():
            self.checkpoints.save(required=True)
            raise Stopped
