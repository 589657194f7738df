"""The key and the limits in front of an engine's HTTP server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from verl_opd.engines.http import KeyRequired


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


def test_more_requests_than_the_rate_are_rejected_until_there_is_room_again(
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
    assert ask(9) == 9, "requests that need no key use up nothing of the rate"


def test_a_body_that_is_too_long_is_rejected_with_or_without_its_length():
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
