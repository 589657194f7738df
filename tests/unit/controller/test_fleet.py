"""What a fleet does with prompts whose samples fail, are aborted, or whose servers die; on
stand-ins for actors.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests.rollouts import worked_sample
from verl_opd.config.schema import Config
from verl_opd.controller.faults import Restarts
from verl_opd.controller.fleet import Fleet
from verl_opd.data.prompts import Prompt
from verl_opd.errors import RestartsExhausted, RolloutError, WeightSyncError, WorkerDied
from verl_opd.opd.trace import RolloutSample, TeacherScores, VerifyStep, VerifyTrace, is_finite
from verl_opd.rollout.agent_loop import SampleFailure
from verl_opd.rollout.phases import PhaseMachine


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
    made._cfg, made.phases, made.counts, made.asked = (
        Config(),
        [PhaseMachine(0)],
        {"rerun_samples": 0},
        [],
    )
    left = iter(attempts)

    def attempt(prompts: list[Prompt], *_: Any) -> tuple[list[Any], bool]:
        made.asked.append([prompt.sample_id for prompt in prompts])
        return next(left)

    made._attempt = attempt
    return made


PROMPTS = [Prompt(name, "t", (1,), ()) for name in ("a", "b", "c")]


def test_only_what_is_missing_is_run_again_and_the_order_is_kept(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "verl_opd")
    first = (
        [sample("c"), SampleFailure("a", "the engine died"), SampleFailure("b", "the engine died")],
        True,
    )
    made = fleet([first, ([sample("b"), sample("a", "abort")], False), ([sample("a")], False)])
    assert [got.sample_id for got in made.generate(PROMPTS, {}, 0)] == ["a", "b", "c"]
    assert made.asked == [["a", "b", "c"], ["a", "b"], ["a"]]
    assert made.counts["rerun_samples"] == 3
    assert caplog.messages[0] == "2 of 3 samples are run again: a, b"


def test_aborts_without_an_end_stop_the_run():
    made = fleet([([sample(name, "abort") for name in "abc"], False)])
    with pytest.raises(RolloutError, match="all 3 samples were aborted, a among them"):
        made.generate(PROMPTS, {}, 0)


def test_another_target_in_an_engine_is_named():
    made = object.__new__(Fleet)
    made._target, made._target_checksums = "abc", lambda: ["abc", "abd"]
    with pytest.raises(
        WeightSyncError, match=r"engine 1 does not hold the target .*checksum abd, expected abc"
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


def test_a_lost_node_is_not_a_lost_engine(monkeypatch: pytest.MonkeyPatch):
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
        _teachers=[],
        _placement=placement,
        _restarts=SimpleNamespace(spend=lambda what: pytest.fail(what)),
    )
    with pytest.raises(WorkerDied, match=r"node 10\.0\.0\.2 is lost"):
        Fleet.replace_failed(fleet)


class Recorded:
    """An actor handle: calls are recorded as (actor, method, arguments), and answered at once."""

    def __init__(self, name: str, calls: list[Any], **answers: Any) -> None:
        self.name, self._calls, self._answers = name, calls, answers

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Any:
            self._calls.append((self.name, method, *args))
            answer = self._answers.get(method)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(remote=remote)


def fleet_with_teachers(
    monkeypatch: pytest.MonkeyPatch, reasons: dict[str, str], names: list[str]
) -> tuple[Any, list[Any]]:
    """A fleet of one engine, two agent loops (one of them dead) and a teacher per name; `reasons`:
    why a server has failed.
    """
    calls: list[Any] = []
    stand_in = SimpleNamespace(
        get=lambda value, timeout=None: value,
        kill=lambda actor, no_restart: calls.append((actor.name, "kill")),
        exceptions=ray.exceptions,
    )
    monkeypatch.setattr("verl_opd.controller.fleet.ray", stand_in)
    monkeypatch.setattr(
        "verl_opd.controller.fleet.failure", lambda server: reasons.get(server.name, "")
    )
    made: Any = object.__new__(Fleet)
    made._cfg, made._restarts = Config(), Restarts(2)
    made.servers = [Recorded("engine", calls)]
    made._teachers = [Recorded(f"teacher {i}", calls) for i in range(len(names))]
    made._teacher_settings = [SimpleNamespace(name=name) for name in names]
    made.counts = {"engine_restarts": 0, "teacher_restarts": 0}
    dead = ray.exceptions.ActorDiedError()
    made._agents = [
        Recorded("agent 0", calls, replace_teacher=dead),
        Recorded("agent 1", calls),
    ]
    made._placement = SimpleNamespace(lost_nodes=list, actors=list(made._teachers))

    def new_teacher(index: int) -> Recorded:
        server = Recorded(f"new {index}", calls, start={"seconds": 1.0})
        made._placement.actors.append(server)
        return server

    made._new_teacher = new_teacher
    return made, calls


def test_a_lost_teacher_is_replaced_in_place_and_every_agent_loop_gets_the_new_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "verl_opd")
    reasons = {"teacher 2": "no token for any request in rollout.stall_timeout=300 s"}
    made, calls = fleet_with_teachers(monkeypatch, reasons, ["math", "code", "math"])
    assert made.deaths() == [f"teacher 2 is lost ({reasons['teacher 2']})"]
    assert made.replace_failed()
    new = made._teachers[2]
    assert [actor.name for actor in made._teachers] == ["teacher 0", "teacher 1", "new 2"]
    place = ("replace_teacher", "math", 1, new)
    assert calls == [
        ("teacher 2", "kill"),
        ("new 2", "start"),
        ("agent 0", *place),
        ("agent 1", *place),
    ]
    assert made.counts == {"engine_restarts": 0, "teacher_restarts": 1}
    assert made._restarts.left == 1
    assert "teacher 2 is lost" in caplog.messages[0]
    assert caplog.messages[1] == "teacher 2 (math) was replaced in 1 s"
    assert not made.replace_failed(), "the new one is healthy"


def test_teachers_share_the_budget_of_restarts(monkeypatch: pytest.MonkeyPatch):
    reasons = {"teacher 0": "died", "new 0": "died"}
    made, _ = fleet_with_teachers(monkeypatch, reasons, ["default"])
    assert made.replace_failed()
    assert made.replace_failed()
    with pytest.raises(RestartsExhausted, match=r"teacher 0 is lost \(died\)"):
        made.replace_failed()
    assert made.counts["teacher_restarts"] == 2


def test_only_samples_that_a_lost_teacher_did_not_score_are_run_again(
    monkeypatch: pytest.MonkeyPatch,
):
    reasons = {"teacher 0": "died"}
    made, calls = fleet_with_teachers(monkeypatch, reasons, ["default"])
    lost = SampleFailure("b", "RolloutError: request b: the engine core died")
    rounds = iter([[sample("a"), lost, sample("c")], [sample("b")]])
    made._agents = [SimpleNamespace(run=SimpleNamespace(remote=lambda *args: run(*args)))]
    made._agents[0].replace_teacher = Recorded("agent", calls).replace_teacher
    made._router = Recorded("router", calls)
    made.phases, made.counts = [PhaseMachine(0)], {"teacher_restarts": 0, "rerun_samples": 0}
    asked: list[list[str]] = []

    def run(prompts: list[Prompt], *_: Any) -> list[Any]:
        asked.append([prompt.sample_id for prompt in prompts])
        return next(rounds)

    done = made.generate(PROMPTS, {}, 0, score=True)
    assert [got.sample_id for got in done] == ["a", "b", "c"]
    assert asked == [["a", "b", "c"], ["b"]]
    assert made.counts == {"teacher_restarts": 1, "rerun_samples": 1}
