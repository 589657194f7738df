"""One vLLM engine with frozen target and live draft: token ids in, token ids and verify trace out;
OpenAI-compatible HTTP beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray

from verl_opd.devices import DEVICES, actor_environment
from verl_opd.engines.http import MAX_CONNECTIONS, KeyRequired
from verl_opd.engines.watchdog import TokenProgress
from verl_opd.errors import RolloutError
from verl_opd.opd.trace import VerifyTrace, check_trace, trace_from_events
from verl_opd.opd.wire import to_extra_fields
from verl_opd.process import clean_up_after, redirect_output
from verl_opd.snapshot import DraftSnapshot
from verl_opd.targets.layers import vllm_aux_layer_id

_BROKEN_SHARE = 0.05
_LOOK_SECONDS = 1.0  # how often a call that has not returned is looked after
# an engine takes about 10 to end by itself; killed earlier, it leaves shared memory behind
STOP_SECONDS = 30.0
KEY_VARIABLE = "VERL_OPD_API_KEY"
EXTENSION = "verl_opd.engines.worker.extension.OpdWorkerExtension"


@dataclass(frozen=True)
class EngineSettings:
    """What one engine needs to start; see the `rollout` section of the configuration. cpu_cores:
    cores to pin to, empty = not pinned. engine_names: see DraftFamily. token_map: checksum of
    {"d2t": offsets} of a draft with a vocabulary of its own.
    """

    target_path: str
    target_dtype: str
    draft_path: str
    method: str
    num_speculative_tokens: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int | None
    max_model_len: int
    max_num_seqs: int
    engine_names: tuple[tuple[str, str], ...] = ()
    token_map: str | None = None
    v2_runner: bool = False
    device: str = "cpu"
    trust_remote_code: bool = False
    gpu_memory_utilization: float = 0.4
    enforce_eager: bool = True
    kv_cache_gb: int | None = None
    cpu_cores: tuple[int, ...] = ()
    seed: int = 0
    log_path: str | None = None
    stall_timeout: float = 300.0
    http_port: int = 0  # 0 = a free one from the kernel
    engine_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerateResult:
    """token_ids: the response. finish_reason: stop | length | abort. extra_fields: the `dflash_*`
    wire form of its verify trace.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    extra_fields: dict[str, Any]


class EngineHost(Protocol):
    """What of an engine's settings decides its environment."""

    @property
    def device(self) -> str: ...

    @property
    def cpu_cores(self) -> tuple[int, ...]: ...

    @property
    def kv_cache_gb(self) -> int | None: ...

    @property
    def v2_runner(self) -> bool: ...

    @property
    def log_path(self) -> str | None: ...


def engine_environment(settings: EngineHost) -> dict[str, str | None]:
    """Variables to set (None = remove) before vLLM is imported. V1 is chosen where both runners
    draft with the family: its seam is the one that has been run.
    """
    env: dict[str, str | None] = {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if settings.v2_runner else "0",
        "VLLM_NO_USAGE_STATS": "1",  # nothing leaves this machine
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    if settings.device == "cpu":
        env["OMP_NUM_THREADS"] = None  # Ray sets it to 1, which the engine would obey
        env["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gb or 1)
        if settings.cpu_cores:
            env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, settings.cpu_cores))
    return {**env, **actor_environment(DEVICES[settings.device], "engine", os.environ)}


def set_engine_environment(settings: EngineHost) -> None:
    for name, value in engine_environment(settings).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs; `engine_kwargs` come last, JSON strings among
    them parsed.
    """
    arguments: dict[str, Any] = {
        "model": settings.target_path,
        "dtype": settings.target_dtype,
        "trust_remote_code": settings.trust_remote_code,
        # draft-only sync never streams the target, so it must really be loaded
        "load_format": "auto",
        "speculative_config": {
            "method": settings.method,
            "model": settings.draft_path,
            "num_speculative_tokens": settings.num_speculative_tokens,
        },
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "enforce_eager": settings.enforce_eager,
        "seed": settings.seed,
        "disable_log_stats": False,
        "worker_extension_cls": EXTENSION,
    }
    if settings.device != "cpu":
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
        arguments["enable_sleep_mode"] = True
    return {**arguments, **parsed_kwargs(settings.engine_kwargs)}


def parsed_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments as the user wrote them, JSON strings among them parsed."""
    return {
        name: json.loads(value) if isinstance(value, str) and value[:1] in "{[" else value
        for name, value in given.items()
    }


class TraceCheck:
    """Compares every trace with its response. A trace that does not explain it is dropped and
    counted; too many of them end the run.
    """

    def __init__(self) -> None:
        self.responses = 0
        self.broken = 0
        self.last_broken = ""

    def explain(
        self, request_id: str, events: Sequence[Any], token_ids: Sequence[int]
    ) -> VerifyTrace:
        """The verified trace of a response, or an empty one. RolloutError once more than
        _BROKEN_SHARE of the responses are unexplained.
        """
        self.responses += 1
        try:
            trace = trace_from_events(events, len(token_ids))
            check_trace(trace, token_ids)
        except ValueError as error:
            self.broken += 1
            self.last_broken = f"request {request_id}: {error}"
            if self.broken > 1 + _BROKEN_SHARE * self.responses:
                raise RolloutError(
                    f"{self.broken} of {self.responses} verify traces do not explain their "
                    f"response; {self.last_broken}"
                ) from error
            return VerifyTrace(len(token_ids), ())
        return trace

    def stats(self) -> dict[str, Any]:
        return {
            "responses": self.responses,
            "broken_traces": self.broken,
            "last_broken_trace": self.last_broken,
        }


def token_counter(progress: TokenProgress) -> Any:
    """A factory of vLLM stat loggers (StatLoggerBase) that tell `progress` about every engine step
    with tokens in it.
    """
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counter(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            """As vLLM calls it; `progress` is all this counter needs."""

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any
        ) -> None:
            usage = getattr(scheduler_stats, "kv_cache_usage", progress.cache_usage)
            tokens = iteration_stats is not None and (
                iteration_stats.num_generation_tokens or iteration_stats.num_prompt_tokens
            )
            if tokens or usage != progress.cache_usage:
                progress.moved()
            progress.cache_usage = usage

        def log_engine_initialized(self) -> None:
            """Nothing to tell: the probe reports the start."""

    return Counter


def start_async_llm(
    settings: EngineHost,
    arguments: dict[str, Any],
    what: str,
    progress: TokenProgress | None = None,
) -> Any:
    """vLLM's AsyncLLM, in the environment that `settings` ask for; its tokens told to `progress`.
    RolloutError says that `what` did not start, and where its log is. From now on whatever this
    process leaves behind is cleaned up after it.
    """
    clean_up_after(children=True)
    set_engine_environment(settings)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    loggers = None if progress is None else [token_counter(progress)]
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=loggers)
    except Exception as error:
        raise RolloutError(
            f"{what} did not start ({type(error).__name__}: {error}); log: {settings.log_path}"
        ) from error


async def last_output(outputs: Any) -> Any:
    """The last item of an asynchronous generator; None without any."""
    final = None
    async for output in outputs:
        final = output
    return final


class RolloutServer:
    """The engine of one student worker. All methods are coroutines of one event loop."""

    def __init__(self, settings: EngineSettings) -> None:
        if settings.log_path:
            redirect_output(settings.log_path)
        self._settings = settings
        self._engine: Any = None
        self._asleep = False
        self._finished: dict[str, asyncio.Future[list[Any] | None]] = {}
        self._popper: asyncio.Task[None] | None = None
        self._traces = TraceCheck()
        self._in_flight = 0
        self._progress = TokenProgress()
        self._stalled = ""
        self._http: Any = None
        self._key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)
        self._url = ""

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> dict[str, Any]:
        """Start engine and HTTP, attach the recorder and probe everything; the probe's facts.
        RolloutError names what is missing.
        """
        started = time.monotonic()
        listener = self._listen()
        try:
            self._engine = start_async_llm(
                self._settings, engine_arguments(self._settings), "the engine", self._progress
            )
        except BaseException:
            listener.close()
            raise
        try:
            await self._serve_http(listener)
            facts = await self._probe()
        except BaseException:
            await self.stop()
            raise
        return {**facts, "url": self._url, "seconds": time.monotonic() - started}

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", self._settings.http_port))
        except OSError as error:
            listener.close()
            raise RolloutError(
                f"port {self._settings.http_port} on 127.0.0.1 is taken ({error.strerror}): choose "
                "another, or 0 for a free one"
            ) from error
        self._url = "http://{}:{}".format(*listener.getsockname())
        return listener

    async def _serve_http(self, listener: socket.socket) -> None:
        """vLLM's own OpenAI-compatible app over this engine, on loopback, behind a generated key
        (KeyRequired).
        """
        import uvicorn
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        args = make_arg_parser(FlexibleArgumentParser()).parse_args(
            ["--model", self._settings.target_path]
        )
        args.disable_log_stats = False
        args.disable_fastapi_docs = True
        tasks = await self._engine.get_supported_tasks()
        app = build_app(args, tasks, self._engine.model_config)
        await init_app_state(self._engine, app.state, args, tasks)
        config = uvicorn.Config(
            KeyRequired(app, self._key),
            log_level="warning",
            lifespan="off",
            access_log=False,
            timeout_graceful_shutdown=5,
            limit_concurrency=MAX_CONNECTIONS,
        )
        self._http = uvicorn.Server(config)
        self._http.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._http_task = asyncio.create_task(self._http.serve(sockets=[listener]))

    async def _probe(self) -> dict[str, Any]:
        facts: dict[str, Any] = (await self._rpc("opd_install", list(self._settings.engine_names)))[
            0
        ]
        if facts["failure"]:
            raise RolloutError(f"start-up probe: {facts['failure']}")
        want = {
            "method": self._settings.method,
            "num_speculative_tokens": self._settings.num_speculative_tokens,
            "mask_token_id": self._settings.mask_token_id,
            "token_map": self._settings.token_map,
            "aux_layer_ids": [vllm_aux_layer_id(i) for i in self._settings.target_layer_ids],
            "tensor_parallel_size": 1,  # draft push and read-back know unsharded tensors only
            # a mask_embedding.pt beside the draft, which training would not replay
            "own_mask_embedding": False,
        }
        wrong = [
            f"{name} is {facts[name]!r} in the engine, configured {value!r}"
            for name, value in want.items()
            if facts[name] != value
        ]
        if wrong:
            raise RolloutError(f"start-up probe: {'; '.join(wrong)}")
        tokens = self._settings.num_speculative_tokens + 3
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
        return facts

    async def stop(self) -> None:
        """End HTTP and engine; nothing of them is left running."""
        if self._http is not None:
            self._http.should_exit = True
            await self._http_task
        if self._engine is not None:
            self._engine.shutdown(timeout=STOP_SECONDS)

    # -- generation --------------------------------------------------------------------------------

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling: dict[str, Any]
    ) -> GenerateResult:
        """One response. `sampling` holds fields of vLLM's SamplingParams. RolloutError while
        asleep, or when the trace does not explain it.
        """
        token_ids, finish = await self._tokens(request_id, prompt_ids, sampling)
        events = await self._pop(request_id)
        if events is None and token_ids:
            raise RolloutError(
                f"request {request_id}: the recorder never saw it ({await self.recorder_stats()})"
            )
        return GenerateResult(
            token_ids,
            finish,
            to_extra_fields(self._traces.explain(request_id, events or [], token_ids)),
        )

    async def generate_tokens(
        self, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]
    ) -> int:
        """Generate without collecting traces, all prompts at once; the number of tokens (for
        throughput measurements).
        """
        names = [f"bench-{uuid.uuid4().hex}" for _ in prompts]
        done = await asyncio.gather(
            *(
                self._tokens(name, prompt, sampling)
                for name, prompt in zip(names, prompts, strict=True)
            )
        )
        await self._rpc("opd_pop_traces", names)
        return sum(len(tokens) for tokens, _ in done)

    async def _tokens(
        self, request_id: str, prompt_ids: Sequence[int], sampling: dict[str, Any]
    ) -> tuple[tuple[int, ...], str]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._asleep:
            raise RolloutError(
                f"request {request_id}: the engine is asleep; wake its weights and KV cache first"
            )
        parameters = SamplingParams(
            **sampling, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
        )
        prompt: Any = {"prompt_token_ids": list(prompt_ids)}
        self._in_flight += 1
        try:
            final = await self._watched(
                last_output(self._engine.generate(prompt, parameters, request_id)), request_id
            )
        finally:
            self._in_flight -= 1
        if final is None:
            raise RolloutError(f"request {request_id}: the engine returned nothing")
        completion = final.outputs[0]
        return tuple(completion.token_ids), completion.finish_reason or "abort"

    async def _watched(self, work: Any, request_id: str) -> Any:
        """The result of `work`; RolloutError once the engine has produced no token for anybody
        during stall_timeout seconds.
        """
        if self._in_flight == 1:  # nobody waited before, so nothing moved
            self._progress.moved()
        return await self._answered(
            work, f"request {request_id}", "no token for anybody", lambda: self._progress.idle
        )

    async def failure(self) -> str:
        """Why this engine cannot go on: it died or hangs; empty while it can."""
        if self._engine is None:
            return "it did not start"
        if self._stalled:
            return self._stalled
        return (
            f"{type(self._engine.dead_error).__name__}: its engine core died"
            if self._engine.errored
            else ""
        )

    async def _pop(self, request_id: str) -> list[Any] | None:
        """This request's events; requests that finish together share one `collective_rpc`."""
        future = self._finished.setdefault(request_id, asyncio.get_running_loop().create_future())
        if self._popper is None or self._popper.done():
            self._popper = asyncio.create_task(self._pop_all())
        return await future

    async def _pop_all(self) -> None:
        while self._finished:
            batch, self._finished = self._finished, {}
            try:
                parts = await self._rpc("opd_pop_traces", list(batch))
            except Exception as error:
                for future in batch.values():
                    future.set_exception(error)
                continue  # whoever came meanwhile waits for an answer of its own
            for request_id, future in batch.items():
                future.set_result(parts[0][request_id])

    # -- phases and weights ------------------------------------------------------------------------

    async def sleep(self, level: int) -> None:
        """Stop scheduling, end what still runs (HTTP too) and release memory (level 1: host copy
        kept; 0: nothing, all a CPU can). Idempotent. RolloutError for level 2.
        """
        if level > 1:
            raise RolloutError(
                f"sleep level {level} drops the frozen target, and nobody streams it again: use "
                "level 1, which keeps a copy on the host"
            )
        if self._asleep:
            return
        self._asleep = True
        await self._call("sleep", level)

    async def wake(self, tags: list[str]) -> None:
        """Map `weights`, then `kv_cache`, again; requests are taken once the KV cache is back.
        Idempotent.
        """
        if not self._asleep:
            return
        if self._settings.device != "cpu":
            await self._call("wake_up", tags)
        if "kv_cache" in tags:
            if self._settings.device == "cpu":
                await self._call("wake_up", ["scheduling"])
            self._asleep = False

    async def load_draft(self, snapshot: DraftSnapshot) -> dict[str, Any]:
        """Load `snapshot` into the live drafter; per worker: error (empty when loaded), and
        version, checksum, tensors as read back.
        """
        reports = await self._rpc(
            "opd_load_draft", snapshot.path, snapshot.version, snapshot.checksum
        )
        return {"workers": reports}

    async def read_back(self) -> dict[str, Any]:
        report: dict[str, Any] = (await self._rpc("opd_read_back"))[0]
        return report

    async def target_checksum(self) -> str:
        return str((await self._rpc("opd_target_checksum", patient=True))[0])  # reads every weight

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: their draft keys and values come from older weights. HTTP
        requests in flight are prefilled again.
        """
        if not await self._call("reset_prefix_cache", reset_running_requests=True):
            raise RolloutError("the engine did not reset its prefix cache")

    async def set_drafting(self, enabled: bool) -> bool:
        """Turn proposals on or off; False when this engine cannot. RolloutError while requests of
        ours are in flight.
        """
        if self._in_flight:
            raise RolloutError(
                f"drafting cannot be switched with {self._in_flight} requests in flight"
            )
        done = all(await self._rpc("opd_set_drafting", enabled))
        await self.reset_prefix_cache()
        return done

    async def set_recording(self, enabled: bool) -> None:
        await self._rpc("opd_set_recording", enabled)

    async def recorder_stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = (await self._rpc("opd_stats"))[0]
        return {**stats, **self._traces.stats()}

    async def http_address(self) -> tuple[str, str]:
        """(base URL, API key) of the OpenAI-compatible server."""
        return self._url, self._key

    async def _rpc(self, method: str, *args: Any, patient: bool = False) -> list[Any]:
        results: list[Any] = await self._call(
            "collective_rpc", method, args=args, patient=patient, what=method
        )
        return results

    async def _call(
        self, method: str, *args: Any, patient: bool = False, what: str = "", **kwargs: Any
    ) -> Any:
        """A method of vLLM's engine, watched; `patient`: it may take any time. `what`: its name in
        messages.
        """
        started, name = time.monotonic(), what or method
        idle = None if patient else lambda: time.monotonic() - started
        return await self._answered(
            getattr(self._engine, method)(*args, **kwargs), name, f"no answer to {name}", idle
        )

    async def _answered(
        self, work: Any, what: str, silence: str, idle: Callable[[], float] | None
    ) -> Any:
        """The result of a call into the engine core, which never comes once the core is dead:
        RolloutError then, and when it has been `idle()` for stall_timeout seconds (None: however
        long), which `silence` names.
        """
        task, limit = asyncio.ensure_future(work), self._settings.stall_timeout
        while True:
            done, _ = await asyncio.wait({task}, timeout=min(_LOOK_SECONDS, limit))
            if done:
                return task.result()
            if self._engine.errored:
                task.cancel()
                raise RolloutError(f"{what}: the engine core died")
            if idle is not None and idle() >= limit:
                task.cancel()
                self._stalled = f"{silence} in rollout.stall_timeout={limit:g} s"
                raise RolloutError(f"{what}: the engine hangs, {self._stalled}")


# RolloutServer as a Ray actor: asynchronous, so up to 1000 calls are in flight at once.
RolloutServerActor: Any = ray.remote(RolloutServer)
