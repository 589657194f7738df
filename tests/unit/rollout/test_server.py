"""The parts of the rollout server that need no engine."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests.unit.engines.test_settings import settings
from tests.unit.engines.test_vllm import silent
from verl_opd.engines.settings import Host
from verl_opd.errors import RolloutError
from verl_opd.rollout.server import RolloutServer


def test_every_request_for_a_trace_while_a_core_dies_gets_an_answer():
    """The second request finishes while the traces of the first are collected, and the core dies in
    between.
    """

    async def scenario() -> None:
        dying = RolloutServer(settings(stall_timeout=60))
        dying._engine.llm = silent()
        first = asyncio.ensure_future(dying._events("a"))
        await asyncio.sleep(0.05)
        second = asyncio.ensure_future(dying._events("b"))
        await asyncio.sleep(0.05)
        dying._engine.llm.errored = True
        answers = await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 10)
        assert [str(answer) for answer in answers] == ["opd_pop_traces: the engine core died"] * 2

    asyncio.run(scenario())


def bound(port: int) -> bool:
    """Whether a socket holds this port of loopback."""
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


@pytest.mark.parametrize(
    "failing", ["VllmEngine.start", "HttpServer.serve", "RolloutServer._probe"]
)
def test_a_start_that_fails_frees_the_port(failing: str, monkeypatch: pytest.MonkeyPatch):
    """Else the server that replaces this one could not bind a port that the user chose."""
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]

    def step(name: str) -> Any:
        def work() -> None:
            assert bound(port)
            if name == failing:
                raise RolloutError(f"{name} failed")

        async def later(*_: Any) -> None:
            work()

        return later if name != "VllmEngine.start" else lambda _: work()

    for name in ("VllmEngine.start", "HttpServer.serve", "RolloutServer._probe"):
        monkeypatch.setattr(f"verl_opd.rollout.server.{name}", step(name))
    server = RolloutServer(settings(Host(http_port=port)))
    with pytest.raises(RolloutError, match=f"{failing} failed"):
        asyncio.run(server.start())
    assert not bound(port)


def test_a_rollout_server_without_a_draft_is_an_error():
    with pytest.raises(ValueError, match="needs a draft"):
        RolloutServer(settings(speculation=None))


def test_importing_the_servers_does_not_import_vllm():
    code = (
        "import sys, verl_opd.rollout.server, verl_opd.rollout.teacher, "
        "verl_opd.engines.worker.extension; sys.exit('vllm' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).returncode
        == 0
    )
