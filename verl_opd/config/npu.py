"""What an Ascend NPU asks of a run, checked before anything starts: numbers that its kernels, graphs and sleeping allocator cannot exceed.

Read from vllm-ascend 0.21.0rc1, 0.23.0 and 0.30.0rc2 and from reports of runs; none of it has been run by this project.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verl_opd.config.schema import Config
from verl_opd.errors import ConfigError

MAX_QUERY = 16  # tokens of one request in a decode step (npu_fused_infer_attention_score, layout TND)
BATCHED_TOKENS = 2048  # vLLM's default of max_num_batched_tokens
STREAMS = 1800  # of a die's 2048 that graphs may use; a trainer on the same die takes its part
_DEFAULT_SIZES = 35  # captured sizes that vLLM chooses by itself
_GOOD = '{"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [8, 16, 32, 64]}'


def check_npu(cfg: Config, target_layers: int, environ: Mapping[str, str]) -> None:
    """ConfigError for what cannot work on an NPU, with the numbers and what to set instead. target_layers: of the target."""
    _check_sizes(cfg)
    _check_environment(environ)
    if not cfg.rollout.enforce_eager:
        _check_graphs(cfg, target_layers, environ)
    mode = _parsed(cfg.rollout.engine_kwargs.get("additional_config")).get("weight_nz_mode", 0)
    if mode:
        raise ConfigError(f"rollout.engine_kwargs.additional_config.weight_nz_mode={mode!r}: engines that sleep need 0; remove it")


def _check_sizes(cfg: Config) -> None:
    rollout = cfg.rollout
    query = 1 + rollout.num_speculative_tokens
    if query > MAX_QUERY:
        raise ConfigError(
            f"rollout.num_speculative_tokens={rollout.num_speculative_tokens} is too much for an NPU: 1 + K = {query} query tokens, its attention "
            f"kernel takes {MAX_QUERY}; use at most {MAX_QUERY - 1} (a draft of longer blocks can go on with draft.block_size={MAX_QUERY})"
        )
    batched = int(rollout.engine_kwargs.get("max_num_batched_tokens", BATCHED_TOKENS))
    needed = rollout.max_num_seqs * query
    if needed > batched:
        raise ConfigError(
            f"rollout.max_num_seqs={rollout.max_num_seqs} x (1 + K) = {needed} tokens exceed "
            f"rollout.engine_kwargs.max_num_batched_tokens={batched}: the drafter's buffers are sized by it; set it to {needed} or more"
        )


def _check_environment(environ: Mapping[str, str]) -> None:
    refused = {
        "VLLM_ASCEND_ENABLE_NZ": (lambda value: value not in ("", "0"), "engines that sleep need 0: unset it"),
        "VLLM_PLUGINS": (
            lambda value: value != "" and "ascend" not in value.split(","),
            "it hides every plugin it does not name, the NPU's included: add ascend, or unset it",
        ),
    }
    for name, (wrong, remedy) in refused.items():
        value = environ.get(name, "")
        if wrong(value):
            raise ConfigError(f"{name}={value} in the environment: {remedy}")


def _check_graphs(cfg: Config, target_layers: int, environ: Mapping[str, str]) -> None:
    compilation = _parsed(cfg.rollout.engine_kwargs.get("compilation_config"))
    mode, sizes = compilation.get("cudagraph_mode", "FULL_AND_PIECEWISE"), compilation.get("cudagraph_capture_sizes")
    query = 1 + cfg.rollout.num_speculative_tokens
    odd = [size for size in sizes or [] if size % query]
    if "FULL" in mode and odd:
        raise ConfigError(
            f"rollout.engine_kwargs.compilation_config: cudagraph_mode={mode} captures whole decode steps, so sizes must be multiples of 1 + K = "
            f"{query}; {odd} are not"
        )
    pieces = target_layers if "PIECEWISE" in mode else 1
    count = len(sizes) if sizes is not None else _DEFAULT_SIZES
    if pieces * count > STREAMS // 2:
        raise ConfigError(
            f"rollout.engine_kwargs.compilation_config: {count} captured sizes x {pieces} pieces need about {pieces * count} streams; a die that a "
            f"trainer shares has some {STREAMS // 2} (error 207005 at capture): use fewer sizes, such as '{_GOOD}', or rollout.enforce_eager=true"
        )
    for name, value, remedy in (("TASK_QUEUE_ENABLE", "2", "use 1"), ("ASCEND_LAUNCH_BLOCKING", "1", "unset it")):
        if environ.get(name) == value:
            raise ConfigError(f"{name}={value} in the environment does not go with graphs: {remedy}, or set rollout.enforce_eager=true")


def _parsed(value: Any) -> dict[str, Any]:
    """An engine argument that may be a mapping, or the same as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{value!r} is not valid JSON ({error.msg} at column {error.colno})") from error
    return dict(value or {})
