"""The order in which the loop does things, with everything that it drives made up."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.fakes import (
    FakeBar,
    FakeCheckpoints,
    FakeReporter,
    FakeRollouts,
    FakeStage,
    FakeTrainers,
    fake_loop,
    result,
)
from verl_opd.config.schema import Config
from verl_opd.controller.loop import due
from verl_opd.controller.progress import Progress
from verl_opd.controller.stages import OnPolicy, Supervised
from verl_opd.errors import ReplayError
from verl_opd.opd.metrics import StepMetrics, reduce_metrics
from verl_opd.signals import Stopped
from verl_opd.training.updates import mini_batches


@pytest.mark.parametrize(
    "fake", [FakeBar, FakeCheckpoints, FakeReporter, FakeRollouts, FakeTrainers]
)
def test_a_fake_has_the_methods_of_what_it_stands_for(fake: type):
    real = fake.__bases__[0]
    for name, method in vars(fake).items():
        if inspect.isfunction(method) and name != "__init__":
            ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (fake, real))
            assert list(ours.parameters) == list(theirs.parameters), name


@pytest.mark.parametrize("stage", [Supervised, OnPolicy])
def test_a_fake_stage_has_the_methods_of_a_stage(stage: type):
    for name in ("collect", "updates", "finish"):
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (FakeStage, stage))
        assert ours == theirs


@pytest.mark.parametrize(
    ("every", "step", "steps", "expected"),
    [
        (-1, 10, 1, False),
        (5, 5, 1, True),
        (5, 6, 1, False),
        (5, 10, 10, True),
        (25, 30, 10, True),
        (25, 40, 10, False),
        (7, 7, 10, True),
    ],
)
def test_a_frequency_that_no_update_step_hits_exactly_still_counts(
    every: int, step: int, steps: int, expected: bool
):
    assert due(every, step, steps) is expected


def test_one_pass_deals_the_samples_out_in_turn():
    assert mini_batches(5, 2, 1, seed=0, step=3) == [[0, 2, 4], [1, 3]]
    assert mini_batches(2, 16, 1, seed=0, step=3) == [[0], [1]]


def test_further_passes_are_whole_shuffled_and_repeatable():
    batches = mini_batches(12, 3, 3, seed=1, step=7)
    assert [len(batch) for batch in batches] == [4] * 9
    assert Counter(index for batch in batches for index in batch) == dict.fromkeys(range(12), 3)
    assert batches == mini_batches(12, 3, 3, seed=1, step=7)
    assert batches[3:6] != batches[6:]
    assert batches[3:] != mini_batches(12, 3, 3, seed=1, step=8)[3:]


def test_a_whole_run():
    """Engines start with the current draft; each stage is measured, and each measurement saved."""
    actions: list[str] = []
    sft, opd = FakeStage(actions, "sft", 1, on_policy=False), FakeStage(actions, "opd", 2)
    loop = fake_loop(actions, sft, opd)
    loop.run()

    def step(name: str, number: int, globally: int) -> list[str]:
        first = [f"collect {name} {number}", "sleep", f"updates {name} {number}"]
        return [*first, "train", "sync", f"report {globally}"]

    def measured(point: str, *saved: str) -> list[str]:
        return ["measure", "prove", f"report {point}", *saved]

    assert actions == [
        *["sleep", "sync"],
        *measured("before"),
        *step("sft", 0, 1),
        "finish sft",
        *measured("after_sft", "save, tau 1.5"),
        *step("opd", 0, 2),
        *step("opd", 1, 3),
        "finish opd",
        *measured("after_opd", "save, tau 1.5"),
        "save, tau None, required",
    ]
    assert loop.progress.steps == {"sft": 1, "opd": 2}
    assert loop.progress.version == 3
    assert set(loop.progress.results) == {"before", "after_sft", "after_opd"}


def test_a_run_of_supervised_steps_alone_needs_no_other_stage():
    actions: list[str] = []
    sft, opd = FakeStage(actions, "sft", 2, on_policy=False), FakeStage(actions, "opd", 0)
    loop = fake_loop(actions, sft, opd)
    loop.run()
    assert actions.count("train") == 2
    assert set(loop.progress.results) == {"before", "after_sft"}
    assert loop.progress.global_step == 2


def test_a_stage_that_a_checkpoint_completed_is_finished_too():
    """Its last step may have been saved before what it gathered was dropped."""
    actions: list[str] = []
    progress = Progress(steps=Counter({"sft": 1}))
    fake_loop(actions, FakeStage(actions, "sft", 1), progress=progress).run()
    assert "finish sft" in actions
    assert "collect sft 0" not in actions


@pytest.mark.parametrize(
    ("sft_done", "opd_done", "expected"),
    [(6, 4, []), (6, 2, ["after_opd"]), (3, 0, ["after_sft", "after_opd"])],
    ids=["nothing left", "on-policy stage made longer", "supervised stage made longer"],
)
def test_a_stage_that_trains_again_is_measured_again(
    sft_done: int, opd_done: int, expected: list[str]
):
    """A finished run continued with more steps must not report the result of the shorter one."""
    actions: list[str] = []
    old = {point: [result(1.0)] for point in ("before", "after_sft", "after_opd")}
    progress = Progress(steps=Counter({"sft": sft_done, "opd": opd_done}), results=old)
    stages = FakeStage(actions, "sft", 6, on_policy=False), FakeStage(actions, "opd", 4)
    fake_loop(actions, *stages, progress=progress).run()
    assert [text.removeprefix("report ") for text in actions if "report after" in text] == expected
    for point, (measured,) in progress.results.items():
        assert measured.tau == (1.5 if point in expected else 1.0)


def test_without_benchmarks_nothing_is_measured():
    actions: list[str] = []
    cfg = Config()
    fake_loop(actions, FakeStage(actions, "opd", 1), cfg=cfg, benchmarks=False).run()
    assert "measure" not in actions
    assert actions[-1] == "save, tau None, required"


@pytest.mark.parametrize(("accumulate", "steps", "sleeps"), [(1, 4, 4), (2, 4, 2), (3, 4, 2)])
def test_engines_sleep_only_before_an_update(accumulate: int, steps: int, sleeps: int):
    """S35: a step that only collects rollouts must leave the engines awake for the next one."""
    actions: list[str] = []
    stage = FakeStage(actions, "opd", steps, together=accumulate)
    loop = fake_loop(actions, stage, benchmarks=False)
    loop.run()
    assert actions[:2] == ["sleep", "sync"]
    order = [text.split()[0] for text in actions[2:] if text.split()[0] in ORDER]
    assert order.count("sleep") == order.count("train") == order.count("sync") == sleeps
    assert order.count("collect") == steps
    assert order[-3:] == ["sleep", "train", "sync"]
    assert "sleep,collect" not in ",".join(order)
    assert actions.count("advance") == steps - sleeps  # reports advance the bar for the others
    assert loop.progress.steps["opd"] == steps


ORDER = ("collect", "sleep", "train", "sync")


@pytest.mark.parametrize("measured", [True, False])
def test_a_step_is_logged_before_a_checkpoint_holds_it(measured: bool):
    """A process that dies while a checkpoint is written must not take a step's measurements along:
    the step would never run again.
    """
    actions: list[str] = []
    cfg = Config()
    cfg.trainer.save_freq, cfg.trainer.test_freq = 2, 4 if measured else -1
    cfg.trainer.val_before_train = False
    progress = Progress(steps=Counter({"opd": 3}))
    fake_loop(actions, FakeStage(actions, "opd", 4), cfg=cfg, progress=progress).run()
    after = actions[actions.index("train") + 2 :]
    if measured:
        assert after[:3] == ["measure", "report 4", "save, tau 1.5"]
    else:
        assert after[:2] == ["report 4", "save, tau None"]


def test_supervised_steps_are_not_measured_on_the_way():
    actions: list[str] = []
    cfg = Config()
    cfg.trainer.test_freq, cfg.trainer.val_before_train = 1, False
    stages = FakeStage(actions, "sft", 2, on_policy=False), FakeStage(actions, "opd", 2)
    fake_loop(actions, *stages, cfg=cfg).run()
    assert actions.count("measure") == 4  # after each stage, and after each on-policy step


def test_stopping_writes_a_checkpoint_first():
    actions: list[str] = []
    asked = iter([False, False, True])
    loop = fake_loop(actions, FakeStage(actions, "opd", 3), stopping=lambda: next(asked))
    with pytest.raises(Stopped):
        loop.run()
    assert actions[-2:] == ["report 1", "save, tau None, required"]


def test_losses_of_ranks_add_up_and_losses_of_updates_average():
    actions: list[str] = []
    loop = fake_loop(actions, FakeStage(actions, "opd", 1))
    loop.run()
    assert isinstance(loop.reporter, FakeReporter)
    (step,) = loop.reporter.steps
    assert reduce_metrics(step.parts)["actor/distillation/loss"] == 2.0
    assert reduce_metrics([*step.parts, *step.parts])["actor/distillation/loss"] == 2.0
    assert step.counters["training/update_step"] == 1
    assert step.shown.sample_id == "opd 1"


def test_an_update_with_a_check_is_replayed_and_its_measurements_are_given_to_the_check():
    actions: list[str] = []

    def check(measured: Sequence[StepMetrics]) -> None:
        assert "actor/distillation/loss" in reduce_metrics(measured)
        raise ReplayError("no replay")

    loop = fake_loop(actions, FakeStage(actions, "opd", 1, check=check))
    with pytest.raises(ReplayError):
        loop.run()
    assert actions[-1] == "train, check"
