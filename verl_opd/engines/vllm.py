"""One vLLM engine. Only this module starts, calls, watches and stops engines."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from verl_opd.engines.settings import EngineSettings, engine_arguments, engine_environment
from verl_opd.engines.watchdog import TokenProgress, token_counter
from verl_opd.errors import RolloutError
from verl_opd.logs import open_log
from verl_opd.process import clean_up_after, redirect_output

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # how often the watchdog looks at a call that has not returned
# an engine needs about 10 to stop; killed earlier, it leaves shared memory behind
_STOP_SECONDS = 30.0


class VllmEngine:
    """vLLM's AsyncLLM with a watchdog around every call. All methods belong to one event loop.

    title: the engine's name in messages. own: arguments of AsyncEngineArgs beside those that the
    settings give. The output of this process goes to the settings' log file from now on.
    """

    def __init__(self, settings: EngineSettings, title: str = "the engine", **own: Any) -> None:
        if settings.host.log_path:
            redirect_output(settings.host.log_path)
            open_log(settings.host.role)
        self.settings, self.title = settings, title
        self.llm: Any = None  # vLLM's AsyncLLM, once started
        self.in_flight = 0  # requests of `generate` that have not returned
        self._own = own
        self._progress = TokenProgress()
        self._stall = ""  # what the watchdog saw of a hanging engine; empty = it does not hang

    # -- start and stop ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine in the environment that its settings need. RolloutError gives the reason
        when it does not start. When this process ends, all that it started is cleaned up.
        """
        clean_up_after(children=True)
        _set_environment(engine_environment(self.settings))
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            arguments = AsyncEngineArgs(**engine_arguments(self.settings, **self._own))
            loggers = [token_counter(self._progress)]
            self.llm = AsyncLLM.from_engine_args(arguments, stat_loggers=loggers)
            log.info("%s runs %s", self.title, self.settings.model_path)
        except Exception as error:
            raise RolloutError(
                f"{self.title} did not start ({type(error).__name__}: {error}); "
                f"log: {self.settings.host.log_path}"
            ) from error

    def stop(self) -> None:
        """End the engine and its processes; does nothing when it never started."""
        if self.llm is not None:
            self.llm.shutdown(timeout=_STOP_SECONDS)

    # -- calls -------------------------------------------------------------------------------------

    async def generate(
        self, request_id: str, token_ids: Sequence[int], sampling: dict[str, Any]
    ) -> Any:
        """vLLM's RequestOutput of one finished request. `sampling` holds fields of vLLM's
        SamplingParams. RolloutError when the engine dies or hangs, or returns nothing.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            **sampling, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
        )
        prompt: Any = {"prompt_token_ids": list(token_ids)}
        outputs = self.llm.generate(prompt, parameters, request_id)
        output = await self.watch(_last(outputs), f"request {request_id}")
        if output is None:
            raise RolloutError(f"request {request_id}: {self.title} returned nothing")
        return output

    async def watch(self, work: Coroutine[Any, Any, Any], request: str) -> Any:
        """The result of `work`, which waits for tokens; RolloutError once the engine has computed
        none, for any request, for stall_timeout seconds.
        """
        self.in_flight += 1
        if self.in_flight == 1:  # no request was waiting before, so no token was due
            self._progress.moved()
        try:
            return await self._answer(
                work, request, "no token for any request", lambda: self._progress.idle
            )
        finally:
            self.in_flight -= 1

    async def rpc(self, method: str, *args: Any, patient: bool = False) -> list[Any]:
        """The results of a method of the worker extension, one per engine worker."""
        results: list[Any] = await self.call(
            "collective_rpc", method, args=args, patient=patient, title=method
        )
        return results

    async def call(
        self, method: str, *args: Any, patient: bool = False, title: str = "", **kwargs: Any
    ) -> Any:
        """A method of AsyncLLM. RolloutError when the core dies, and after stall_timeout seconds
        unless `patient`. title: the method's name in messages.
        """
        started, name = time.monotonic(), title or method
        idle = None if patient else lambda: time.monotonic() - started
        work = getattr(self.llm, method)(*args, **kwargs)
        return await self._answer(work, name, f"no answer to {name}", idle)

    # -- watchdog ----------------------------------------------------------------------------------

    def failure(self) -> str:
        """Why this engine cannot continue (it died or hangs); empty while it can."""
        if self.llm is None:
            return "it did not start"
        if self._stall:
            return self._stall
        return (
            f"{type(self.llm.dead_error).__name__}: its engine core died"
            if self.llm.errored
            else ""
        )

    async def _answer(
        self, work: Any, title: str, silence: str, idle: Callable[[], float] | None
    ) -> Any:
        """The result of a call into the engine core. RolloutError when the core is dead, because no
        result would ever come, and when `idle()` reaches stall_timeout seconds (None: no limit);
        `silence` describes the latter.
        """
        task, limit = asyncio.ensure_future(work), self.settings.stall_timeout
        while True:
            done, _ = await asyncio.wait({task}, timeout=min(_LOOK_SECONDS, limit))
            if done:
                return task.result()
            if self.llm.errored:
                task.cancel()
                raise RolloutError(f"{title}: the engine core died")
            if idle is not None and idle() >= limit:
                task.cancel()
                self._stall = f"{silence} in rollout.stall_timeout={limit:g} s"
                raise RolloutError(f"{title}: the engine hangs, {self._stall}")


def _set_environment(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


async def _last(outputs: Any) -> Any:
    """The last item of an asynchronous generator; None when it is empty."""
    final = None
    async for output in outputs:
        final = output
    return final
