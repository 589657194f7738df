"""Limits of Ascend NPUs, checked before anything starts: numbers that their kernels, graphs and
sleeping allocator cannot exceed.

They come from the sources of vllm-ascend 0.21.0rc1, 0.23.0 and 0.30.0rc2 and from reports of runs;
this project has not run on an NPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verl_opd.config.schema import Config
from verl_opd.errors import ConfigError

# most tokens of one request in a decode step (npu_fused_infer_attention_score, layout TND)
MAX_QUERY = 16
BATCHED_TOKENS = 2048  # vLLM's default of max_num_batched_tokens
STREAMS = 1800  # of a die's 2048 that graphs may use, less what a trainer on the same die uses
_GOOD = '{"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [8, 16, 32, 64]}'


def check_npu(cfg: Config, target_layers: int, environ: Mapping[str, str]) -> None:
    """ConfigError for what an NPU does not support, with the numbers and what to set instead.
    `target_layers`: number of the target's layers.
    """
    _check_sizes(cfg)
    _check_environment(environ)
    if not cfg.rollout.enforce_eager:
        _check_graphs(cfg, target_layers, environ)
    mode = _mapping(cfg, "additional_config").get("weight_nz_mode", 0)
    if mode:
        raise ConfigError(
            f"rollout.engine_kwargs.additional_config.weight_nz_mode={mode!r}: engines that sleep "
            "need 0; remove it"
        )


def _check_sizes(cfg: Config) -> None:
    rollout = cfg.rollout
    query = 1 + rollout.num_speculative_tokens
    if query > MAX_QUERY:
        raise ConfigError(
            f"rollout.num_speculative_tokens={rollout.num_speculative_tokens} is too much for an "
            f"NPU: its attention kernel takes {MAX_QUERY} query tokens and 1 + K = {query}; use "
            f"at most {MAX_QUERY - 1} (a draft of longer blocks can continue with "
            f"draft.block_size={MAX_QUERY})"
        )
    batched = int(rollout.engine_kwargs.get("max_num_batched_tokens", BATCHED_TOKENS))
    needed = rollout.max_num_seqs * query
    if needed > batched:
        raise ConfigError(
            f"rollout.max_num_seqs={rollout.max_num_seqs} x (1 + K) = {needed} tokens exceed "
            f"rollout.engine_kwargs.max_num_batched_tokens={batched}, the size of the drafter's "
            f"buffers: set it to {needed} or more"
        )


def _check_environment(environ: Mapping[str, str]) -> None:
    plugins = environ.get("VLLM_PLUGINS", "")
    if plugins and "ascend" not in plugins.split(","):
        raise ConfigError(
            f"VLLM_PLUGINS={plugins} in the environment hides every plugin that it does not name, "
            "the NPU's included: add ascend, or unset it"
        )


def _check_graphs(cfg: Config, target_layers: int, environ: Mapping[str, str]) -> None:
    given = _mapping(cfg, "compilation_config")
    # vLLM accepts upper and lower case
    mode = str(given.get("cudagraph_mode") or "FULL_AND_PIECEWISE").upper()
    sizes, largest = (
        _graph_setting(cfg, given, name)
        for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    )
    if sizes is None:
        largest = largest or min(
            cfg.rollout.max_num_seqs * (1 + cfg.rollout.num_speculative_tokens), 512
        )
        sizes = [size for size in _default_sizes() if size <= largest]
    elif "FULL" in mode and (
        odd := [size for size in sizes if size % (1 + cfg.rollout.num_speculative_tokens)]
    ):
        raise ConfigError(
            f"rollout.engine_kwargs.compilation_config: cudagraph_mode={mode} captures whole "
            "decode steps, so sizes must be multiples of 1 + K = "
            f"{1 + cfg.rollout.num_speculative_tokens}; {odd} are not"
        )
    pieces = target_layers if "PIECEWISE" in mode else 1
    if mode != "NONE" and pieces * len(sizes) > STREAMS // 2:
        raise ConfigError(
            f"rollout.engine_kwargs.compilation_config: {len(sizes)} captured sizes x {pieces} "
            f"pieces need about {pieces * len(sizes)} streams, and a die shared with a trainer "
            f"has about {STREAMS // 2} (error 207005 at capture): use fewer "
            f"sizes, such as '{_GOOD}', or "
            "rollout.enforce_eager=true"
        )
    for name, value, remedy in (
        ("TASK_QUEUE_ENABLE", "2", "use 1"),
        ("ASCEND_LAUNCH_BLOCKING", "1", "unset it"),
    ):
        if environ.get(name) == value:
            raise ConfigError(
                f"{name}={value} in the environment does not work with graphs: {remedy}, or set "
                "rollout.enforce_eager=true"
            )


def _graph_setting(cfg: Config, compilation: Mapping[str, Any], name: str) -> Any:
    """An engine argument that may be given by itself or in compilation_config, but not in both."""
    alone = cfg.rollout.engine_kwargs.get(name)
    if alone is not None and compilation.get(name) is not None:
        raise ConfigError(
            f"rollout.engine_kwargs.{name} is also set in compilation_config: keep one of them"
        )
    return alone if alone is not None else compilation.get(name)


def _default_sizes() -> list[int]:
    """What vLLM captures by default: 1, 2, 4, every 8th up to 248, every 16th up to 512."""
    return [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def _mapping(cfg: Config, name: str) -> dict[str, Any]:
    """An engine argument that may be a mapping, or the same as JSON text."""
    given = value = cfg.rollout.engine_kwargs.get(name)
    shown = f"rollout.engine_kwargs.{name}={given!r}"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{shown} is not valid JSON ({error.msg} at column {error.colno}): write a "
                "mapping, {a: b}, or the same as JSON"
            ) from error
    if not isinstance(value or {}, Mapping):
        raise ConfigError(f"{shown} is not a mapping: write {{a: b}}, or the same as JSON")
    return dict(value or {})
