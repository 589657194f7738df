"""Detects an engine that hangs, by the tokens it computes and not by the clock alone."""

from __future__ import annotations

import time
from typing import Any


class TokenProgress:
    """When the engine last computed a token of any request: of a response, or of a prompt, whose
    chunks show in the use of the KV cache.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.cache_usage = 0.0  # share of the KV cache in use, 0 to 1

    def moved(self) -> None:
        self._last = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since the last token."""
        return time.monotonic() - self._last


def token_counter(progress: TokenProgress) -> Any:
    """A class of vLLM stat loggers (StatLoggerBase) that call `progress.moved` for every engine
    step with tokens in it.
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
            """Nothing to log: the probe reports the start."""

    return Counter
