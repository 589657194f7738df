"""An engine short of everything: KV blocks, tokens per step and model length. Traces have to stay
exact all the same.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.engine.conftest import K, LiveEngine, changed, start_engine
from tests.engine.test_server import request
from tests.engine.test_traces import trace_of
from verl_opd.errors import RolloutError
from verl_opd.rollout.server import RolloutServer

pytestmark = pytest.mark.engine
MAX_MODEL_LEN = 256


@pytest.fixture(scope="module")
def tight(tiny_qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    """12 usable blocks of 32 tokens, and prompts that take several steps to prefill."""
    started = start_engine(
        tiny_qwen3_dir,
        tmp_path_factory.mktemp("draft") / "draft",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        engine_kwargs={
            "block_size": 32,
            "num_gpu_blocks_override": 13,
            "max_num_batched_tokens": 64,
        },
    )
    yield started
    started.call(started.engine.stop())
    started.loop.call_soon_threadsafe(started.loop.stop)


def long_prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(10, 250, (length,), generator=generator).tolist() for _ in range(count)]


def preemptions(live: LiveEngine) -> float:
    url, _ = live.call(live.engine.http_address())
    found = re.search(r"vllm:num_preemptions_total\{.*\} ([\d.e+]+)", request(f"{url}/metrics")[1])
    assert found
    return float(found[1])


def test_preempted_and_chunked_requests_keep_exact_traces(tight: LiveEngine):
    prompts = long_prompts(8, 70)
    alone = [
        tight.generate(f"alone-{i}", prompt, max_tokens=40) for i, prompt in enumerate(prompts)
    ]
    tight.call(tight.engine.reset_prefix_cache())
    before = preemptions(tight)
    crowded = tight.generate_all("crowded", prompts, max_tokens=40)
    assert preemptions(tight) > before
    assert [r.token_ids for r in crowded] == [r.token_ids for r in alone]
    for result in crowded:
        assert trace_of(result).steps
    stats = tight.call(tight.engine.recorder_stats())
    assert (stats["errors"], stats["broken_traces"], stats["open_requests"]) == (0, 0, 0), stats


def test_steps_near_the_model_length_are_draft_free_and_not_blamed_on_the_draft(tight: LiveEngine):
    """The runner verifies zeros there, because a block would not fit; a draft must not be trained
    on proposals that it never made.
    """
    (prompt,) = long_prompts(1, 200, seed=1)
    result = tight.generate("full", prompt, max_tokens=MAX_MODEL_LEN - 200)
    assert len(result.token_ids) == MAX_MODEL_LEN - 200
    trace = trace_of(result)
    assert trace.steps
    assert trace.draft_free
    last_drafted = max(step.anchor + step.committed for step in trace.steps)
    assert min(trace.draft_free) > last_drafted >= MAX_MODEL_LEN - 200 - 2 * (K + 1)
    assert all(any(step.drafted) for step in trace.steps)


def test_2k_spare_positions_are_enough_for_real_proposals_to_the_end(tight: LiveEngine):
    (prompt,) = long_prompts(1, 200, seed=2)
    result = tight.generate("fits", prompt, max_tokens=MAX_MODEL_LEN - 200 - 2 * K)
    assert not trace_of(result).draft_free


def test_falling_asleep_ends_what_runs_and_its_trace_still_holds(tight: LiveEngine):
    (prompt,) = long_prompts(1, 20, seed=3)

    async def interrupted():
        work = asyncio.create_task(
            tight.engine.generate(
                "cut", prompt, {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}
            )
        )
        await asyncio.sleep(0.3)
        with pytest.raises(RolloutError, match="1 requests in flight"):
            await tight.engine.set_drafting(False)
        await tight.engine.sleep(0)
        return await work

    cut = tight.call(interrupted())
    assert cut.finish_reason == "abort"
    assert len(cut.token_ids) < 200
    trace_of(cut)
    for tags in (["weights"], ["kv_cache"]):
        tight.call(tight.engine.wake(tags))
    tight.call(tight.engine.reset_prefix_cache())
    assert tight.generate("after", prompt, max_tokens=8).finish_reason == "length"
    assert tight.call(tight.engine.recorder_stats())["open_requests"] == 0


def test_every_http_path_that_computes_needs_the_key(tight: LiveEngine):
    url, key = tight.call(tight.engine.http_address())
    body = {"model": tight.settings.model_path, "prompt": "hi", "max_tokens": 2}
    for path in ("/v1/completions", "/v1/models", "/invocations", "/tokenize"):
        assert request(url + path, None, body)[0] == 401
        assert request(url + path, key[:-1], body)[0] == 401
    assert request(f"{url}/v1/completions", key, body)[0] == 200
    assert request(f"{url}/metrics")[0] == 200


def test_a_failed_probe_stops_what_it_started(tight: LiveEngine):
    def alive() -> set[int]:
        return {
            child.pid
            for child in psutil.Process().children(recursive=True)
            if child.status() != psutil.STATUS_ZOMBIE
        }

    before = alive()
    engine = RolloutServer(changed(tight.settings, mask_token_id=9))
    with pytest.raises(RolloutError, match="mask_token_id is 3 in the engine, configured 9"):
        tight.call(engine.start())
    assert engine._engine.llm is not None
    assert alive() <= before


def test_an_engine_argument_that_does_not_exist_is_named(tight: LiveEngine):
    engine = RolloutServer(changed(tight.settings, engine_kwargs={"no_such_argument": 1}))
    with pytest.raises(RolloutError, match="no_such_argument"):
        tight.call(engine.start())
