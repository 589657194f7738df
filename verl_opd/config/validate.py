"""Checks of a configuration that need neither a model nor a process: the rule of every key, files,
and keys that must fit each other.
"""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path
from typing import Any

from verl_opd.config.keys import rules
from verl_opd.config.schema import Config
from verl_opd.config.teacher import teacher_models
from verl_opd.errors import ConfigError
from verl_opd.opd.names import BLOCK_LOSSES, ESTIMATORS

# vLLM engine arguments that the rollout server sets itself -> what to do instead.
OWNED_ENGINE_KWARGS: dict[str, str] = {
    "model": "set target.path",
    "tokenizer": "set target.path",
    "dtype": "set target.dtype",
    "trust_remote_code": "set target.trust_remote_code",
    "speculative_config": "set rollout.num_speculative_tokens and the draft section",
    "max_model_len": "set rollout.max_model_len",
    "max_num_seqs": "set rollout.max_num_seqs",
    "gpu_memory_utilization": "set rollout.gpu_memory_utilization",
    "enforce_eager": "set rollout.enforce_eager",
    "seed": "set trainer.seed",
    "worker_extension_cls": "remove it (it holds the verify recorder)",
    "enable_sleep_mode": "remove it (engines sleep wherever the device can)",
    "served_model_name": "remove it (the name is target.path)",
}
_OWNED_BY_TEACHERS: dict[str, str] = {
    "max_logprobs": "set teacher.top_k",
    "logprobs_mode": "remove it (a teacher reports its own distribution)",
    "skip_tokenizer_init": "remove it (teachers read token ids)",
    "max_num_seqs": "set teacher.max_num_seqs",
    "gpu_memory_utilization": "set teacher.gpu_memory_utilization",
    "model": "set teacher.models",
}
_QUICKSTART_TARGET = "/SmolLM2-135M-Instruct"
_PREPARE = "`make quickstart` or `verl-opd prepare` creates this one"
_PARALLEL_KWARGS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def validate(cfg: Config) -> None:
    """ConfigError for the first value that cannot work; it names key, value and what would work."""
    _check_rules(cfg)
    _check_files(cfg)
    _check_draft(cfg)
    _check_batches(cfg)
    _check_rollout(cfg)
    _check_streams(cfg)
    teacher_models(cfg)
    _check_resume(cfg)


def _check_rules(cfg: Config) -> None:
    """Single keys, by the rules declared in the schema."""
    for key, rule in rules().items():
        value = reduce(getattr, key.split("."), cfg)
        if found := rule.breach(value):
            entry, how = found
            raise ConfigError(f"{key}={_shown(entry)} {how}")


def _shown(value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)


def _check_files(cfg: Config) -> None:
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
    """Block size against the number of proposals. Without draft.block_size, the block size of
    draft.path is checked when its config is read.
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
            f"draft.block_size={size} differs from rollout.num_speculative_tokens={tokens} plus 1, "
            "so training would replay other blocks than the engine drafts: use "
            f"rollout.num_speculative_tokens={size - 1}, or draft.allow_block_size_mismatch=true "
            "if this is intended"
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
                f"{key}.{name}={value!r} is not supported, because the server sets this argument "
                f"itself: {owned[name]}"
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
                f"{key}=k1 is not supported here, because its gradient does not depend on the "
                "target: use k2 or k3"
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
                f"opd.response_loss={opd.response_loss} scores whole blocks, rejected proposals "
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
