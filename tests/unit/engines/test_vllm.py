"""The watchdog around one engine's calls, on a stand-in for vLLM's AsyncLLM."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.engines.test_settings import settings
from verl_opd.engines.vllm import VllmEngine
from verl_opd.engines.watchdog import TokenProgress, token_counter
from verl_opd.errors import RolloutError


def silent() -> Any:
    """A core that lives and answers nothing."""
    return SimpleNamespace(
        errored=False,
        dead_error=ValueError("dead"),
        collective_rpc=lambda method, args: asyncio.sleep(30),
    )


def engine(stall_timeout: float) -> VllmEngine:
    made = VllmEngine(settings(stall_timeout=stall_timeout))
    made.llm = silent()
    return made


def test_a_hanging_engine_is_noticed_by_its_tokens_and_a_slow_one_is_not():
    async def scenario() -> None:
        live = engine(0.2)

        async def slow() -> str:
            for _ in range(8):  # longer than the limit in all, and always moving
                await asyncio.sleep(0.05)
                live._progress.moved()
            return "done"

        assert await live.watch(slow(), "request a") == "done"
        assert live.failure() == ""
        with pytest.raises(
            RolloutError,
            match=r"request b: the engine hangs, no token for any request in "
            r"rollout.stall_timeout=0.2 s",
        ):
            await live.watch(asyncio.sleep(30), "request b")
        assert "stall_timeout" in live.failure()
        assert live.in_flight == 0

    asyncio.run(scenario())


def test_a_call_into_a_dead_or_hanging_core_ends():
    """A core that is killed between a response and the collection of its trace never answers, and
    reports that nowhere else.
    """

    async def scenario() -> None:
        dead = engine(60)
        call = asyncio.ensure_future(dead.rpc("opd_pop_traces", ["a"]))
        await asyncio.sleep(0.05)
        dead.llm.errored = True
        with pytest.raises(RolloutError, match="opd_pop_traces: the engine core died"):
            await call
        assert dead.failure() == "ValueError: its engine core died"
        hanging = engine(0.1)
        with pytest.raises(
            RolloutError, match=r"no answer to opd_stats in rollout.stall_timeout=0.1 s"
        ):
            await hanging.rpc("opd_stats")
        assert "no answer to opd_stats" in hanging.failure()

    asyncio.run(scenario())


def test_a_patient_call_may_take_longer_than_the_stall_timeout():
    async def scenario() -> None:
        live = engine(0.1)

        async def checksum(method: str, args: tuple[Any, ...]) -> list[str]:
            await asyncio.sleep(0.3)
            return ["sum"]

        live.llm.collective_rpc = checksum
        assert await live.rpc("opd_target_checksum", patient=True) == ["sum"]
        assert live.failure() == ""

    asyncio.run(scenario())


def test_the_first_request_after_a_pause_is_given_its_time():
    async def scenario() -> None:
        live = engine(0.3)
        await asyncio.sleep(0.4)
        assert await live.watch(asyncio.sleep(0.1, "done"), "request a") == "done"

    asyncio.run(scenario())


def test_an_engine_that_never_started_has_failed():
    assert VllmEngine(settings()).failure() == "it did not start"


@pytest.mark.parametrize(
    ("generated", "prompt", "usage", "moves"),
    [(1, 0, 0.0, True), (0, 9, 0.0, True), (0, 0, 0.5, True), (0, 0, 0.0, False)],
    ids=["response", "whole prompt", "part of a prompt", "nothing"],
)
def test_tokens_of_responses_and_prompts_count_as_progress(
    generated: int, prompt: int, usage: float, moves: bool
):
    progress = TokenProgress()
    moved: list[bool] = []
    progress.moved = lambda: moved.append(True)  # type: ignore[method-assign]
    counter = token_counter(progress)(None)
    counter.record(
        SimpleNamespace(kv_cache_usage=usage),
        SimpleNamespace(num_generation_tokens=generated, num_prompt_tokens=prompt),
    )
    assert bool(moved) is moves
