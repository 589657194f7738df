"""What one vLLM engine is started with, and how that becomes its environment and arguments."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

from verl_opd.devices import DEVICES, actor_environment

EXTENSION = "verl_opd.engines.worker.extension.OpdWorkerExtension"


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where an engine runs."""

    device: str = "cpu"  # a key of DEVICES
    cpu_cores: tuple[int, ...] = ()  # cores to pin to; empty = not pinned
    kv_cache_gb: int | None = None  # KV cache on a CPU, in GB; None = 1
    role: str = "engine"  # what its process is, before every line of its log
    log_path: str | None = None  # file for the output of the engine's processes; None = stdout
    http_port: int = 0  # port of the OpenAI-compatible server, where it has one; 0 = a free one


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """The draft that an engine proposes tokens with."""

    draft_path: str  # directory with config.json and model.safetensors
    method: str  # vLLM's name of the speculative method
    num_speculative_tokens: int  # K, tokens proposed per verify step
    target_layer_ids: tuple[int, ...]  # target layers whose outputs the draft reads
    mask_token_id: int | None  # token in slots to be drafted; None for an autoregressive draft
    # renamed prefixes of the engine's parameter names, see DraftFamily.engine_names
    engine_names: tuple[tuple[str, str], ...] = ()
    # checksum of {"d2t": offsets}, for a draft with a vocabulary of its own
    token_map: str | None = None
    v2_runner: bool = False  # whether only vLLM's V2 model runner drafts with this family


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """One engine, with a draft or without; see the section `rollout` of the configuration."""

    model_path: str  # directory of the model
    dtype: str  # of weights and activations, as vLLM names it
    max_model_len: int  # tokens of prompt and response
    max_num_seqs: int  # requests computed at once
    trust_remote_code: bool = False  # run Python code from the model directory
    gpu_memory_utilization: float = 0.4  # share of an accelerator's memory
    enforce_eager: bool = True  # False = captured graphs
    seed: int = 0  # of sampling
    stall_timeout: float = 300.0  # seconds without progress after which the engine hangs
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # vLLM arguments that come last
    host: Host = field(default_factory=Host)
    speculation: Speculation | None = None  # None = the model alone


def engine_environment(settings: EngineSettings) -> dict[str, str | None]:
    """Variables to set (None = remove) before vLLM is imported. Where both model runners support
    the family, V1 is chosen: only its hooks have been run with a real engine.
    """
    host, speculation = settings.host, settings.speculation
    env: dict[str, str | None] = {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if speculation and speculation.v2_runner else "0",
        "VLLM_NO_USAGE_STATS": "1",  # nothing leaves this machine
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    if DEVICES[host.device].on_host:
        env["OMP_NUM_THREADS"] = None  # Ray sets it to 1, which would leave the engine one thread
        env["VLLM_CPU_KVCACHE_SPACE"] = str(host.kv_cache_gb or 1)
        if host.cpu_cores:
            env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, host.cpu_cores))
    return {**env, **actor_environment(DEVICES[host.device], "engine", os.environ)}


def engine_arguments(settings: EngineSettings, **own: Any) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs: those of `settings`, then `own`, then
    `engine_kwargs`.
    """
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        # draft pushes do not contain the target, so its weights must be loaded from files
        "load_format": "auto",
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "enforce_eager": settings.enforce_eager,
        "seed": settings.seed,
        "disable_log_stats": False,  # stall detection reads them
    }
    if not DEVICES[settings.host.device].on_host:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    if settings.speculation is not None:
        arguments.update(_drafting_arguments(settings.speculation, settings.host))
    return {**arguments, **own, **_parsed(settings.engine_kwargs)}


def _drafting_arguments(speculation: Speculation, host: Host) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "speculative_config": {
            "method": speculation.method,
            "model": speculation.draft_path,
            "num_speculative_tokens": speculation.num_speculative_tokens,
        },
        "worker_extension_cls": EXTENSION,
    }
    if DEVICES[host.device].sleeps:
        arguments["enable_sleep_mode"] = True  # the device is shared with a trainer rank
    return arguments


def _parsed(given: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments as the user wrote them, JSON strings among them parsed."""
    return {
        name: json.loads(value) if isinstance(value, str) and value[:1] in "{[" else value
        for name, value in given.items()
    }
