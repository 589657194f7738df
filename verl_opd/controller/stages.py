"""The stages of a run. A stage has a name and a number of steps; it collects samples, and makes the
updates that follow from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from verl_opd.config.schema import Config
from verl_opd.controller.position import Position
from verl_opd.controller.progress import OPD, SFT
from verl_opd.controller.rollouts import Rollouts
from verl_opd.controller.trainers import Trainers
from verl_opd.drafts import get_family
from verl_opd.errors import ReplayError
from verl_opd.opd.losses import LossSettings
from verl_opd.opd.metrics import StepMetrics, reduce_metrics
from verl_opd.opd.plan import (
    BlockPlan,
    TrainItem,
    item_rng,
    plan_opd,
    plan_sft,
    restrict_labels,
)
from verl_opd.opd.replay_check import diagnose
from verl_opd.opd.trace import RolloutSample
from verl_opd.report.acceptance import rollout_metrics
from verl_opd.training.optim import lr_at
from verl_opd.training.updates import (
    Reward,
    mini_batches,
    opd_loss,
    sft_loss,
    with_policy_terms,
)


@dataclass
class Collected:
    """What a stage collected for its next updates."""

    batches: list[list[RolloutSample]]  # to learn from, in the order of collection; not empty
    metrics: list[StepMetrics]  # one entry a rollout step
    steps: int  # steps of the stage that this took

    @property
    def samples(self) -> list[RolloutSample]:
        """Those of all batches."""
        return list(chain(*self.batches))

    @property
    def shown(self) -> RolloutSample:
        """The one for samples.log."""
        return self.batches[-1][0]


@dataclass(kw_only=True)
class Update:
    """One optimiser step."""

    samples: Sequence[RolloutSample]  # what it learns from
    items: Sequence[TrainItem]  # one a sample, same order
    loss: LossSettings
    lr: float  # learning rate
    # the replay check: the update also compares replayed slots with the engine's proposals, and
    # this function raises when its measurements do not agree
    check: Callable[[Sequence[StepMetrics]], None] | None = None


class Stage(Protocol):
    """A part of a run. `step` counts the steps of the stage, from 0."""

    name: str
    steps: int  # in the whole run
    # whether its samples show what the draft does: measured and watched for symptoms on the way
    on_policy: bool

    def collect(self, step: int, tick: Callable[[], None]) -> Collected:
        """Samples for the updates of step `step` and, with accumulation, of the steps that follow;
        `tick` is called after each of them but the last.
        """

    def updates(self, step: int, collected: Collected) -> Iterator[Update]:
        """The optimiser steps that follow step `step`, the last one that was collected. Each is
        made when the one before it is done.
        """

    def finish(self) -> None:
        """Drop what only the steps of this stage need; called when they are all done."""


@dataclass(frozen=True)
class Blocks:
    """What plans depend on beside the configuration."""

    size: int  # B: anchor and proposals
    # tokens of a draft vocabulary that is not the target's; labels outside it teach nothing
    proposable: frozenset[int] | None = None

    def item(self, sample: RolloutSample, plan: BlockPlan) -> TrainItem:
        return TrainItem(
            sample_id=sample.sample_id,
            prompt_ids=sample.prompt_ids,
            response_ids=sample.response_ids,
            plan=restrict_labels(plan, self.proposable),
            teacher=sample.teacher,
        )


@dataclass(kw_only=True)
class Supervised:
    """Whole blocks at sampled anchors: of given conversations, or of text that the target writes
    during the run, without drafting where engines support that.
    """

    cfg: Config
    blocks: Blocks
    rollouts: Rollouts
    position: Position
    steps: int  # planned
    name: str = field(default=SFT, init=False)  # of the stage
    # whether its samples show what the draft met
    on_policy: bool = field(default=False, init=False)

    def collect(self, step: int, tick: Callable[[], None]) -> Collected:
        metrics: list[StepMetrics] = []
        if self.position.conversations is None:
            rolled_out = self.rollouts.next_batch(drafting=False)
            self.position.progress.pool.extend(rolled_out)
            metrics.append(rollout_metrics(rolled_out, self.cfg.data.max_response_length))
        batches = [self._samples(index) for index in self._indices(step)]
        return Collected(batches, metrics, steps=1)

    def updates(self, step: int, collected: Collected) -> Iterator[Update]:
        sft = self.cfg.sft
        total = self.steps * sft.updates_per_step
        for index, batch in zip(self._indices(step), collected.batches, strict=True):
            yield Update(
                samples=batch,
                items=[self.blocks.item(sample, self._plan(index, sample)) for sample in batch],
                loss=sft_loss(self.cfg),
                lr=lr_at(index, total, self.cfg.optim, sft.lr),
            )

    def finish(self) -> None:
        """Empty the pool of text."""
        self.position.progress.pool.clear()

    def _indices(self, step: int) -> range:
        """Which updates of the stage belong to step `step`."""
        per_step = self.cfg.sft.updates_per_step
        return range(step * per_step, (step + 1) * per_step)

    def _samples(self, index: int) -> list[RolloutSample]:
        """What update `index` of the stage learns from: the next conversations, or a draw from all
        text so far.
        """
        if self.position.conversations is not None:
            return self.position.conversations.next_batch()
        pool = self.position.progress.pool
        count = min(self.cfg.sft.samples_per_update, len(pool))
        rng = item_rng(self.cfg.trainer.seed, index, "pool")
        return [pool[i] for i in sorted(rng.choice(len(pool), size=count, replace=False))]

    def _plan(self, index: int, sample: RolloutSample) -> BlockPlan:
        return plan_sft(
            sample,
            block_size=self.blocks.size,
            anchors_per_sample=self.cfg.sft.anchors_per_sample,
            rng=item_rng(self.cfg.trainer.seed, index, sample.sample_id),
        )


@dataclass(kw_only=True)
class OnPolicy:
    """The states that the draft meets while the target verifies its proposals."""

    cfg: Config
    blocks: Blocks
    rollouts: Rollouts
    trainers: Trainers  # score samples for the policy gradient
    position: Position
    steps: int  # planned rollout steps
    reward: Reward | None  # of opd.reward
    diagnostics: dict[str, object]  # reported when the replay check fails
    name: str = field(default=OPD, init=False)  # of the stage
    on_policy: bool = field(default=True, init=False)  # whether its samples show what the draft met

    def collect(self, step: int, tick: Callable[[], None]) -> Collected:
        """Rollouts up to the next multiple of trainer.update_accumulation_steps, or to the end."""
        accumulate = self.cfg.trainer.update_accumulation_steps
        end = min((step // accumulate + 1) * accumulate, self.steps)
        batches: list[list[RolloutSample]] = []
        for _ in range(step, end):
            if batches:
                tick()
            batches.append(self.rollouts.next_batch(score=True))
        length = self.cfg.data.max_response_length
        metrics = [rollout_metrics(batch, length) for batch in batches]
        return Collected(batches, metrics, steps=end - step)

    def updates(self, step: int, collected: Collected) -> Iterator[Update]:
        """All samples, `update_epochs` times, in `updates_per_step` mini-batches."""
        trainer, samples = self.cfg.trainer, collected.samples
        items = self._items(samples)
        per_step = trainer.updates_per_step * trainer.update_epochs
        total = math.ceil(self.steps / trainer.update_accumulation_steps) * per_step
        index = step // trainer.update_accumulation_steps  # of the group of steps that ends here
        batches = mini_batches(
            len(items), trainer.updates_per_step, trainer.update_epochs, trainer.seed, step + 1
        )
        check = self._check_replay if self._check_due(index, samples) else None
        for offset, batch in enumerate(batches):
            yield Update(
                samples=[samples[i] for i in batch],
                items=[items[i] for i in batch],
                loss=opd_loss(self.cfg),
                lr=lr_at(index * per_step + offset, total, self.cfg.optim),
                check=check if offset == 0 else None,
            )

    def finish(self) -> None:
        """Nothing is kept between steps."""

    def _items(self, samples: Sequence[RolloutSample]) -> list[TrainItem]:
        items = [self.blocks.item(sample, self._plan(sample)) for sample in samples]
        opd = self.cfg.opd
        if opd.policy_gradient:
            scores = self.trainers.score(items)
            items = with_policy_terms(items, samples, scores, self.reward, opd.reward_weight)
        return items

    def _plan(self, sample: RolloutSample) -> BlockPlan:
        return plan_opd(
            sample,
            self.cfg.opd,
            block_size=self.blocks.size,
            seed=self.cfg.trainer.seed,
            autoregressive=get_family(self.cfg.draft.family).autoregressive,
        )

    def _check_due(self, index: int, samples: Sequence[RolloutSample]) -> bool:
        """Whether the updates of group `index` begin with a replay check. Replayed slots can be
        compared only under the weights, and in the block, that the engine drafted with.
        """
        every, version = self.cfg.opd.replay_check_freq, self.position.progress.version
        same_block = self.blocks.size == self.cfg.rollout.num_speculative_tokens + 1
        fresh = all(sample.draft_version == version for sample in samples)
        return every > 0 and same_block and fresh and index % every == 0

    def _check_replay(self, measured: Sequence[StepMetrics]) -> None:
        """ReplayError when training does not replay what the engine drafted."""
        opd, sync = self.cfg.opd, self.position.progress.sync
        known = {
            "engine draft version": sync.version,
            "checksum": sync.checksum,
            **self.diagnostics,
        }
        if problem := diagnose(
            reduce_metrics(measured), opd.max_replay_mismatch, opd.max_replay_mismatch_raw, known
        ):
            raise ReplayError(problem)
