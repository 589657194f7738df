"""Sleep and wake against an engine that really drops what a level says, on every device of
the table.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.engines.test_settings import DRAFT
from verl_opd.devices import DEVICES
from verl_opd.engines.settings import EngineSettings, Host
from verl_opd.errors import RolloutError
from verl_opd.rollout.phases import PhaseMachine
from verl_opd.rollout.server import RolloutServer


class DroppingEngine:
    """As vLLM's engine: level 1 keeps the weights on the host and forgets the KV cache, level 2
    forgets both; waking maps what a tag names. Computing with what is not mapped fails.
    """

    errored = False

    def __init__(self) -> None:
        self.target: torch.Tensor | None = torch.arange(4.0)
        self.draft: torch.Tensor | None = torch.zeros(4)
        self.cache: list[str] | None = []
        self.host: tuple[torch.Tensor, torch.Tensor] | None = None
        self.calls: list[str] = []

    async def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        if level == 0:
            return
        assert self.target is not None
        assert self.draft is not None
        self.host = (self.target.clone(), self.draft.clone()) if level == 1 else None
        self.target = self.draft = self.cache = None

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {','.join(tags)}")
        if "weights" in tags:
            assert self.host is not None, "nothing to map: the weights were dropped"
            self.target, self.draft = self.host
        if "kv_cache" in tags:
            self.cache = []

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        assert self.cache is not None
        self.cache.clear()
        self.calls.append("reset")
        return True

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        assert self.draft is not None, f"{method} on weights that are not mapped"
        if method == "opd_load_draft":
            self.draft.fill_(float(args[1]))
        return [float(self.draft[0])]

    async def generate(self, prompt: Any, parameters: Any, request_id: str) -> Any:
        assert self.target is not None
        assert self.cache is not None
        self.cache.append(request_id)
        token = int(self.target[1]) + int(self.draft[0])  # type: ignore[index]
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token], finish_reason="stop")])


@pytest.fixture(params=sorted(DEVICES))
def asleep_and_awake(request: pytest.FixtureRequest) -> tuple[RolloutServer, DroppingEngine, int]:
    device = DEVICES[request.param]
    live = RolloutServer(
        EngineSettings(
            model_path="t",
            dtype="float32",
            max_model_len=64,
            max_num_seqs=4,
            host=Host(device=device.name),
            speculation=DRAFT,
        )
    )
    live._engine.llm = DroppingEngine()
    return live, live._engine.llm, device.sleep_level


def test_one_round_keeps_the_target_takes_the_draft_and_forgets_old_prefixes(
    asleep_and_awake: tuple[RolloutServer, DroppingEngine, int],
):
    live, engine, level = asleep_and_awake

    async def tokens(name: str) -> tuple[int, ...]:
        return (await live._tokens(name, (1,), {"max_tokens": 1}))[0]

    async def scenario() -> None:
        assert await tokens("before") == (1,)
        machine = PhaseMachine(0)
        for action, work in [
            ("sleep", lambda: live.sleep(level)),
            ("wake_weights", lambda: live.wake(["weights"])),
            ("sync", lambda: live._engine.rpc("opd_load_draft", "path", 5, "sum")),
            ("wake_kv_cache", lambda: live.wake(["kv_cache"])),
            ("reset_prefix_cache", live.reset_prefix_cache),
        ]:
            machine.advance(action)
            await work()
            if action in ("sleep", "wake_weights", "sync"):
                with pytest.raises(
                    RolloutError, match="the engine is asleep; wake its weights and KV cache first"
                ):
                    await tokens("early")
        machine.require_rollout()
        assert engine.cache == [], "cached prefixes of the old draft are gone"
        assert await tokens("after") == (6,), "the same target, the new draft"

    asyncio.run(scenario())


def test_sleeping_and_waking_twice_is_once(
    asleep_and_awake: tuple[RolloutServer, DroppingEngine, int],
):
    live, engine, level = asleep_and_awake

    async def scenario() -> None:
        await live.wake(["weights"])
        assert engine.calls == []
        await live.sleep(level)
        await live.sleep(level)
        assert engine.calls == [f"sleep {level}"]
        await live.wake(["weights"])
        await live.wake(["kv_cache"])
        calls = list(engine.calls)
        await live.wake(["kv_cache"])
        assert engine.calls == calls

    asyncio.run(scenario())


def test_a_sleep_that_would_lose_the_target_is_an_error_and_changes_nothing(
    asleep_and_awake: tuple[RolloutServer, DroppingEngine, int],
):
    """E1, E2: after level 2 the target answers garbage and everything is accepted."""
    live, engine, _ = asleep_and_awake
    with pytest.raises(
        RolloutError,
        match="sleep level 2 drops the frozen target, and nothing loads it again: use level 1",
    ):
        asyncio.run(live.sleep(2))
    assert engine.calls == []
    assert engine.target is not None
