"""A real vLLM teacher server against the target in plain transformers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from verl_opd.engines.settings import EngineSettings, Host
from verl_opd.errors import RolloutError
from verl_opd.opd.trace import TeacherScores
from verl_opd.rollout.teacher import TeacherServer, TeacherSettings

TOP_K = 5


class LiveTeacher:
    def __init__(self, settings: TeacherSettings) -> None:
        self.engine, self.loop = TeacherServer(settings), asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def call(self, work, timeout: float = 300):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)


def settings(model: Path, **changes) -> TeacherSettings:
    engine = EngineSettings(
        model_path=str(model),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=8,
        host=Host(kv_cache_gb=1),
        **changes,
    )
    return TeacherSettings("unit", engine, top_k=TOP_K)


@pytest.fixture(scope="module")
def teacher(tiny_llama_dir: Path) -> Iterator[LiveTeacher]:
    live = LiveTeacher(settings(tiny_llama_dir))
    live.call(live.engine.start())
    yield live
    live.call(live.engine.stop())
    live.loop.call_soon_threadsafe(live.loop.stop)


def reference(model: Path, prompt: tuple[int, ...], response: tuple[int, ...]) -> torch.Tensor:
    """Log-probs [R, V] float64 of the token at every response position."""
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        logits = target(torch.tensor([prompt + response])).logits[0]
    return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]


def assert_scores(scores: TeacherScores, log_p: torch.Tensor, response: tuple[int, ...]) -> None:
    own = log_p.gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)
    assert torch.from_numpy(scores.logprobs).double() == pytest.approx(own, abs=1e-3)
    top, ids = log_p.topk(TOP_K)
    assert torch.from_numpy(scores.top_logprobs).double() == pytest.approx(top, abs=1e-3)
    assert (torch.from_numpy(scores.top_ids) == ids).float().mean() > 0.95, "near ties may swap"


def test_a_server_scores_a_response_as_the_target_does(teacher: LiveTeacher, tiny_llama_dir: Path):
    prompt, response = (5, 9, 30, 12), (17, 80, 33, 2, 64, 90)
    scores = teacher.call(teacher.engine.score("0-1", prompt, response))
    assert_scores(scores, reference(tiny_llama_dir, prompt, response), response)


def test_many_at_once_and_shared_prefixes_do_not_mix(teacher: LiveTeacher, tiny_llama_dir: Path):
    """Prompt log-probs of a cached prefix would be missing: the engine must compute them again."""
    prompt = tuple(range(20, 44))
    responses = [(30 + i, 40 + i, 3, 50 - i) for i in range(12)]

    async def together() -> list[TeacherScores]:
        return list(
            await asyncio.gather(
                *(
                    teacher.engine.score(f"0-{i}", prompt, response)
                    for i, response in enumerate(responses)
                )
            )
        )

    for scores, response in zip(teacher.call(together()), responses, strict=True):
        assert_scores(scores, reference(tiny_llama_dir, prompt, response), response)


def test_an_empty_response_and_one_that_is_too_long(teacher: LiveTeacher):
    scores = teacher.call(teacher.engine.score("0-2", (5, 6), ()))
    assert scores.top_ids.shape == (0, TOP_K)
    with pytest.raises(Exception, match="64"):
        teacher.call(teacher.engine.score("0-3", (5, 6), tuple(range(70))))


def test_a_model_that_does_not_load_is_named(tmp_path: Path):
    broken = LiveTeacher(settings(tmp_path))
    with pytest.raises(RolloutError, match=f"teacher unit \\({tmp_path}\\) did not start"):
        broken.call(broken.engine.start())


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize(
    ("injury", "reason"),
    [
        (signal.SIGSTOP, r"the engine hangs, no token for any request in rollout.stall_timeout=3"),
        (signal.SIGKILL, "the engine core died|EngineCore encountered an issue"),
    ],
    ids=["hangs", "dies"],
)
def test_a_core_that_hangs_or_dies_is_reported_within_seconds(
    tiny_llama_dir: Path, injury: signal.Signals, reason: str
):
    """Not after rollout.request_timeout, half an hour."""
    before = children()
    injured = LiveTeacher(settings(tiny_llama_dir))
    injured.call(injured.engine.start())
    engine = injured.engine._engine  # not earlier: a busy machine may take long for the first step
    engine.settings = replace(engine.settings, stall_timeout=3.0)
    started = children() - before
    try:
        assert injured.call(injured.engine.failure()) == ""
        for pid in started:
            os.kill(pid, injury)
        with pytest.raises(Exception, match=reason):
            injured.call(injured.engine.score("0-1", (5, 6), (7,)), timeout=60)
        assert injured.call(injured.engine.failure()) != ""
    finally:
        for pid in started & children():
            os.kill(pid, signal.SIGCONT)
        injured.call(injured.engine.stop())
        injured.loop.call_soon_threadsafe(injured.loop.stop)
