"""What each stage collects, and the updates that follow from it; engines and ranks are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes import FakeRollouts, FakeTrainers
from tests.rollouts import worked_sample
from verl_opd.config.schema import Config
from verl_opd.controller.position import Position
from verl_opd.controller.progress import Progress
from verl_opd.controller.stages import Blocks, Collected, OnPolicy, Supervised
from verl_opd.data.loader import Loader
from verl_opd.data.prompts import Prompt
from verl_opd.errors import ReplayError
from verl_opd.opd.metrics import StepMetrics
from verl_opd.opd.trace import RolloutSample
from verl_opd.training.optim import lr_at


class Rolled(FakeRollouts):
    """The worked example, `count` times a batch, under a new name each time."""

    def __init__(self, actions: list[str], count: int = 2) -> None:
        super().__init__(actions)
        self.count, self.made = count, 0

    def next_batch(self, *, drafting: bool = True, score: bool = False) -> list[RolloutSample]:
        super().next_batch(drafting=drafting, score=score)
        self.made += self.count
        return [named(f"{i}") for i in range(self.made - self.count, self.made)]


def named(name: str) -> RolloutSample:
    found = worked_sample()
    object.__setattr__(found, "sample_id", name)
    return found


def position(**fields: Any) -> Position:
    return Position(Loader([Prompt("a", "t", (1,), ())], 1, False, 0), Progress(), **fields)


def supervised(cfg: Config, actions: list[str], at: Position) -> Supervised:
    return Supervised(
        cfg=cfg, blocks=Blocks(4), rollouts=Rolled(actions), position=at, steps=cfg.sft.steps
    )


def on_policy(
    cfg: Config, actions: list[str], steps: int, reward: Callable[..., float] | None = None
) -> OnPolicy:
    class Trainers(FakeTrainers):
        def score(self, items: Any) -> dict[str, tuple[float, ...]]:
            return {item.sample_id: (-0.5,) * len(item.plan.response_label) for item in items}

    return OnPolicy(
        cfg=cfg,
        blocks=Blocks(4),
        rollouts=Rolled(actions),
        trainers=Trainers([]),
        position=position(),
        steps=steps,
        reward=reward,
        diagnostics={"mask_token_id": 3},
    )


def nothing() -> None:
    """No bar to advance."""


@pytest.fixture
def cfg() -> Config:
    cfg = Config()
    cfg.rollout.num_speculative_tokens = 3
    cfg.sft.steps, cfg.sft.updates_per_step, cfg.sft.samples_per_update = 4, 2, 3
    return cfg


def test_supervised_updates_draw_from_all_text_so_far_without_drafting(cfg: Config):
    actions: list[str] = []
    stage = supervised(cfg, actions, position())
    first = stage.collect(0, nothing)
    assert [len(update.samples) for update in stage.updates(0, first)] == [2, 2]  # all there is
    second = stage.collect(1, nothing)
    updates = list(stage.updates(1, second))
    assert actions == ["roll out, drafting False, score False"] * 2
    assert [len(update.samples) for update in updates] == [3, 3]
    assert [s.sample_id for s in stage.position.progress.pool] == ["0", "1", "2", "3"]
    assert [update.lr for update in updates] == [lr_at(i, 8, cfg.optim) for i in (2, 3)]
    assert all(update.check is None for update in updates)
    assert second.shown == updates[-1].samples[0]
    again = supervised(cfg, [], stage.position)
    repeated = [s.sample_id for index in (2, 3) for s in again._samples(index)]
    assert repeated == [s.sample_id for s in second.samples], "a resumed run draws the same"


def test_given_conversations_need_no_rollout(cfg: Config):
    actions: list[str] = []
    given = Loader([named(str(i)) for i in range(7)], 3, False, 0)
    stage = supervised(cfg, actions, position(conversations=given))
    collected = stage.collect(0, nothing)
    names = [[s.sample_id for s in update.samples] for update in stage.updates(0, collected)]
    assert names == [["0-0", "0-1", "0-2"], ["0-3", "0-4", "0-5"]]
    assert actions == collected.metrics == stage.position.progress.pool == []


def test_each_supervised_update_learns_from_its_own_batch(cfg: Config):
    """Batches may differ in size."""
    batches = [[named("a")], [named("b"), named("c")]]
    updates = supervised(cfg, [], position()).updates(0, Collected(batches, [], 1))
    assert [update.samples for update in updates] == batches


def test_the_pool_of_text_is_emptied_by_the_stage_that_draws_from_it(cfg: Config):
    stage = supervised(cfg, [], position())
    stage.collect(0, nothing)
    assert stage.position.progress.pool
    other = on_policy(cfg, [], 1)
    other.position = stage.position
    other.finish()
    assert stage.position.progress.pool
    stage.finish()
    assert stage.position.progress.pool == []


@pytest.mark.parametrize(
    ("start", "rollouts"), [(0, 3), (1, 2), (3, 1)], ids=["whole", "resumed", "the rest"]
)
def test_rollouts_are_accumulated_up_to_a_multiple_or_the_end(
    cfg: Config, start: int, rollouts: int
):
    cfg.trainer.update_accumulation_steps = 3
    actions: list[str] = []
    stage = on_policy(cfg, actions, steps=4)
    collected = stage.collect(start, lambda: actions.append("tick"))
    rolled_out = "roll out, drafting True, score True"
    assert actions == [rolled_out, *["tick", rolled_out] * (rollouts - 1)]
    assert collected.steps == len(collected.metrics) == rollouts
    assert [s.sample_id for s in collected.samples] == [str(i) for i in range(2 * rollouts)]
    assert collected.shown.sample_id == str(2 * rollouts - 2)


def test_updates_follow_one_schedule_over_the_whole_stage(cfg: Config):
    cfg.trainer.update_accumulation_steps = cfg.trainer.updates_per_step = 2
    cfg.trainer.update_epochs = 2
    stage = on_policy(cfg, [], steps=5)
    rates = []
    step = 0
    while step < stage.steps:
        collected = stage.collect(step, nothing)
        step += collected.steps
        updates = list(stage.updates(step - 1, collected))
        rates += [update.lr for update in updates]
        trained = [s.sample_id for update in updates for s in update.samples]
        assert sorted(trained) == sorted([s.sample_id for s in collected.samples] * 2)
    assert rates == [lr_at(i, 12, cfg.optim) for i in range(12)]


def checks(stage: OnPolicy, groups: int) -> list[list[bool]]:
    """Which updates of each step are checked."""
    return [
        [update.check is not None for update in stage.updates(i, stage.collect(i, nothing))]
        for i in range(groups)
    ]


def test_the_first_update_of_every_nth_group_is_checked(cfg: Config):
    cfg.trainer.updates_per_step, cfg.opd.replay_check_freq = 2, 2
    assert checks(on_policy(cfg, [], 3), 3) == [[True, False], [False, False], [True, False]]
    cfg.opd.replay_check_freq = -1
    assert checks(on_policy(cfg, [], 1), 1) == [[False, False]]


def test_only_fresh_samples_in_blocks_of_the_engine_can_be_checked(cfg: Config):
    stale = on_policy(cfg, [], 1)
    stale.position.progress.version = 1
    assert checks(stale, 1) == [[False]]
    cfg.rollout.num_speculative_tokens = 4
    assert checks(on_policy(cfg, [], 1), 1) == [[False]]


def test_a_failed_check_ends_the_run_with_what_is_known(cfg: Config):
    stage = on_policy(cfg, [], 1)
    (update,) = stage.updates(0, stage.collect(0, nothing))
    assert update.check is not None
    measured = StepMetrics()
    measured.add_mean("opd/replay_mismatch", 0, 4)
    measured.add_mean("opd/replay_mismatch_raw", 0, 4)
    measured.add_sum("opd/replay_slots", 4)
    update.check([measured])
    measured.add_mean("opd/replay_mismatch", 4, 4)
    with pytest.raises(ReplayError, match=r"engine draft version 0.*mask_token_id 3"):
        update.check([measured])


def test_policy_terms_are_added_when_they_are_configured(cfg: Config):
    plain = on_policy(cfg, [], 1)
    (update,) = plain.updates(0, plain.collect(0, nothing))
    assert {item.old_logprobs for item in update.items} == {()}
    cfg.opd.policy_gradient, cfg.opd.reward_weight = True, 2.0
    stage = on_policy(cfg, [], 1, reward=lambda prompt, response, source: 1.0)
    (update,) = stage.updates(0, stage.collect(0, nothing))
    for item in update.items:
        assert item.old_logprobs == (-0.5,) * len(item.plan.response_label) != ()
        assert item.reward == 0.0  # all rewards are the mean


def test_labels_outside_a_draft_vocabulary_are_left_out(cfg: Config):
    stage = on_policy(cfg, [], 1)
    (whole,) = stage.updates(0, stage.collect(0, nothing))
    label = whole.items[0].plan.response_label[0]
    stage.blocks = Blocks(4, frozenset([label]))
    (part,) = stage.updates(0, stage.collect(0, nothing))
    assert set(part.items[0].plan.response_label) == {label}
    assert set(whole.items[0].plan.response_label) > {label}
