"""The parts of the rollout server that need no engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest

from verl_opd.devices import DEVICES
from verl_opd.engines.http import KeyRequired
from verl_opd.errors import RolloutError
from verl_opd.rollout.server import (
    EXTENSION,
    EngineSettings,
    TraceCheck,
    engine_arguments,
    engine_environment,
)

GOOD = [(1, [11, 99], [-2.0])]
RESPONSE = (10, 11, 12)


def settings(**changes: Any) -> EngineSettings:
    fields: dict[str, Any] = {
        "target_path": "/target",
        "target_dtype": "float32",
        "draft_path": "/draft",
        "method": "dflash",
        "num_speculative_tokens": 2,
        "target_layer_ids": (1, 3),
        "mask_token_id": 3,
        "max_model_len": 64,
        "max_num_seqs": 4,
    }
    return EngineSettings(**{**fields, **changes})


def test_a_trace_that_explains_its_response_is_kept():
    check = TraceCheck()
    assert len(check.explain("a", GOOD, RESPONSE).steps) == 1
    assert check.explain("b", [], ()).steps == ()
    assert check.stats() == {"responses": 2, "broken_traces": 0, "last_broken_trace": ""}


@pytest.mark.parametrize(
    "events",
    [
        [],  # lost
        [(0, [98, 99], [-1.0, -2.0])],  # one token short
        [(1, [77, 99], [-2.0])],  # accepted another token than the response holds
        [(1, [11, 99], [])],  # a refused token without its log-prob
    ],
)
def test_a_trace_that_does_not_is_dropped_and_counted(events: list[Any]):
    check = TraceCheck()
    trace = check.explain("odd", events, RESPONSE)
    assert (trace.response_len, trace.steps) == (3, ())
    assert check.broken == 1
    assert "request odd" in check.last_broken


def test_more_than_a_twentieth_of_broken_traces_ends_the_run():
    check = TraceCheck()
    for index in range(98):
        check.explain(str(index), GOOD, RESPONSE)
    for _ in range(6):
        check.explain("odd", [], RESPONSE)  # 6 of 104 are within 1 + 5%
    with pytest.raises(
        RolloutError,
        match=r"7 of 105 verify traces do not explain their response; request last: .*position 1",
    ):
        check.explain("last", [], RESPONSE)


def test_a_cpu_engine_gets_its_cores_and_not_rays_thread_count():
    env = engine_environment(settings(cpu_cores=(2, 3), kv_cache_gb=4))
    assert env["OMP_NUM_THREADS"] is None
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in engine_environment(settings())
    assert "VLLM_CPU_KVCACHE_SPACE" not in engine_environment(settings(device="cuda"))


def test_no_device_sleeps_so_deep_that_the_frozen_target_is_lost():
    """S9, E1: level 2 drops weights that nobody streams again; the target would answer garbage and
    everything would be accepted.
    """
    assert {device.name: device.sleep_level for device in DEVICES.values()} == {
        "cpu": 0,
        "cuda": 1,
        "npu": 1,
    }


def test_sleep_mode_is_asked_for_where_the_device_has_it():
    assert "enable_sleep_mode" not in engine_arguments(settings())
    for device in ("cuda", "npu"):
        assert engine_arguments(settings(device=device))["enable_sleep_mode"] is True


def test_engine_arguments_carry_target_draft_and_extension():
    arguments = engine_arguments(
        settings(
            engine_kwargs={
                "compilation_config": '{"mode": 0}',
                "block_size": 32,
                "load_format": "safetensors",
            }
        )
    )
    assert arguments["model"] == "/target"
    assert arguments["speculative_config"] == {
        "method": "dflash",
        "model": "/draft",
        "num_speculative_tokens": 2,
    }
    assert arguments["worker_extension_cls"] == EXTENSION
    assert (arguments["compilation_config"], arguments["block_size"], arguments["load_format"]) == (
        {"mode": 0},
        32,
        "safetensors",
    )


def call(path: str, authorization: str | None = None, kind: str = "http") -> list[Any]:
    """What a guarded app answers; ["app"] when the request came through."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("app")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", authorization.encode())] if authorization is not None else []
    asyncio.run(
        KeyRequired(app, "secret")({"type": kind, "path": path, "headers": headers}, None, send)
    )
    return sent


def test_every_path_but_health_and_metrics_needs_the_key():
    assert call("/health") == call("/metrics") == ["app"]
    for path in (
        "/v1/chat/completions",
        "/invocations",
        "/tokenize",
        "/health/../v1/models",
        "/metricsx",
    ):
        assert call(path, "Bearer secret") == ["app"]
        for wrong in (
            None,
            "",
            "secret",
            "Bearer secre",
            "Bearer secret2",
            "Basic secret",
            "Bearer s\u00e9cret",
        ):
            assert call(path, wrong)[0]["status"] == 401
    assert call("/v1/realtime", None, "websocket") == [{"type": "websocket.close", "code": 1008}]


def test_more_requests_than_the_rate_are_refused_until_there_is_room_again(
    monkeypatch: pytest.MonkeyPatch,
):
    now = [100.0]
    monkeypatch.setattr("verl_opd.engines.http.time.monotonic", lambda: now[0])
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message)

    guarded = KeyRequired(app, "k", max_rate=3)
    sent: list[Any] = []
    scope = {"type": "http", "path": "/v1/models", "headers": [(b"authorization", b"Bearer k")]}

    def ask(times: int) -> int:
        before = len(passed)
        for _ in range(times):
            asyncio.run(guarded(scope, None, send))
        return len(passed) - before

    assert ask(5) == 3
    assert sent[0]["status"] == 429
    now[0] += 0.7
    assert ask(5) == 2
    now[0] += 60
    assert ask(5) == 3, "a pause saves up one second's worth"
    scope = {"type": "http", "path": "/health", "headers": []}
    assert ask(9) == 9, "whoever needs no key takes nothing from those who have one"


def test_a_body_that_is_too_long_is_refused_announced_or_not():
    async def post(
        headers: list[tuple[bytes, bytes]], parts: list[bytes]
    ) -> tuple[list[Any], list[Any]]:
        """(what was answered, what the app was given)"""
        sent: list[Any] = []
        received: list[Any] = []
        messages = iter(
            [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        )

        async def receive() -> Any:
            return next(messages)

        async def send(message: Any) -> None:
            sent.append(message)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            received.extend([await receive() for _ in parts])

        scope = {
            "type": "http",
            "path": "/v1/completions",
            "headers": [(b"authorization", b"Bearer k"), *headers],
        }
        await KeyRequired(app, "k", max_body=10)(scope, receive, send)
        return sent, received

    sent, received = asyncio.run(post([(b"content-length", b"11")], [b"x" * 11]))
    assert sent[0]["status"] == 413
    assert received == []
    sent, received = asyncio.run(post([], [b"x" * 6, b"x" * 6]))
    assert [message["type"] for message in received] == ["http.request", "http.disconnect"]
    sent, received = asyncio.run(post([(b"content-length", b"10")], [b"x" * 10]))
    assert received[0]["body"] == b"x" * 10


def test_importing_the_server_does_not_import_vllm():
    code = (
        "import sys, verl_opd.rollout.server, verl_opd.engines.worker.extension; sys.exit('vllm' "
        "in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).returncode
        == 0
    )
