"""A rollout server: frozen target and live draft in one engine. It takes token ids and returns
token ids with their verify trace, and it also answers OpenAI-compatible HTTP requests.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from verl_opd.devices import DEVICES
from verl_opd.engines.http import HttpServer
from verl_opd.engines.settings import EngineSettings, Speculation
from verl_opd.engines.vllm import VllmEngine
from verl_opd.errors import RolloutError
from verl_opd.opd.wire import to_extra_fields
from verl_opd.rollout.trace_check import TraceCheck
from verl_opd.snapshot import DraftSnapshot
from verl_opd.targets.layers import to_vllm_aux_ids


@dataclass(frozen=True)
class GenerateResult:
    """One response."""

    token_ids: tuple[int, ...]  # of the response
    finish_reason: str  # stop | length | abort
    extra_fields: dict[str, Any]  # its verify trace in wire form, the `dflash_*` fields


class RolloutServer:
    """The engine of one student worker. All methods are coroutines of one event loop."""

    def __init__(self, settings: EngineSettings) -> None:
        if settings.speculation is None:
            raise ValueError("a rollout server needs a draft: settings.speculation is None")
        self._speculation: Speculation = settings.speculation
        self._engine = VllmEngine(settings)
        self._http: HttpServer | None = None
        self._traces = TraceCheck()
        self._asleep = False
        self._waiting: dict[str, asyncio.Future[list[Any] | None]] = {}  # for their trace, by id
        self._collector: asyncio.Task[None] | None = None

    # -- start and stop ----------------------------------------------------------------------------

    async def start(self) -> dict[str, Any]:
        """Start engine and HTTP, attach the recorder and run the start-up probe. Returns what the
        probe read from the engine, with `url` and the `seconds` that the start took. RolloutError
        names what is missing.
        """
        started = time.monotonic()
        settings = self._engine.settings
        self._http = HttpServer(settings.host.http_port)
        try:
            self._engine.start()
            await self._http.serve(self._engine.llm, settings.model_path)
            probe = await self._probe()
        except BaseException:
            await self.stop()
            raise
        return {**probe, "url": self._http.url, "seconds": time.monotonic() - started}

    async def _probe(self) -> dict[str, Any]:
        """What the engine really drafts with. RolloutError when that is not what is configured, or
        when the recorder misses a verify step.
        """
        names = list(self._speculation.engine_names)
        probe: dict[str, Any] = (await self._engine.rpc("opd_install", names))[0]
        if problem := probe["failure"] or _differences(probe, self._speculation):
            raise RolloutError(f"start-up probe: {problem}")
        tokens = self._speculation.num_speculative_tokens + 3
        result = await self.generate(
            f"probe-{uuid.uuid4().hex}",
            (1, 2, 3),
            {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True},
        )
        if not result.extra_fields["dflash_num_verify_steps"]:
            stats = await self.recorder_stats()
            raise RolloutError(
                f"start-up probe: {len(result.token_ids)} tokens were generated and no verify step "
                f"was recorded ({stats})"
            )
        return probe

    async def stop(self) -> None:
        """End HTTP and engine, with all their processes."""
        if self._http is not None:
            await self._http.stop()
        self._engine.stop()

    async def failure(self) -> str:
        """Why this server cannot continue; empty while it can."""
        return self._engine.failure()

    async def http_address(self) -> tuple[str, str]:
        """(base URL, API key) of the OpenAI-compatible server."""
        assert self._http is not None
        return self._http.url, self._http.key

    # -- generation --------------------------------------------------------------------------------

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling: dict[str, Any]
    ) -> GenerateResult:
        """One response. `sampling` holds fields of vLLM's SamplingParams. RolloutError while
        asleep, or when the trace does not explain it.
        """
        token_ids, finish = await self._tokens(request_id, prompt_ids, sampling)
        events = await self._events(request_id)
        if events is None and token_ids:
            raise RolloutError(
                f"request {request_id} was not recorded ({await self.recorder_stats()})"
            )
        trace = self._traces.explain(request_id, events or [], token_ids)
        return GenerateResult(token_ids, finish, to_extra_fields(trace))

    async def generate_tokens(
        self, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]
    ) -> int:
        """Generate from all prompts at once, without collecting traces; returns the number of
        tokens (for throughput measurements).
        """
        names = [f"bench-{uuid.uuid4().hex}" for _ in prompts]
        done = await asyncio.gather(
            *(
                self._tokens(name, prompt, sampling)
                for name, prompt in zip(names, prompts, strict=True)
            )
        )
        await self._engine.rpc("opd_pop_traces", names)
        return sum(len(tokens) for tokens, _ in done)

    async def _tokens(
        self, request_id: str, prompt_ids: Sequence[int], sampling: dict[str, Any]
    ) -> tuple[tuple[int, ...], str]:
        if self._asleep:
            raise RolloutError(
                f"request {request_id}: the engine is asleep; wake its weights and KV cache first"
            )
        completion = (await self._engine.generate(request_id, prompt_ids, sampling)).outputs[0]
        return tuple(completion.token_ids), completion.finish_reason or "abort"

    async def _events(self, request_id: str) -> list[Any] | None:
        """The recorder's events of this request; requests that finish together share one
        `collective_rpc`.
        """
        future = self._waiting.setdefault(request_id, asyncio.get_running_loop().create_future())
        if self._collector is None or self._collector.done():
            self._collector = asyncio.create_task(self._collect_events())
        return await future

    async def _collect_events(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, {}
            try:
                parts = await self._engine.rpc("opd_pop_traces", list(batch))
            except Exception as error:
                for future in batch.values():
                    future.set_exception(error)
                continue  # requests that finished since then are collected in the next round
            for request_id, future in batch.items():
                future.set_result(parts[0][request_id])

    # -- phases and weights ------------------------------------------------------------------------

    async def sleep(self, level: int) -> None:
        """Stop scheduling, end requests that still run (HTTP too) and release memory (level 1: all
        but a host copy of the weights; level 0, for CPUs: none). Idempotent. RolloutError for
        level 2.
        """
        if level > 1:
            raise RolloutError(
                f"sleep level {level} drops the frozen target, and nothing loads it again: use "
                "level 1, which keeps a copy on the host"
            )
        if self._asleep:
            return
        self._asleep = True
        await self._engine.call("sleep", level)

    async def wake(self, tags: list[str]) -> None:
        """Map `weights`, then `kv_cache`, again; the engine serves once the KV cache is mapped.
        Idempotent.
        """
        if not self._asleep:
            return
        sleeps = DEVICES[self._engine.settings.host.device].sleeps
        if sleeps:
            await self._engine.call("wake_up", tags)
        if "kv_cache" in tags:
            if not sleeps:
                await self._engine.call("wake_up", ["scheduling"])
            self._asleep = False

    async def load_draft(self, snapshot: DraftSnapshot) -> dict[str, Any]:
        """Load `snapshot` into the live drafter; per worker: error (empty when loaded), and
        version, checksum, tensors as read back.
        """
        reports = await self._engine.rpc(
            "opd_load_draft", snapshot.path, snapshot.version, snapshot.checksum
        )
        return {"workers": reports}

    async def read_back(self) -> dict[str, Any]:
        """Version, checksum and count of the draft's tensors as the engine holds them."""
        report: dict[str, Any] = (await self._engine.rpc("opd_read_back"))[0]
        return report

    async def target_checksum(self) -> str:
        # patient, because it reads every weight
        return str((await self._engine.rpc("opd_target_checksum", patient=True))[0])

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: their draft keys and values come from older weights. HTTP
        requests in flight are prefilled again.
        """
        if not await self._engine.call("reset_prefix_cache", reset_running_requests=True):
            raise RolloutError("the engine did not reset its prefix cache")

    async def set_drafting(self, enabled: bool) -> bool:
        """Turn proposals on or off; False when this engine cannot. RolloutError while requests of
        the run are in flight.
        """
        if self._engine.in_flight:
            raise RolloutError(
                f"drafting cannot be switched with {self._engine.in_flight} requests in flight"
            )
        done = all(await self._engine.rpc("opd_set_drafting", enabled))
        await self.reset_prefix_cache()
        return done

    # -- recorder ----------------------------------------------------------------------------------

    async def set_recording(self, enabled: bool) -> None:
        await self._engine.rpc("opd_set_recording", enabled)

    async def recorder_stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = (await self._engine.rpc("opd_stats"))[0]
        return {**stats, **self._traces.stats()}


def _differences(probe: dict[str, Any], speculation: Speculation) -> str:
    """Where the live engine differs from the configuration; empty when it does not."""
    expected = {
        "method": speculation.method,
        "num_speculative_tokens": speculation.num_speculative_tokens,
        "mask_token_id": speculation.mask_token_id,
        "token_map": speculation.token_map,
        "aux_layer_ids": to_vllm_aux_ids(speculation.target_layer_ids),
        "tensor_parallel_size": 1,  # draft push and read-back support unsharded tensors only
        # a mask_embedding.pt beside the draft, which training would not replay
        "own_mask_embedding": False,
    }
    return "; ".join(
        f"{name} is {probe[name]!r} in the engine, configured {value!r}"
        for name, value in expected.items()
        if probe[name] != value
    )


# RolloutServer as a Ray actor: asynchronous, so up to 1000 calls are in flight at once.
RolloutServerActor: Any = ray.remote(RolloutServer)
