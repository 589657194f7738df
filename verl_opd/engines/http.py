"""An engine's OpenAI-compatible HTTP server on loopback, behind a key and limits."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import time
from typing import Any

from verl_opd.errors import RolloutError

KEY_VARIABLE = "VERL_OPD_API_KEY"
_MAX_BODY = 8 << 20  # bytes of one request
_MAX_CONNECTIONS = 1024  # requests in flight, of one engine
_MAX_RATE = 500.0  # requests a second, of one engine, after a burst of as many


class HttpServer:
    """vLLM's own OpenAI-compatible app over one engine. The port is bound at once, so that a port
    in use is reported before an engine starts.
    """

    def __init__(self, port: int) -> None:
        """Bind `port` on loopback, 0 = a free one. RolloutError when it is in use."""
        self.key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
        self._listener = _listen(port)
        self.url = "http://{}:{}".format(*self._listener.getsockname())
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None

    async def serve(self, llm: Any, model_path: str) -> None:
        """Answer requests from now on, with vLLM's AsyncLLM `llm`."""
        import uvicorn
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model_path])
        args.disable_log_stats = False
        args.disable_fastapi_docs = True
        tasks = await llm.get_supported_tasks()
        app = build_app(args, tasks, llm.model_config)
        await init_app_state(llm, app.state, args, tasks)
        config = uvicorn.Config(
            KeyRequired(app, self.key),
            log_level="warning",
            lifespan="off",
            access_log=False,
            timeout_graceful_shutdown=5,
            limit_concurrency=_MAX_CONNECTIONS,
        )
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def stop(self) -> None:
        """End the server and free the port."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
        self._listener.close()


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise RolloutError(
            f"port {port} on 127.0.0.1 is taken ({error.strerror}): choose another, or 0 for a "
            "free one"
        ) from error
    return listener


class KeyRequired:
    """ASGI wrapper with a key and limits. Every path but /health and /metrics needs `Authorization:
    Bearer <key>`; vLLM's own check leaves /invocations open. A body has at most `max_body` bytes.
    At most `max_rate` requests a second reach the app, and as many at once after a pause.
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
                await _reject(send, 401, "a valid API key is required", "Unauthorized")
        elif int(headers.get(b"content-length", b"0") or 0) > self._max_body:
            await _reject(
                send,
                413,
                f"a request body may have at most {self._max_body} bytes",
                "RequestEntityTooLarge",
            )
        elif scope["type"] == "http" and scope["path"] not in self._OPEN and not self._admitted():
            await _reject(
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
        """`receive` that ends a body without an announced length where it becomes too long, as
        though the client had disconnected.
        """
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            return {"type": "http.disconnect"} if seen > self._max_body else message

        return counted


async def _reject(send: Any, status: int, message: str, kind: str) -> None:
    body = json.dumps({"error": {"message": message, "type": kind, "code": status}}).encode()
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", b"application/json")],
        }
    )
    await send({"type": "http.response.body", "body": body})
