"""The one training loop: rollout -> plan -> update -> sync, for warm-up and for on-policy steps,
with validation and checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_opd.config.schema import Config
from verl_opd.controller.benchmarks import Benchmarks
from verl_opd.controller.faults import Stopped
from verl_opd.controller.fleet import Fleet
from verl_opd.controller.progress import Progress, SnapshotWriter
from verl_opd.controller.trainers import Trainers
from verl_opd.controller.updates import (
    Reward,
    mini_batches,
    opd_loss,
    sft_loss,
    with_policy_terms,
)
from verl_opd.data.loader import Loader
from verl_opd.data.prompts import Prompt
from verl_opd.drafts import get_family
from verl_opd.errors import CheckpointError, ConfigError, ReplayError, RolloutError
from verl_opd.opd.losses import LossSettings, stream_totals
from verl_opd.opd.metrics import StepMetrics, reduce_metrics
from verl_opd.opd.plan import (
    BlockPlan,
    TrainItem,
    item_rng,
    plan_counts,
    plan_opd,
    plan_warmup,
    restrict_labels,
)
from verl_opd.opd.replay_check import diagnose
from verl_opd.opd.trace import RolloutSample, is_finite
from verl_opd.report.acceptance import BenchmarkResult, rollout_metrics
from verl_opd.report.console import Console, Phase
from verl_opd.report.diagnosis import Diagnosis, checklist
from verl_opd.report.sample_log import SampleLog
from verl_opd.report.timing import Stopwatch
from verl_opd.report.trackers import Trackers
from verl_opd.snapshot import DraftSnapshot
from verl_opd.training.checkpoint import CheckpointStore, checkpoint_bytes
from verl_opd.training.optim import lr_at

_UNUSABLE_SHARE = 0.05


def due(every: int, step: int, rollouts: int) -> bool:
    """Whether one of the last `rollouts` steps, up to `step`, is a multiple of `every` (-1 =
    never).
    """
    return every > 0 and step // every > (step - rollouts) // every


def mean_tau(results: Sequence[BenchmarkResult]) -> float | None:
    """What `best` is chosen by: tau averaged over the benchmarks that drafted at all."""
    taus = [result.tau for result in results if result.tau is not None]
    return sum(taus) / len(taus) if taus else None


@dataclass
class Loop:
    """Everything a run holds while it trains. `run` returns when all steps are done; it can be
    resumed from any checkpoint it wrote.
    """

    cfg: Config
    block_size: int
    total_steps: int
    fleet: Fleet
    trainers: Trainers
    loader: Loader[Prompt]
    benchmarks: Benchmarks
    store: CheckpointStore
    trackers: Trackers
    console: Console
    snapshots: SnapshotWriter
    progress: Progress
    identity: dict[str, Any]
    facts: dict[
        str, object
    ]  # what a diagnosis should show: layer ids, mask token and the like, as configured
    sample_log: SampleLog
    # what warm-up learns from instead of fresh target text
    conversations: Loader[RolloutSample] | None = None
    reward: Reward | None = None
    proposable: frozenset[int] | None = (
        # tokens of a draft vocabulary that is not the target's; labels outside it teach nothing
        None
    )
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    clock: Stopwatch = field(default_factory=Stopwatch)
    queue: list[RolloutSample] = field(default_factory=list)
    stopping: Callable[[], bool] = lambda: False
    failed_saves: int = 0
    dropped: int = 0
    # global step and number of validated stages of the newest checkpoint
    saved: tuple[int, int] | None = None

    def run(self) -> None:
        """Train to the end. Stopped, after a checkpoint, when `stopping` says so
        between two steps.
        """
        self.fleet.snapshot = self._snapshot
        self._stop_if_asked()
        with self.clock.part("update_weights"):
            self.fleet.sleep()
            self._sync()
        if self.cfg.trainer.val_before_train:
            self._validate_stage("before")
        warmup_steps = self.cfg.sft.steps
        if self.progress.warmup_step < warmup_steps:
            self.progress.results.pop(
                "after_warmup", None
            )  # a finished phase that is made longer is measured again
            with self.console.phase("warm-up", warmup_steps, self.progress.warmup_step) as bar:
                self._warmup(bar)
        if warmup_steps:
            self._validate_stage("after_warmup")
        if self.progress.opd_step < self.total_steps:
            self.progress.results.pop("after_opd", None)
            with self.console.phase("OPD", self.total_steps, self.progress.opd_step) as bar:
                self._opd(bar)
        if self.total_steps:
            self._validate_stage("after_opd")
        self._save(required=True)

    # -- warm-up -----------------------------------------------------------------------------------

    def _warmup(self, bar: Phase) -> None:
        """Train whole blocks on given conversations, or on text that the target writes, without
        drafting where the engine can.
        """
        self.fleet.set_drafting(False)
        while self.progress.warmup_step < self.cfg.sft.steps:
            self._stop_if_asked()
            metrics: list[StepMetrics] = []
            if self.conversations is None:
                samples = self._rollout()
                self.progress.pool.extend(samples)
                metrics.append(rollout_metrics(samples, self.cfg.data.max_response_length))
            self.fleet.sleep()
            with self.clock.part("update_actor"):
                for index in range(self.cfg.sft.updates_per_step):
                    samples = (
                        self._warmup_samples(index)
                        if self.conversations is None
                        else self.conversations.next_batch()
                    )
                    metrics.extend(self._warmup_update(index, samples))
            self.progress.warmup_step += 1
            with self.clock.part("update_weights"):
                self._sync()
            self._finish_step(bar, metrics, samples[0])
        self.fleet.set_drafting(True)
        self.progress.pool.clear()

    def _warmup_samples(self, index: int) -> list[RolloutSample]:
        """What update `index` of this step learns from, drawn from all text so far."""
        pool, sft = self.progress.pool, self.cfg.sft
        count = min(sft.samples_per_update, len(pool))
        chosen = item_rng(self.cfg.trainer.seed, self._warmup_index(index), "pool").choice(
            len(pool), size=count, replace=False
        )
        return [pool[i] for i in sorted(chosen)]

    def _warmup_index(self, index: int) -> int:
        return self.progress.warmup_step * self.cfg.sft.updates_per_step + index

    def _warmup_update(self, index: int, samples: Sequence[RolloutSample]) -> list[StepMetrics]:
        sft, seed, update = self.cfg.sft, self.cfg.trainer.seed, self._warmup_index(index)
        plans = [
            restrict_labels(
                plan_warmup(
                    sample,
                    block_size=self.block_size,
                    anchors_per_sample=sft.anchors_per_sample,
                    rng=item_rng(seed, update, sample.sample_id),
                ),
                self.proposable,
            )
            for sample in samples
        ]
        total = self.cfg.sft.steps * sft.updates_per_step
        lr = lr_at(update, total, self.cfg.optim, sft.lr)
        items = [self._item(sample, plan) for sample, plan in zip(samples, plans, strict=True)]
        return self._update(samples, items, sft_loss(self.cfg), lr)

    def _item(self, sample: RolloutSample, plan: BlockPlan) -> TrainItem:
        return TrainItem(
            sample_id=sample.sample_id,
            prompt_ids=sample.prompt_ids,
            response_ids=sample.response_ids,
            plan=plan,
            teacher=sample.teacher,
        )

    # -- on-policy steps ---------------------------------------------------------------------------

    def _opd(self, bar: Phase) -> None:
        accumulate = self.cfg.trainer.update_accumulation_steps
        collected: list[StepMetrics] = []
        rollouts = 0
        while self.progress.opd_step < self.total_steps:
            if not self.queue:
                self._stop_if_asked()
            samples = self._rollout(score=True)
            self.queue.extend(samples)
            collected.append(rollout_metrics(samples, self.cfg.data.max_response_length))
            self.progress.opd_step += 1
            rollouts += 1
            if self.progress.opd_step % accumulate and self.progress.opd_step < self.total_steps:
                bar.advance({})
                continue
            self.fleet.sleep()
            with self.clock.part("update_actor"):
                collected.extend(self._opd_updates())
            self.queue = []
            with self.clock.part("update_weights"):
                self._sync()
            self._finish_step(bar, collected, samples[0], rollouts)
            collected, rollouts = [], 0

    def _opd_updates(self) -> list[StepMetrics]:
        """The queued samples, `update_epochs` times, in `updates_per_step` mini-batches of one
        optimiser step each.
        """
        trainer = self.cfg.trainer
        items = [self._item(sample, self._opd_plan(sample)) for sample in self.queue]
        if self.cfg.opd.policy_gradient:
            items = with_policy_terms(
                items,
                self.queue,
                self.trainers.score(items),
                self.reward,
                self.cfg.opd.reward_weight,
            )
        per_step = trainer.updates_per_step * trainer.update_epochs
        total = math.ceil(self.total_steps / trainer.update_accumulation_steps) * per_step
        first = (
            math.ceil(self.progress.opd_step / trainer.update_accumulation_steps) - 1
        ) * per_step
        batches = mini_batches(
            len(items),
            trainer.updates_per_step,
            trainer.update_epochs,
            trainer.seed,
            self.progress.opd_step,
        )
        metrics: list[StepMetrics] = []
        for index, batch in enumerate(batches):
            lr = lr_at(first + index, total, self.cfg.optim)
            check = index == 0 and self._replay_check_due()
            metrics.extend(
                self._update(
                    [self.queue[i] for i in batch],
                    [items[i] for i in batch],
                    opd_loss(self.cfg),
                    lr,
                    check,
                )
            )
            if check:
                self._check_replay(metrics)
        return metrics

    def _opd_plan(self, sample: RolloutSample) -> BlockPlan:
        plan = plan_opd(
            sample,
            self.cfg.opd,
            block_size=self.block_size,
            seed=self.cfg.trainer.seed,
            autoregressive=get_family(self.cfg.draft.family).autoregressive,
        )
        return restrict_labels(plan, self.proposable)

    def _replay_check_due(self) -> bool:
        """Replayed slots say something only under the weights, and in the block, that the engine
        drafted with.
        """
        every, accumulate = (
            self.cfg.opd.replay_check_freq,
            self.cfg.trainer.update_accumulation_steps,
        )
        same_block = self.block_size == self.cfg.rollout.num_speculative_tokens + 1
        fresh = all(sample.draft_version == self.progress.version for sample in self.queue)
        return (
            every > 0
            and same_block
            and fresh
            and (math.ceil(self.progress.opd_step / accumulate) - 1) % every == 0
        )

    def _check_replay(self, metrics: Sequence[StepMetrics]) -> None:
        opd = self.cfg.opd
        facts = {
            "engine draft version": self.progress.sync.version,
            "checksum": self.progress.sync.checksum,
            **self.facts,
        }
        if problem := diagnose(
            reduce_metrics(metrics), opd.max_replay_mismatch, opd.max_replay_mismatch_raw, facts
        ):
            raise ReplayError(problem)

    # -- shared ------------------------------------------------------------------------------------

    def _rollout(self, score: bool = False) -> list[RolloutSample]:
        """The next batch of prompts, rolled out; `score`: with the scores of teacher servers, if
        there are any.
        """
        rollout, data = self.cfg.rollout, self.cfg.data
        prompts = self.loader.next_batch()
        sampling = {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "max_tokens": data.max_response_length,
        }
        with self.clock.part("gen"):
            return self._keep_finite(
                self.fleet.generate(prompts, sampling, self.progress.version, score)
            )

    def _update(
        self,
        samples: Sequence[RolloutSample],
        items: Sequence[TrainItem],
        settings: LossSettings,
        lr: float,
        check_replay: bool = False,
    ) -> list[StepMetrics]:
        """One optimiser step. The normalisers are counted here, over the whole mini-batch, so no
        split can change the result.
        """
        lengths = [len(sample.response_ids) for sample in samples]
        totals = stream_totals([item.plan for item in items], lengths, settings.options)
        supervised = [
            item for item in items if item.plan.response_block or item.plan.rejected_block
        ]
        update = StepMetrics()
        for part in self.trainers.update(supervised, totals, settings, lr, check_replay):
            update.merge(part)
        self.progress.version += 1
        # micro-batches and ranks add up to one update's loss; updates of a step average
        if (loss := update.sums.pop("actor/distillation/loss", None)) is not None:
            update.add_mean("actor/distillation/loss", loss, 1)
        counts = [
            plan_counts(item.plan, sample) for item, sample in zip(items, samples, strict=True)
        ]
        return [update, *counts]

    def _snapshot(self) -> DraftSnapshot:
        return self.trainers.snapshot(self.snapshots.path, self.progress.version)

    def _sync(self) -> None:
        self.progress.sync = self.fleet.sync(self._snapshot())
        self.snapshots.clear()

    def _keep_finite(self, samples: list[RolloutSample]) -> list[RolloutSample]:
        """`samples` without those that carry a log-prob that is no number; RolloutError when that
        is more than a twentieth of them, and of one.
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
            self.console.say(
                f"dropped {dropped} of {len(samples)} samples: log-probs that are not numbers"
            )
        return kept

    def _stop_if_asked(self) -> None:
        if self.stopping():
            self._save(required=True)
            raise Stopped

    def _finish_step(
        self, bar: Phase, parts: list[StepMetrics], shown: RolloutSample, rollouts: int = 1
    ) -> None:
        """Validate when due, log the step, of `rollouts` rollout steps, once under the raw step
        number, then save when due: a step that a checkpoint holds has been logged. `shown` goes to
        samples.log.
        """
        step, trainer = self.progress.global_step, self.cfg.trainer
        results: list[BenchmarkResult] = []
        extra: dict[str, float] = {}
        if self.progress.opd_step and due(trainer.test_freq, self.progress.opd_step, rollouts):
            results = self._validate()
            for result in results:
                extra.update(result.metrics())
        report = self.progress.sync
        extra.update(
            {
                "opd/weight_sync/version": report.version,
                "opd/weight_sync/seconds": report.seconds,
                "opd/weight_sync/bytes": report.bytes,
                "opd/weight_sync/draft_tensor_count": report.tensor_count,
                "training/global_step": step,
                "training/update_step": self.progress.version,
                "training/epoch": self.loader.epoch,
                "training/failed_checkpoints": self.failed_saves,
                "data/dropped_samples": self.dropped,
                **self.fleet.recorder_metrics(),
                **self.clock.lap(),
            }
        )
        metrics = reduce_metrics(parts, extra)
        if "perf/total_num_tokens" in metrics:
            metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / metrics["timing_s/step"]
        self.trackers.log(step, metrics)
        self.sample_log.write(step, shown)
        bar.advance(metrics)
        if results or due(trainer.save_freq, step, rollouts):
            self._save(tau=mean_tau(results))
        if self.progress.opd_step:
            facts = {**self.facts, "checksum in engine": report.checksum}
            for symptom in self.diagnosis.look(metrics):
                self.console.say(checklist(symptom, metrics, facts))

    def _validate(self) -> list[BenchmarkResult]:
        with self.clock.part("testing"):
            return self.benchmarks.run(self.fleet, self.progress.version)

    def _validate_stage(self, stage: str) -> None:
        """Validate at a named point of the run, once: a resumed run keeps the result it already
        has.
        """
        if stage in self.progress.results or not self.benchmarks.prompts:
            return
        results = self._validate()
        self.fleet.prove_target()
        self.progress.results[stage] = results
        self.trackers.log(
            self.progress.global_step,
            {name: value for result in results for name, value in result.metrics().items()},
        )
        self.console.acceptance(
            f"held-out accept length, {stage.replace('_', ' ')}", {stage: results}
        )
        if stage != "before":
            self._save(tau=mean_tau(results))

    def _save(self, tau: float | None = None, required: bool = False) -> None:
        """Write a checkpoint of this point unless there is one; with a held-out tau, make it `best`
        when it is. One that cannot be written (a full disk) is said and counted, and training goes
        on; a `required` one raises.
        """
        try:
            self._write(tau)
        except (CheckpointError, ConfigError, OSError) as error:
            if required:
                raise
            self.failed_saves += 1
            self.console.say(f"no checkpoint of step {self.progress.global_step}: {error}")

    def _write(self, tau: float | None) -> None:
        step = self.progress.global_step
        point = (step, len(self.progress.results))
        with self.clock.part("save_checkpoint"):
            if self.saved != point:
                directory = self.store.begin(step, checkpoint_bytes(self.trainers.draft_parameters))
                self.trainers.save(directory / "dcp")
                self.trainers.export(directory / "draft")
                given = None if self.conversations is None else self.conversations.state()
                state = {
                    "progress": self.progress.state(),
                    "data": self.loader.state(),
                    "conversations": given,
                    "identity": self.identity,
                }
                self.store.commit(step, state)
                self.saved = point
            if tau is not None:
                self.store.mark_best(step, tau)
