"""What a fleet does with prompts whose samples fail, are aborted, or whose servers die; on
stand-ins for actors.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rollouts import worked_sample
from verl_opd.config.schema import Config
from verl_opd.controller.fleet import Fleet
from verl_opd.controller.loop import Loop
from verl_opd.controller.phases import PhaseMachine
from verl_opd.data.prompts import Prompt
from verl_opd.errors import RolloutError, WeightSyncError, WorkerDied
from verl_opd.opd.trace import RolloutSample, TeacherScores, VerifyStep, VerifyTrace, is_finite
from verl_opd.rollout.agent_loop import SampleFailure


def sample(name: str, finish: str = "stop") -> RolloutSample:
    return RolloutSample(
        sample_id=name,
        data_source="t",
        prompt_ids=(1,),
        response_ids=(2, 3),
        trace=VerifyTrace(2, ()),
        draft_version=0,
        finish_reason=finish,
    )


def fleet(attempts: list[tuple[list[Any], bool]]) -> Any:
    """A fleet whose successive attempts give these outcomes; `asked` keeps what
    each was asked for.
    """
    made = object.__new__(Fleet)
    made._cfg, made.phases, made.counts, made.asked, made.told = (
        Config(),
        [PhaseMachine(0)],
        {"rerun_samples": 0},
        [],
        [],
    )
    made._say = made.told.append
    left = iter(attempts)

    def attempt(prompts: list[Prompt], *_: Any) -> tuple[list[Any], bool]:
        made.asked.append([prompt.sample_id for prompt in prompts])
        return next(left)

    made._attempt = attempt
    return made


PROMPTS = [Prompt(name, "t", (1,), ()) for name in ("a", "b", "c")]


def test_only_what_is_missing_is_run_again_and_the_order_is_kept():
    first = (
        [sample("c"), SampleFailure("a", "the engine died"), SampleFailure("b", "the engine died")],
        True,
    )
    made = fleet([first, ([sample("b"), sample("a", "abort")], False), ([sample("a")], False)])
    assert [got.sample_id for got in made.generate(PROMPTS, {}, 0)] == ["a", "b", "c"]
    assert made.asked == [["a", "b", "c"], ["a", "b"], ["a"]]
    assert made.counts["rerun_samples"] == 3
    assert made.told[0] == "2 of 3 samples are run again: a, b"


def test_aborts_without_an_end_stop_the_run():
    made = fleet([([sample(name, "abort") for name in "abc"], False)])
    with pytest.raises(RolloutError, match="none of 3 samples came back, a among them"):
        made.generate(PROMPTS, {}, 0)


def test_another_target_in_an_engine_is_named():
    made = object.__new__(Fleet)
    made._target, made._target_checksums = "abc", lambda: ["abc", "abd"]
    with pytest.raises(
        WeightSyncError, match=r"engine 1 does not hold the target .*checksum abd, there abc"
    ):
        made.prove_target()
    made._target_checksums = lambda: ["abc", "abc"]
    made.prove_target()


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


def test_a_number_is_what_can_be_trained_on():
    assert is_finite(worked_sample())
    assert is_finite(with_logprob("a", -math.inf))
    assert not is_finite(with_logprob("a", math.nan))
    assert not is_finite(with_logprob("a", math.inf))
    import numpy as np

    scores = TeacherScores(
        np.array([-1.0, np.nan], np.float32),
        np.zeros((2, 0), np.int32),
        np.zeros((2, 0), np.float32),
    )
    assert not is_finite(
        RolloutSample(
            sample_id="a",
            data_source="t",
            prompt_ids=(1,),
            response_ids=(2, 3),
            trace=VerifyTrace(2, ()),
            draft_version=0,
            finish_reason="stop",
            teacher=scores,
        )
    )


def test_one_bad_sample_is_dropped_and_counted_and_many_end_the_run():
    """G10: never silent, never fatal for one."""
    told: list[str] = []
    loop: Any = SimpleNamespace(dropped=0, console=SimpleNamespace(say=told.append))
    good = [with_logprob(str(i), -1.0) for i in range(9)]
    assert Loop._keep_finite(loop, [*good, with_logprob("bad", math.nan)]) == good
    assert loop.dropped == 1
    assert "dropped 1 of 10 samples" in told[0]
    with pytest.raises(
        RolloutError, match="2 of 10 samples carry log-probs that are not numbers: x, y"
    ):
        Loop._keep_finite(
            loop, [*good[:8], with_logprob("x", math.nan), with_logprob("y", math.nan)]
        )


def test_a_lost_node_is_no_lost_engine(monkeypatch: pytest.MonkeyPatch):
    """An engine that does not answer may be the first sign of a lost node: nothing is spent on
    starting it where nothing can start.
    """
    asked: list[str] = []
    monkeypatch.setattr(
        "verl_opd.controller.fleet.failure",
        lambda server: asked.append(server) or "no answer in 30 s",
    )
    placement = SimpleNamespace(lost_nodes=lambda: ["10.0.0.2"] if asked else [])
    fleet = SimpleNamespace(
        servers=["engine"],
        _placement=placement,
        _restarts=SimpleNamespace(spend=lambda what: pytest.fail(what)),
    )
    with pytest.raises(WorkerDied, match=r"node 10\.0\.0\.2 is lost"):
        Fleet.replace_failed(fleet)
