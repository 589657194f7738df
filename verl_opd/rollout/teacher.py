"""Teacher servers: vLLM engines that score finished responses, and the side of them that an agent
loop sees.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from verl_opd.devices import DEVICES
from verl_opd.errors import RolloutError
from verl_opd.opd.trace import TeacherScores
from verl_opd.process import redirect_output
from verl_opd.rollout.router import Router
from verl_opd.rollout.server import STOP_SECONDS, last_output, parsed_kwargs, start_async_llm


@dataclass(frozen=True)
class TeacherSettings:
    """What one teacher server needs to start; see the `teacher` section of the configuration. name:
    its key in teacher.models. top_k: most likely tokens reported per position, 0 = none.
    """

    name: str
    model_path: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    top_k: int = 0
    trust_remote_code: bool = False
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool = True
    kv_cache_gb: int | None = None
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    cpu_cores: tuple[int, ...] = ()
    seed: int = 0
    log_path: str | None = None
    v2_runner: bool = False


def teacher_arguments(settings: TeacherSettings) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs."""
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        "load_format": "auto",
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "enforce_eager": settings.enforce_eager,
        "seed": settings.seed,
        "max_logprobs": max(1, settings.top_k),
        # of the model's own distribution, whatever the sampling parameters
        "logprobs_mode": "raw_logprobs",
        "skip_tokenizer_init": True,
    }
    if not DEVICES[settings.device].on_host:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    return {**arguments, **parsed_kwargs(settings.engine_kwargs)}


def scores_from_prompt_logprobs(
    entries: Any, prompt_len: int, response_ids: Sequence[int], top_k: int
) -> TeacherScores:
    """vLLM's flat prompt log-probs (FlatLogprobs) of prompt + response as scores of the response.

    Entry p holds first the token at p itself, then the top_k most likely ones, given everything
    before p. ValueError when it does not.
    """
    length = len(response_ids)
    if len(entries) != prompt_len + length:
        raise ValueError(f"{len(entries)} log-prob rows for {prompt_len} + {length} tokens")
    starts = np.array(entries.start_indices[prompt_len:], dtype=np.int64)
    ids, logprobs = (
        np.array(entries.token_ids, dtype=np.int32),
        np.array(entries.logprobs, dtype=np.float32),
    )
    widths = np.array(entries.end_indices[prompt_len:], dtype=np.int64) - starts
    if (widths < 1 + top_k).any() or (ids[starts] != np.array(response_ids, dtype=np.int32)).any():
        raise ValueError(f"log-prob rows do not hold the response's own tokens and {top_k} more")
    top = starts[:, None] + 1 + np.arange(top_k)
    return TeacherScores(logprobs[starts], ids[top], logprobs[top])


class TeacherServer:
    """One vLLM engine without a draft that only reads. All methods are coroutines of one event
    loop.
    """

    def __init__(self, settings: TeacherSettings) -> None:
        if settings.log_path:
            redirect_output(settings.log_path)
        self._settings = settings
        self._engine: Any = None

    async def start(self) -> dict[str, Any]:
        """Start the engine and let it score three tokens. RolloutError with the reason when it does
        not come up.
        """
        started = time.monotonic()
        what = f"teacher {self._settings.name} ({self._settings.model_path})"
        self._engine = start_async_llm(self._settings, teacher_arguments(self._settings), what)
        try:
            await self.score("probe", (1, 2), (3,))
        except BaseException:
            await self.stop()
            raise
        return {"seconds": time.monotonic() - started}

    async def failure(self) -> str:
        """Why this server cannot go on; empty while it can."""
        return (
            ""
            if self._engine is not None and not self._engine.errored
            else "its engine core died, or never started"
        )

    async def score(
        self, request_id: str, prompt_ids: Sequence[int], response_ids: Sequence[int]
    ) -> TeacherScores:
        """One forward over prompt + response. RolloutError when it cannot be scored."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if not response_ids:
            none = np.zeros((0, self._settings.top_k))
            return TeacherScores(
                np.zeros(0, np.float32), none.astype(np.int32), none.astype(np.float32)
            )
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=self._settings.top_k,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt: Any = {"prompt_token_ids": [*prompt_ids, *response_ids]}
        final = await last_output(self._engine.generate(prompt, parameters, request_id))
        if final is None or final.prompt_logprobs is None:
            raise RolloutError(
                f"teacher {self._settings.name}, request {request_id}: the engine returned no "
                "log-probs"
            )
        try:
            return scores_from_prompt_logprobs(
                final.prompt_logprobs, len(prompt_ids), response_ids, self._settings.top_k
            )
        except ValueError as error:
            raise RolloutError(
                f"teacher {self._settings.name}, request {request_id}: {error}"
            ) from error

    async def stop(self) -> None:
        if self._engine is not None:
            self._engine.shutdown(timeout=STOP_SECONDS)


# TeacherServer as a Ray actor.
TeacherServerActor: Any = ray.remote(TeacherServer)


class Teachers:
    """All teacher servers, by name, as an agent loop worker sees them. With a single teacher every
    sample goes to it, whatever its key.
    """

    def __init__(self, servers: Mapping[str, Sequence[Any]], timeout: float) -> None:
        self._servers, self._timeout = servers, timeout
        self._routers = {name: Router(len(replicas)) for name, replicas in servers.items()}

    async def score(
        self, session: str, key: str, prompt_ids: Sequence[int], response_ids: Sequence[int]
    ) -> TeacherScores:
        """Scores of one response; RolloutError when several teachers are there and none is named
        `key`, and after rollout.request_timeout.
        """
        name = next(iter(self._servers)) if len(self._servers) == 1 else key
        if name not in self._servers:
            raise RolloutError(f"no teacher is named {key!r}; there are {', '.join(self._servers)}")
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
