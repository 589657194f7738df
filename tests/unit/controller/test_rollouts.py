"""Batches of samples as stages get them, on a fleet that is made up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes import FakeTrainers
from verl_opd.config.schema import Config
from verl_opd.controller.benchmarks import Benchmarks
from verl_opd.controller.position import Position
from verl_opd.controller.progress import Progress
from verl_opd.controller.rollouts import Rollouts
from verl_opd.data.loader import Loader
from verl_opd.data.prompts import Prompt
from verl_opd.errors import RolloutError
from verl_opd.opd.trace import RolloutSample, VerifyStep, VerifyTrace
from verl_opd.report.timing import Stopwatch


def with_logprob(name: str, value: float) -> RolloutSample:
    trace = VerifyTrace(2, (VerifyStep(0, (7,), 0, 1, (value,)),))
    return RolloutSample(
        sample_id=name,
        data_source="t",
        prompt_ids=(1,),
        response_ids=(2, 3),
        trace=trace,
        draft_version=0,
        finish_reason="stop",
    )


class MadeUpFleet:
    """Answers every call with the next of `answers`; notes switches of drafting and calls."""

    def __init__(self, *answers: list[RolloutSample]) -> None:
        self._answers, self.calls = iter(answers), []

    def set_drafting(self, on: bool) -> bool:
        self.calls.append(on)
        return True

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: dict[str, Any],
        version: int,
        score: bool = False,
    ) -> list[RolloutSample]:
        self.calls.append((sampling["temperature"], version, score))
        return next(self._answers)


def rollouts(fleet: Any) -> Rollouts:
    prompts = [Prompt("a", "t", (1,), ())]
    cfg = Config()
    cfg.rollout.temperature = 0.7
    snapshots: Any = SimpleNamespace(path=Path("nowhere"))
    return Rollouts(
        cfg=cfg,
        fleet=fleet,
        trainers=FakeTrainers([]),
        snapshots=snapshots,
        position=Position(Loader(prompts, 1, False, 0), Progress(version=3)),
        benchmarks=Benchmarks({"b": prompts}, 8),
        clock=Stopwatch(),
    )


def test_one_bad_sample_is_dropped_and_counted_and_many_end_the_run(
    caplog: pytest.LogCaptureFixture,
):
    """G10: never silent, never fatal for one."""
    good = [with_logprob(str(i), -1.0) for i in range(9)]
    many = [*good[:8], with_logprob("x", math.nan), with_logprob("y", math.nan)]
    made = rollouts(MadeUpFleet([*good, with_logprob("bad", math.nan)], many))
    assert made.next_batch() == good
    assert made.dropped == 1
    assert caplog.messages == ["dropped 1 of 10 samples: log-probs that are not numbers"]
    with pytest.raises(
        RolloutError, match="2 of 10 samples have log-probs that are not numbers: x, y"
    ):
        made.next_batch()


def test_drafting_is_switched_before_every_rollout_and_on_for_benchmarks():
    one = [with_logprob("a", -1.0)]
    fleet = MadeUpFleet(*[one] * 5)
    made = rollouts(fleet)
    for drafting in (False, False):
        made.next_batch(drafting=drafting)
    made.measure()
    made.next_batch(score=True)
    plain, greedy = (0.7, 3, False), (0.0, 3, False)
    assert fleet.calls == [False, plain, False, plain, True, greedy, True, (0.7, 3, True)]
    assert set(made.clock.total) == {"gen", "testing"}


def test_an_engine_that_is_started_again_gets_the_current_draft():
    pushed: list[tuple[Path, int]] = []

    class Trainers(FakeTrainers):
        def snapshot(self, path: Path, version: int) -> Any:
            pushed.append((path, version))

    made = rollouts(fleet := MadeUpFleet())
    made.trainers = Trainers([])
    snapshot: Any = vars(fleet)["snapshot"]
    snapshot()
    assert pushed == [(Path("nowhere"), 3)]
