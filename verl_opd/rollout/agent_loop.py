"""Agent loops: how one prompt becomes one sample. A multi-turn or tool loop is one more class in
this file.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from verl_opd.data.prompts import Prompt
from verl_opd.errors import ConfigError, RolloutError
from verl_opd.logs import open_log
from verl_opd.opd.trace import RolloutSample
from verl_opd.opd.wire import from_extra_fields
from verl_opd.process import redirect_output
from verl_opd.rollout.server import GenerateResult
from verl_opd.rollout.teacher import Teachers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleFailure:
    """A prompt without a sample."""

    sample_id: str  # of the prompt
    reason: str  # type and text of the error


class Servers:
    """Sends the calls of agent loops to servers. All requests of a session go to one server."""

    def __init__(self, servers: Sequence[Any], router: Any, timeout: float) -> None:
        self._servers, self._router, self._timeout = list(servers), router, timeout

    async def generate(
        self, session: str, request_id: str, prompt_ids: Sequence[int], sampling: dict[str, Any]
    ) -> GenerateResult:
        """RolloutError when the response takes longer than rollout.request_timeout."""
        index = await self._router.acquire.remote(session)
        try:
            work = self._servers[index].generate.remote(request_id, prompt_ids, sampling)
            result: GenerateResult = await asyncio.wait_for(work, self._timeout)
            return result
        except asyncio.TimeoutError as error:
            raise RolloutError(
                f"no response from server {index} within rollout.request_timeout={self._timeout:g} "
                "s"
            ) from error
        finally:
            await self._router.release.remote(session)

    def replace(self, index: int, server: Any) -> None:
        """Send requests of server `index` to `server` from now on."""
        self._servers[index] = server

    async def close(self, session: str) -> None:
        await self._router.close.remote(session)


class AgentLoop(ABC):
    """One instance serves all samples of a worker; `run` must not keep state between them. The
    sample id is the session.
    """

    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    @abstractmethod
    async def run(
        self, prompt: Prompt, sampling: dict[str, Any], draft_version: int
    ) -> RolloutSample: ...


class SingleTurnAgentLoop(AgentLoop):
    """One prompt, one response."""

    async def run(
        self, prompt: Prompt, sampling: dict[str, Any], draft_version: int
    ) -> RolloutSample:
        # a new name for every attempt: the engine may still compute one whose agent loop died
        name = f"{prompt.sample_id}-v{draft_version}-{secrets.token_hex(3)}"
        result = await self.servers.generate(prompt.sample_id, name, prompt.prompt_ids, sampling)
        return RolloutSample(
            sample_id=prompt.sample_id,
            data_source=prompt.data_source,
            prompt_ids=prompt.prompt_ids,
            response_ids=result.token_ids,
            trace=from_extra_fields(result.extra_fields, len(result.token_ids)),
            draft_version=draft_version,
            finish_reason=result.finish_reason,
        )


AGENT_LOOPS: dict[str, type[AgentLoop]] = {"single_turn": SingleTurnAgentLoop}


def get_agent_loop(name: str) -> type[AgentLoop]:
    if name not in AGENT_LOOPS:
        raise ConfigError(
            f"rollout.agent.loop={name!r} is unknown; available: {', '.join(sorted(AGENT_LOOPS))}"
        )
    return AGENT_LOOPS[name]


class AgentLoopWorker:
    """Runs one agent loop per prompt, many at a time. Finished responses are scored while others
    are still being generated.
    """

    def __init__(
        self,
        loop: str,
        servers: Sequence[Any],
        router: Any,
        max_concurrency: int,
        request_timeout: float,
        teachers: Mapping[str, Sequence[Any]] | None = None,
        role: str = "agent loop",
        log_path: str | None = None,
    ) -> None:
        if log_path:
            redirect_output(log_path)
            open_log(role)
        self._servers = Servers(servers, router, request_timeout)
        self._teachers = Teachers(teachers, request_timeout) if teachers else None
        self._loop = get_agent_loop(loop)(self._servers)
        self._limit = asyncio.Semaphore(max_concurrency)

    async def run(
        self,
        prompts: Sequence[Prompt],
        sampling: dict[str, Any],
        draft_version: int,
        score: bool = False,
    ) -> list[RolloutSample | SampleFailure]:
        """The outcome of each prompt, in order: a sample, with its teacher's scores when `score`,
        or the reason why there is none.
        """
        return list(
            await asyncio.gather(
                *(self._one(prompt, sampling, draft_version, score) for prompt in prompts)
            )
        )

    async def replace_server(self, index: int, server: Any) -> None:
        self._servers.replace(index, server)

    async def replace_teacher(self, name: str, replica: int, server: Any) -> None:
        if self._teachers is not None:
            self._teachers.replace(name, replica, server)

    async def _one(
        self, prompt: Prompt, sampling: dict[str, Any], draft_version: int, score: bool
    ) -> RolloutSample | SampleFailure:
        async with self._limit:
            try:
                sample = await self._loop.run(prompt, sampling, draft_version)
                if score and self._teachers is not None:
                    name = prompt.sample_id
                    scores = await self._teachers.score(
                        name, prompt.teacher_key, sample.prompt_ids, sample.response_ids
                    )
                    sample = replace(sample, teacher=scores)
                return sample
            # the fleet decides whether the sample is run again
            except Exception as error:
                log.warning("no sample for %s", prompt.sample_id, exc_info=True)
                return SampleFailure(prompt.sample_id, f"{type(error).__name__}: {error}")
            finally:
                await self._servers.close(prompt.sample_id)


# AgentLoopWorker as a Ray actor.
AgentLoopWorkerActor: Any = ray.remote(AgentLoopWorker)
