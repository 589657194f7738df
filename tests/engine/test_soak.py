"""Many requests, many cycles: everything is answered and accounted for, and nothing grows."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.engine.conftest import GREEDY, LiveEngine, start_engine
from tests.unit.rollout.test_agent_loop import Remote
from verl_opd.data.prompts import Prompt
from verl_opd.opd.trace import RolloutSample, check_trace
from verl_opd.rollout.agent_loop import AgentLoopWorker
from verl_opd.rollout.router import Router
from verl_opd.snapshot import DraftSnapshot, checksum

pytestmark = pytest.mark.engine
REQUESTS, IN_FLIGHT, CYCLES = 2000, 64, 50


class OnItsLoop:
    """An engine's methods, awaited from another event loop than its own."""

    def __init__(self, live: LiveEngine) -> None:
        self._live = live
        self.answered = 0

    async def generate(self, *args):
        work = asyncio.run_coroutine_threadsafe(self._live.engine.generate(*args), self._live.loop)
        result = await asyncio.wrap_future(work)
        self.answered += 1
        return result


@pytest.fixture(scope="module")
def pair(
    tiny_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[LiveEngine]]:
    engines = [
        start_engine(tiny_qwen3_dir, tmp_path_factory.mktemp(f"soak{i}") / "draft")
        for i in range(2)
    ]
    yield engines
    for live in engines:
        live.call(live.engine.stop())
        live.loop.call_soon_threadsafe(live.loop.stop)


def test_two_thousand_requests_over_two_replicas_are_all_answered_with_their_own_trace(
    pair: list[LiveEngine],
):
    servers, router = [OnItsLoop(live) for live in pair], Router(2)
    runner = AgentLoopWorker(
        "single_turn", [Remote(server) for server in servers], Remote(router), IN_FLIGHT, 300.0
    )
    prompts = [
        Prompt(f"0-{i}", "soak", tuple(10 + (i * k) % 230 for k in range(1, 4 + i % 5)), ())
        for i in range(REQUESTS)
    ]
    outcomes = asyncio.run(runner.run(prompts, {**GREEDY, "max_tokens": 8}, 0))
    assert [outcome.sample_id for outcome in outcomes] == [prompt.sample_id for prompt in prompts]
    assert all(isinstance(outcome, RolloutSample) for outcome in outcomes)
    for sample in outcomes:
        check_trace(sample.trace, sample.response_ids)
        assert len(sample.response_ids) == 8
        assert sample.trace.steps
    answers = {}
    for sample in outcomes:
        answers.setdefault(sample.prompt_ids, Counter())[sample.response_ids] += 1
    mixed = {prompt: found for prompt, found in answers.items() if len(found) > 1}
    assert len(mixed) <= len(answers) // 50, (
        "greedy answers depend on the prompt, up to near ties between batches"
    )
    assert sum(server.answered for server in servers) == REQUESTS
    assert min(server.answered for server in servers) > REQUESTS // 4, "both replicas work"
    assert router.outstanding == [0, 0]
    for live in pair:
        stats = live.call(live.engine.recorder_stats())
        assert (stats["errors"], stats["broken_traces"], stats["open_requests"]) == (0, 0, 0), (
            stats["last_error"]
        )


def holdings() -> dict[str, int]:
    """What this process and all below it hold: processes, open files, names in shared memory,
    memory in MB.
    """
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return {
        "processes": len(family),
        "files": sum(process.num_fds() for process in family),
        "shared": sum(1 for _ in Path("/dev/shm").iterdir()),
        "megabytes": sum(process.memory_info().rss for process in family) >> 20,
    }


def test_fifty_cycles_of_rollout_and_push_leave_nothing_behind(
    pair: list[LiveEngine], tmp_path: Path
):
    live = pair[0]
    tensors = load_file(Path(live.settings.speculation.draft_path) / "model.safetensors")
    prompts = [[20 + i, 30 + i, 40] for i in range(8)]

    def cycle(version: int) -> None:
        live.generate_all(f"cycle-{version}", prompts, max_tokens=12)
        live.call(live.engine.sleep(0))
        path = tmp_path / "draft.safetensors"
        save_file(tensors, path)
        live.call(live.engine.wake(["weights"]))
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        report = live.call(
            live.engine.load_draft(DraftSnapshot(version, str(path), shapes, checksum(tensors)))
        )
        assert report["workers"][0]["error"] == ""
        os.unlink(path)
        live.call(live.engine.wake(["kv_cache"]))
        live.call(live.engine.reset_prefix_cache())

    for version in range(5):  # what is allocated once
        cycle(version)
    before = holdings()
    for version in range(5, 5 + CYCLES):
        cycle(version)
    after = holdings()
    assert after["processes"] == before["processes"]
    assert after["files"] <= before["files"] + 2
    assert after["shared"] == before["shared"]
    assert after["megabytes"] <= before["megabytes"] + 64, (before, after)
    assert live.call(live.engine.recorder_stats())["open_requests"] == 0
