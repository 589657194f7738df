"""Checks on configuration values that need neither a model nor a process: choices, ranges, files,
and keys that must fit each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

from verl_opd.config.schema import Config
from verl_opd.config.teacher import teacher_models
from verl_opd.errors import ConfigError
from verl_opd.opd.names import (
    BLOCK_LOSSES,
    CONVENTIONS,
    ESTIMATORS,
    REJECTED_LOSSES,
    RESPONSE_LOSSES,
    RESPONSE_SPANS,
    TEACHER_SOURCES,
    TOP_K_LOSS,
)

CHOICES: dict[str, tuple[str, ...]] = {
    "target.dtype": ("bfloat16", "float32"),
    "rollout.agent.loop": ("single_turn",),
    "opd.convention": CONVENTIONS,
    "opd.response_span": RESPONSE_SPANS,
    "opd.response_loss": RESPONSE_LOSSES,
    "opd.rejected_loss": REJECTED_LOSSES,
    "teacher.source": TEACHER_SOURCES,
    "sft.loss": tuple(name for name in RESPONSE_LOSSES if name != TOP_K_LOSS),
    "compute.param_dtype": ("bfloat16", "float32"),
    "compute.attention": ("sdpa", "eager"),
    "trainer.device": ("auto", "cpu", "cuda", "npu"),
    "trainer.resume_mode": ("auto", "disable", "path"),
    "trainer.logger": ("console", "jsonl", "tensorboard", "wandb"),
}

# Ranges, by what is allowed; a null value is always allowed where the schema allows it.
_AT_LEAST_1 = [
    "draft.num_hidden_layers",
    "draft.num_target_features",
    "draft.intermediate_size",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.max_samples",
    "data.val_max_samples",
    "rollout.num_speculative_tokens",
    "rollout.max_num_seqs",
    "rollout.max_model_len",
    "rollout.agent.num_workers",
    "rollout.agent.max_concurrency",
    "opd.response_anchor_stride",
    "teacher.replicas",
    "teacher.top_k",
    "teacher.max_num_seqs",
    "sft.updates_per_step",
    "sft.samples_per_update",
    "sft.anchors_per_sample",
    "compute.max_tokens_per_micro_batch",
    "compute.lm_head_chunk_size",
    "compute.num_threads",
    "trainer.n_student_workers",
    "trainer.nnodes",
    "trainer.total_epochs",
    "trainer.update_accumulation_steps",
    "trainer.updates_per_step",
    "trainer.update_epochs",
    "trainer.keep_last",
    "ray.num_cpus",
]
_AT_LEAST_0 = [
    "draft.mask_token_id",
    "data.seed",
    "rollout.temperature",
    "opd.response_stream_weight",
    "opd.rejected_stream_weight",
    "opd.confidence_weight",
    "opd.max_response_anchors",
    "opd.max_rejected_tokens",
    "optim.weight_decay",
    "trainer.total_training_steps",
    "trainer.max_restarts",
    "sft.steps",
    "trainer.seed",
]
_POSITIVE = [
    "opd.clip_ratio",
    "draft.init_std",
    "rollout.kv_cache_gb",
    "teacher.kv_cache_gb",
    "rollout.start_timeout",
    "rollout.request_timeout",
    "rollout.stall_timeout",
    "opd.loss_max_clamp",
    "sft.lr",
    "optim.lr",
    "optim.grad_clip",
]
_FRACTION_WITHOUT_0 = [
    "rollout.top_p",
    "rollout.gpu_memory_utilization",
    "teacher.gpu_memory_utilization",
    "opd.rejected_position_decay",
    "opd.response_position_decay",
    "sft.position_decay",
]
_FRACTION_WITH_0 = [
    "optim.min_lr_ratio",
    "optim.lr_warmup_ratio",
    "opd.max_replay_mismatch",
    "opd.max_replay_mismatch_raw",
]
_MINUS_1_OR_MORE_THAN_0 = [
    "rollout.top_k",
    "trainer.test_freq",
    "trainer.save_freq",
    "opd.replay_check_freq",
]

# vLLM engine arguments that the rollout server sets itself, and the key that decides them.
OWNED_ENGINE_KWARGS: dict[str, str] = {
    "model": "target.path",
    "tokenizer": "target.path",
    "dtype": "target.dtype",
    "trust_remote_code": "target.trust_remote_code",
    "speculative_config": "rollout.num_speculative_tokens and the draft section",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enforce_eager": "rollout.enforce_eager",
    "seed": "trainer.seed",
    "worker_extension_cls": "nothing: the verify recorder lives there",
    "enable_sleep_mode": "nothing: the phases of the loop need it as it is",
    "served_model_name": "nothing: the server answers to target.path",
}
_OWNED_BY_TEACHERS: dict[str, str] = {
    "max_logprobs": "teacher.top_k",
    "logprobs_mode": "nothing: a teacher reports its own distribution",
    "skip_tokenizer_init": "nothing: teachers read token ids",
    "max_num_seqs": "teacher.max_num_seqs",
    "gpu_memory_utilization": "teacher.gpu_memory_utilization",
    "model": "teacher.models",
}
_QUICKSTART_TARGET = "/SmolLM2-135M-Instruct"
_PREPARE = "`make quickstart` or `verl-opd prepare` makes this one"
_PARALLEL_KWARGS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def validate(cfg: Config) -> None:
    """Raise ConfigError for the first value that cannot work, naming the key, its value and what
    would.
    """
    _check_choices(cfg)
    _check_ranges(cfg)
    _check_names(cfg)
    _check_files(cfg)
    _check_draft(cfg)
    _check_batches(cfg)
    _check_rollout(cfg)
    _check_streams(cfg)
    teacher_models(cfg)
    _check_resume(cfg)


def _value(cfg: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), cfg)


def _check_choices(cfg: Config) -> None:
    for key, allowed in CHOICES.items():
        value = _value(cfg, key)
        for entry in value if isinstance(value, list) else [value]:
            if entry not in allowed:
                raise ConfigError(f"{key}={entry!r} is not one of {', '.join(allowed)}")


def _check_ranges(cfg: Config) -> None:
    _check_range(cfg, _AT_LEAST_1, "must be at least 1", lambda x: x >= 1)
    _check_range(cfg, _AT_LEAST_0, "must not be negative", lambda x: x >= 0)
    _check_range(cfg, _POSITIVE, "must be greater than 0", lambda x: x > 0)
    _check_range(cfg, _FRACTION_WITHOUT_0, "must lie in (0, 1]", lambda x: 0 < x <= 1)
    _check_range(cfg, _FRACTION_WITH_0, "must lie in [0, 1]", lambda x: 0 <= x <= 1)
    _check_range(
        cfg, _MINUS_1_OR_MORE_THAN_0, "must be -1 (off) or at least 1", lambda x: x == -1 or x >= 1
    )
    _check_range(
        cfg,
        ["opd.log_prob_min_clamp"],
        "must be negative (a log-probability), or null",
        lambda x: x < 0,
    )
    betas = cfg.optim.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"optim.betas={list(betas)} must be two numbers in [0, 1)")


def _check_range(cfg: Config, keys: Iterable[str], rule: str, holds: Any) -> None:
    for key in keys:
        value = _value(cfg, key)
        if value is not None and not (math.isfinite(value) and holds(value)):
            raise ConfigError(f"{key}={value} {rule}")


def _check_names(cfg: Config) -> None:
    """Names that become folders stay one folder below runs/."""
    for key in ("trainer.project_name", "trainer.experiment_name"):
        value = str(_value(cfg, key))
        if not re.fullmatch(r"[\w.+=-]*[\w+=-][\w.+=-]*", value):
            raise ConfigError(
                f"{key}={value!r} becomes a folder name: use letters, digits and . _ - + = "
                "(trainer.run_dir takes any path)"
            )


def _check_files(cfg: Config) -> None:
    if not cfg.data.train_files:
        raise ConfigError("data.train_files=[] is empty: name at least one JSONL file")
    named = [("data.train_files", path) for path in cfg.data.train_files]
    named += [("sft.files", path) for path in cfg.sft.files]
    named += [(f"data.val_files.{name}", path) for name, path in cfg.data.val_files.items()]
    for key, path in named:
        if not Path(path).is_file():
            raise ConfigError(
                f"{key}: file {path} does not exist (looked in {Path.cwd()} and among the shipped "
                "examples)"
            )
    teachers = [(f"teacher.models.{name}", path) for name, path in cfg.teacher.models.items()]
    for key, model in [("target.path", cfg.target.path), ("draft.path", cfg.draft.path), *teachers]:
        if model is None or Path(model).is_dir():
            continue
        if Path(model).exists():
            raise ConfigError(f"{key}={model} is a file: name the directory that holds config.json")
        if not re.fullmatch(r"[\w.-]*\w[\w.-]*(/[\w.-]+)?", model):
            hint = f"; {_PREPARE}" if model.endswith(_QUICKSTART_TARGET) else ""
            raise ConfigError(
                f"{key}={model} does not exist: name a directory in HF format, or a model id of a "
                f"hub{hint}"
            )


def _check_draft(cfg: Config) -> None:
    """Block size against the number of proposals. Without the key, that of draft.path is checked
    when it is read.
    """
    draft, tokens = cfg.draft, cfg.rollout.num_speculative_tokens
    size = draft.block_size
    if size is not None and tokens > size - 1:
        raise ConfigError(
            f"rollout.num_speculative_tokens={tokens} does not fit draft.block_size={size}: "
            f"a block holds 1 anchor and {size - 1} proposals; use at most {size - 1}, or "
            f"draft.block_size={tokens + 1}"
        )
    if size is not None and size != tokens + 1 and not draft.allow_block_size_mismatch:
        raise ConfigError(
            f"draft.block_size={size} differs from rollout.num_speculative_tokens={tokens} plus 1: "
            f"the replayed blocks would not be those of the engine; "
            f"use num_speculative_tokens={size - 1}, or draft.allow_block_size_mismatch=true if it "
            "is meant"
        )
    layers = draft.target_layer_ids
    if layers is not None and (
        not layers or layers[0] < 0 or any(low >= high for low, high in pairwise(layers))
    ):
        raise ConfigError(
            f"draft.target_layer_ids={layers} must be 0-based target layers in ascending order, "
            "each once"
        )


def _check_batches(cfg: Config) -> None:
    batch, students = cfg.data.train_batch_size, cfg.trainer.n_student_workers
    if students % cfg.trainer.nnodes:
        raise ConfigError(
            f"trainer.n_student_workers={students} is not divisible by "
            f"trainer.nnodes={cfg.trainer.nnodes}"
        )
    _check_divisible(batch, students, "trainer.n_student_workers")
    agents = cfg.rollout.agent.num_workers
    if agents is not None:
        _check_divisible(batch, agents, "rollout.agent.num_workers")


def _check_divisible(batch: int, workers: int, key: str) -> None:
    if batch % workers == 0:
        return
    lower, upper = batch // workers * workers, -(-batch // workers) * workers
    batches = f"{lower} or {upper}" if lower else str(upper)
    divisors = sorted(
        (d for d in range(1, batch + 1) if batch % d == 0), key=lambda d: (abs(d - workers), d)
    )
    raise ConfigError(
        f"data.train_batch_size={batch} is not divisible by {key}={workers}: nearest batch sizes "
        f"are {batches}, "
        f"nearest number of workers is {divisors[0]}"
    )


def _check_engine_kwargs(key: str, given: dict[str, Any], owned: dict[str, str]) -> None:
    for name, value in given.items():
        if name in owned:
            raise ConfigError(
                f"{key}.{name}={value!r} is set by the server; what decides it: {owned[name]}"
            )
        if name == "load_format" and value == "dummy":
            raise ConfigError(
                f"{key}.load_format='dummy' gives the model random weights, which no sync "
                "replaces: remove it"
            )
        if name in _PARALLEL_KWARGS and value != 1:
            raise ConfigError(
                f"{key}.{name}={value!r} must be 1: every server runs one engine on one device; "
                "raise trainer.n_student_workers or teacher.replicas to use more devices"
            )


def _check_rollout(cfg: Config) -> None:
    rollout, data = cfg.rollout, cfg.data
    _check_engine_kwargs("rollout.engine_kwargs", rollout.engine_kwargs, OWNED_ENGINE_KWARGS)
    _check_engine_kwargs(
        "teacher.engine_kwargs",
        cfg.teacher.engine_kwargs,
        {**OWNED_ENGINE_KWARGS, **_OWNED_BY_TEACHERS},
    )
    needed = data.max_prompt_length + data.max_response_length + rollout.num_speculative_tokens + 1
    if rollout.max_model_len is not None and rollout.max_model_len < needed:
        raise ConfigError(
            f"rollout.max_model_len={rollout.max_model_len} is too short: "
            f"data.max_prompt_length={data.max_prompt_length} + "
            f"data.max_response_length={data.max_response_length} + "
            f"rollout.num_speculative_tokens={rollout.num_speculative_tokens} + 1 = {needed}"
        )


def _check_streams(cfg: Config) -> None:
    opd = cfg.opd
    if opd.policy_gradient and (
        opd.response_loss not in ESTIMATORS or opd.rejected_stream_weight != 0
    ):
        raise ConfigError(
            "opd.policy_gradient=true needs opd.response_loss to be one of "
            f"{', '.join(ESTIMATORS)} (it is {opd.response_loss}) and "
            f"opd.rejected_stream_weight=0 (it is {opd.rejected_stream_weight})"
        )
    if opd.reward is not None and not opd.policy_gradient:
        raise ConfigError(
            f"opd.reward={opd.reward} needs opd.policy_gradient=true: a reward has no gradient of "
            "its own"
        )
    for key, value in (
        ("opd.response_loss", opd.response_loss),
        ("opd.rejected_loss", opd.rejected_loss),
        ("sft.loss", cfg.sft.loss),
    ):
        if value == "k1" and not (opd.policy_gradient and key == "opd.response_loss"):
            raise ConfigError(
                f"{key}=k1 has a gradient that does not depend on the target: use k2 or k3"
            )
    if opd.response_loss in BLOCK_LOSSES:
        wanted = {
            "rejected_stream_weight": 0,
            "response_position_decay": 1,
            "response_anchor_stride": 1,
            "random_anchors": False,
        }
        wrong = [
            f"opd.{name}={getattr(opd, name)} must be {value}"
            for name, value in wanted.items()
            if getattr(opd, name) != value
        ]
        if wrong:
            raise ConfigError(
                f"opd.response_loss={opd.response_loss} scores whole blocks, refused proposals "
                f"included: {'; '.join(wrong)}"
            )
    if opd.response_stream_weight == 0 and opd.rejected_stream_weight == 0:
        raise ConfigError(
            "opd.response_stream_weight=0 and opd.rejected_stream_weight=0 leave nothing to train "
            "on: raise one of them"
        )


def _check_resume(cfg: Config) -> None:
    mode, path = cfg.trainer.resume_mode, cfg.trainer.resume_from_path
    if mode == "path" and path is None:
        raise ConfigError(
            "trainer.resume_mode=path needs trainer.resume_from_path, the checkpoint directory to "
            "continue from"
        )
    if mode == "path" and path is not None and not Path(path).expanduser().is_dir():
        raise ConfigError(f"trainer.resume_from_path={path} does not exist")
    if mode != "path" and path is not None:
        raise ConfigError(
            f"trainer.resume_from_path={path} has no effect with trainer.resume_mode={mode}: use "
            "trainer.resume_mode=path"
        )
