"""Agent loops against fake servers: routing, order, limits and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from verl_opd.data.prompts import Prompt
from verl_opd.errors import ConfigError
from verl_opd.opd.trace import RolloutSample, trace_from_events
from verl_opd.opd.wire import to_extra_fields
from verl_opd.rollout.agent_loop import (
    AGENT_LOOPS,
    AgentLoop,
    AgentLoopWorker,
    SampleFailure,
    get_agent_loop,
)
from verl_opd.rollout.router import Router
from verl_opd.rollout.server import GenerateResult


class Remote:
    """Turns the methods of a plain object into `method.remote(...)` coroutines, as an actor handle
    has them.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        class Method:
            @staticmethod
            async def remote(*args: Any) -> Any:
                result = method(*args)
                return await result if asyncio.iscoroutine(result) else result

        return Method


class FakeServer:
    """Answers with the prompt's first token and two more, after one verify step that accepted one
    of two proposals.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.running = self.most = 0

    async def generate(
        self, request_id: str, prompt_ids: tuple[int, ...], sampling: dict[str, Any]
    ) -> GenerateResult:
        self.seen.append(request_id)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(sampling.get("seconds", 0.001))
        self.running -= 1
        if sampling.get("fail") == prompt_ids[0]:
            raise RuntimeError("the engine is gone")
        tokens = (prompt_ids[0], 50, 60)
        return GenerateResult(
            tokens, "stop", to_extra_fields(trace_from_events([(1, [50, 61], [-3.0])], 3))
        )


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"0-{i}", "unit", (i, 7), ()) for i in range(count)]


def run(
    work: Callable[[AgentLoopWorker], Any],
    servers: int = 2,
    limit: int = 64,
    timeout: float = 5.0,
    loop: str = "single_turn",
):
    fakes, router = [FakeServer() for _ in range(servers)], Router(servers)
    runner = AgentLoopWorker(loop, [Remote(fake) for fake in fakes], Remote(router), limit, timeout)
    return asyncio.run(work(runner)), fakes, router


def test_samples_come_back_in_order_with_trace_and_version():
    samples, fakes, router = run(lambda runner: runner.run(prompts(6), {}, 3))
    assert [s.sample_id for s in samples] == [f"0-{i}" for i in range(6)]
    assert [s.response_ids for s in samples] == [(i, 50, 60) for i in range(6)]
    assert all(
        (s.draft_version, s.finish_reason, s.data_source) == (3, "stop", "unit") for s in samples
    )
    (step,) = samples[4].trace.steps
    assert (step.anchor, step.accepted, step.rejected, step.rejected_logprobs) == (
        0,
        1,
        (61,),
        (-3.0,),
    )
    assert [len(fake.seen) for fake in fakes] == [3, 3]
    assert router.outstanding == [0, 0]


def test_no_more_samples_are_in_flight_than_allowed():
    _, fakes, _ = run(lambda runner: runner.run(prompts(12), {}, 0), servers=1, limit=4)
    assert fakes[0].most == 4


def test_a_failed_sample_is_named_and_its_server_released():
    async def work(runner: AgentLoopWorker) -> None:
        outcomes = await runner.run(prompts(4), {"fail": 2}, 0)
        assert [isinstance(outcome, RolloutSample) for outcome in outcomes] == [
            True,
            True,
            False,
            True,
        ], "the others are not lost"
        assert outcomes[2] == SampleFailure("0-2", "RuntimeError: the engine is gone")

    _, _, router = run(work)
    assert router.outstanding == [0, 0]


def test_a_response_that_never_comes_ends_in_a_clear_error():
    async def work(runner: AgentLoopWorker) -> None:
        (outcome,) = await runner.run(prompts(1), {"seconds": 3}, 0)
        assert "no response from server 0 within rollout.request_timeout=0.05 s" in outcome.reason

    _, _, router = run(work, timeout=0.05)
    assert router.outstanding == [0, 0]


def test_all_turns_of_a_loop_reach_one_server(monkeypatch: pytest.MonkeyPatch):
    class TwoTurns(AgentLoop):
        async def run(self, prompt: Prompt, sampling: dict[str, Any], draft_version: int) -> Any:
            for turn in range(2):
                await self.servers.generate(
                    prompt.sample_id, f"{prompt.sample_id}-t{turn}", prompt.prompt_ids, sampling
                )

    monkeypatch.setitem(AGENT_LOOPS, "two_turns", TwoTurns)
    _, fakes, _ = run(lambda runner: runner.run(prompts(8), {}, 0), loop="two_turns")
    for fake in fakes:
        sessions = [name.rsplit("-", 1)[0] for name in fake.seen]
        assert sessions
        assert all(sessions.count(session) == 2 for session in sessions)


def test_an_unknown_loop_is_a_config_error():
    with pytest.raises(
        ConfigError, match=r"rollout.agent.loop='chat' is unknown; available: single_turn"
    ):
        get_agent_loop("chat")
