"""Teacher servers: engines that score finished responses, and how an agent loop reaches them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from verl_opd.engines.settings import EngineSettings
from verl_opd.engines.vllm import VllmEngine
from verl_opd.errors import RolloutError
from verl_opd.opd.trace import TeacherScores
from verl_opd.rollout.router import Router


@dataclass(frozen=True)
class TeacherSettings:
    """What one teacher server is started with."""

    name: str  # its key in teacher.models
    engine: EngineSettings  # of the model, without a draft
    top_k: int = 0  # most likely tokens reported per position; 0 = none


def scores_from_prompt_logprobs(
    entries: Any, prompt_len: int, response_ids: Sequence[int], top_k: int
) -> TeacherScores:
    """vLLM's flat prompt log-probs (FlatLogprobs) of prompt + response as scores of the response.

    Row p holds first the token at p itself, then the top_k most likely ones, given everything
    before p. ValueError when a row does not.
    """
    length = len(response_ids)
    if len(entries) != prompt_len + length:
        raise ValueError(f"{len(entries)} log-prob rows for {prompt_len} + {length} tokens")
    starts = np.array(entries.start_indices[prompt_len:], dtype=np.int64)  # [R], into the flat ids
    widths = np.array(entries.end_indices[prompt_len:], dtype=np.int64) - starts  # [R]
    ids = np.array(entries.token_ids, dtype=np.int32)  # [entries of all rows]
    logprobs = np.array(entries.logprobs, dtype=np.float32)  # like ids
    if (widths < 1 + top_k).any() or (ids[starts] != np.array(response_ids, dtype=np.int32)).any():
        raise ValueError(f"log-prob rows do not hold the response's own tokens and {top_k} more")
    top = starts[:, None] + 1 + np.arange(top_k)  # [R, top_k], into the flat ids
    return TeacherScores(logprobs[starts], ids[top], logprobs[top])


class TeacherServer:
    """One engine without a draft that only scores. All methods are coroutines of one event loop."""

    def __init__(self, settings: TeacherSettings) -> None:
        self._name, self._top_k = settings.name, settings.top_k
        self._engine = VllmEngine(
            settings.engine,
            f"teacher {settings.name} ({settings.engine.model_path})",
            max_logprobs=max(1, settings.top_k),
            # of the model's own distribution, whatever the sampling parameters
            logprobs_mode="raw_logprobs",
            skip_tokenizer_init=True,
        )

    async def start(self) -> dict[str, Any]:
        """Start the engine and score one token with it; returns the `seconds` that this took.
        RolloutError gives the reason when it does not start.
        """
        started = time.monotonic()
        self._engine.start()
        try:
            await self.score("probe", (1, 2), (3,))
        except BaseException:
            await self.stop()
            raise
        return {"seconds": time.monotonic() - started}

    async def failure(self) -> str:
        """Why this server cannot continue; empty while it can."""
        return self._engine.failure()

    async def score(
        self, request_id: str, prompt_ids: Sequence[int], response_ids: Sequence[int]
    ) -> TeacherScores:
        """One forward over prompt + response. RolloutError when it cannot be scored."""
        if not response_ids:
            none = np.zeros((0, self._top_k))
            return TeacherScores(
                np.zeros(0, np.float32), none.astype(np.int32), none.astype(np.float32)
            )
        sampling = {
            "temperature": 0.0,
            "max_tokens": 1,
            "prompt_logprobs": self._top_k,
            "flat_logprobs": True,
        }
        output = await self._engine.generate(request_id, (*prompt_ids, *response_ids), sampling)
        place = f"teacher {self._name}, request {request_id}"
        if output.prompt_logprobs is None:
            raise RolloutError(f"{place}: the engine returned no log-probs")
        try:
            return scores_from_prompt_logprobs(
                output.prompt_logprobs, len(prompt_ids), response_ids, self._top_k
            )
        except ValueError as error:
            raise RolloutError(f"{place}: {error}") from error

    async def stop(self) -> None:
        self._engine.stop()


# TeacherServer as a Ray actor.
TeacherServerActor: Any = ray.remote(TeacherServer)


class Teachers:
    """Sends responses to teacher servers, by the teacher's name. A single teacher scores every
    sample, and keys are not used.
    """

    def __init__(self, servers: Mapping[str, Sequence[Any]], timeout: float) -> None:
        self._servers = {name: list(replicas) for name, replicas in servers.items()}
        self._timeout = timeout
        self._routers = {name: Router(len(replicas)) for name, replicas in servers.items()}

    def replace(self, name: str, replica: int, server: Any) -> None:
        """Send requests for this replica of teacher `name` to `server` from now on."""
        self._servers[name][replica] = server

    async def score(
        self, session: str, key: str, prompt_ids: Sequence[int], response_ids: Sequence[int]
    ) -> TeacherScores:
        """Scores of one response; RolloutError when there are several teachers and none is named
        `key`, and after rollout.request_timeout.
        """
        name = next(iter(self._servers)) if len(self._servers) == 1 else key
        if name not in self._servers:
            raise RolloutError(f"unknown teacher {key!r}; known are {', '.join(self._servers)}")
        router = self._routers[name]
        index = router.acquire(session)
        try:
            work = self._servers[name][index].score.remote(session, prompt_ids, response_ids)
            scores: TeacherScores = await asyncio.wait_for(work, self._timeout)
        except asyncio.TimeoutError as error:
            raise RolloutError(
                f"teacher {name}, replica {index}: no scores within "
                f"rollout.request_timeout={self._timeout:g} s"
            ) from error
        finally:
            router.release(session)
            router.close(session)
        return scores
