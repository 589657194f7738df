"""What stands before an engine's HTTP server: the key, how much one request may bring, and how many
may come.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

_MAX_BODY = 8 << 20  # bytes of one request
MAX_CONNECTIONS = 1024  # requests in flight, of one engine
_MAX_RATE = 500.0  # requests a second, of one engine, after a burst of as many


class KeyRequired:
    """ASGI wrapper: every path but /health and /metrics needs `Authorization: Bearer <key>`, no
    body may be longer than `max_body` bytes, and no more than `max_rate` requests a second are
    passed on, as many at once after a pause. vLLM's own check leaves /invocations open.
    """

    _OPEN = ("/health", "/metrics")

    def __init__(
        self, app: Any, key: str, max_body: int = _MAX_BODY, max_rate: float = _MAX_RATE
    ) -> None:
        self._app, self._max_body, self._max_rate = app, max_body, max_rate
        self._expected = f"Bearer {key}".encode()
        self._room, self._looked = max_rate, time.monotonic()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        given = headers.get(b"authorization", b"")
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["path"] not in self._OPEN and not secrets.compare_digest(given, self._expected):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await _refuse(send, 401, "a valid API key is required", "Unauthorized")
        elif int(headers.get(b"content-length", b"0") or 0) > self._max_body:
            await _refuse(
                send,
                413,
                f"a request body may have {self._max_body} bytes",
                "RequestEntityTooLarge",
            )
        elif scope["type"] == "http" and scope["path"] not in self._OPEN and not self._admitted():
            await _refuse(
                send, 429, f"more than {self._max_rate:g} requests a second", "TooManyRequests"
            )
        else:
            await self._app(scope, self._bounded(receive), send)

    def _admitted(self) -> bool:
        """Whether one more request fits into the rate (a token bucket)."""
        now = time.monotonic()
        self._room = min(self._max_rate, self._room + (now - self._looked) * self._max_rate)
        self._looked = now
        if self._room < 1:
            return False
        self._room -= 1
        return True

    def _bounded(self, receive: Any) -> Any:
        """`receive` that ends a body without an announced length where it becomes too long, as if
        the client had gone away.
        """
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            return {"type": "http.disconnect"} if seen > self._max_body else message

        return counted


async def _refuse(send: Any, status: int, message: str, kind: str) -> None:
    body = json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", b"application/json")],
        }
    )
    await send({"type": "http.response.body", "body": body})
