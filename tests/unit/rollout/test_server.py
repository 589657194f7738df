"""The parts of the rollout server that need no engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from tests.unit.engines.test_settings import settings
from tests.unit.engines.test_vllm import silent
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
