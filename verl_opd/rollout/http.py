"""What stands before an engine's HTTP server: the key, and how much one request may bring."""

from __future__ import annotations

import json
import secrets
from typing import Any

_MAX_BODY = 8 << 20  # bytes of one request
MAX_CONNECTIONS = 1024  # requests in flight, of one engine


class KeyRequired:
    """ASGI wrapper: every path but /health and /metrics needs `Authorization: Bearer <key>`, and no body may be longer than `max_body` bytes. vLLM's
    own check leaves /invocations open."""

    _OPEN = ("/health", "/metrics")

    def __init__(self, app: Any, key: str, max_body: int = _MAX_BODY) -> None:
        self._app, self._max_body = app, max_body
        self._expected = f"Bearer {key}".encode()

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
            await _refuse(send, 413, f"a request body may have {self._max_body} bytes", "RequestEntityTooLarge")
        else:
            await self._app(scope, self._bounded(receive), send)

    def _bounded(self, receive: Any) -> Any:
        """`receive` that ends a body without an announced length where it becomes too long, as if the client had gone away."""
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            return {"type": "http.disconnect"} if seen > self._max_body else message

        return counted


async def _refuse(send: Any, status: int, message: str, kind: str) -> None:
    body = json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})
