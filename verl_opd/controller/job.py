"""A run whose inputs are loaded and checked, before any process starts: models, data, device."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from transformers import PretrainedConfig

from verl_opd.ascend.limits import check_npu
from verl_opd.config.schema import Config
from verl_opd.config.teacher import teacher_models
from verl_opd.data.conversations import ConversationReport, load_conversations
from verl_opd.data.prompts import DataReport, Prompt, load_prompts
from verl_opd.devices import Device, check_isolation, resolve_device
from verl_opd.drafts import get_family
from verl_opd.drafts.base import Vocabulary
from verl_opd.drafts.resolve import draft_config_of
from verl_opd.errors import ConfigError
from verl_opd.opd.trace import RolloutSample
from verl_opd.snapshot import checksum
from verl_opd.targets.hf import check_target_supported
from verl_opd.targets.tokens import check_mask_token, check_same_vocabulary, stop_token_ids
from verl_opd.training.updates import Reward

# key of an exported config.json: training settings that weights and other keys do not show
_ORIGIN = "verl_opd"


@dataclass(kw_only=True)
class Job:
    """A run that has passed every check that needs no process."""

    cfg: Config
    device: Device
    draft_config: dict[str, Any]  # config.json of the draft
    train: list[Prompt]  # prompts to roll out
    train_report: DataReport  # how the rows of data.train_files became `train`
    benchmarks: dict[str, list[Prompt]]  # held-out prompts by name
    # reads what supervised steps learn from; None = text that the target writes
    conversations: Callable[[], tuple[list[RolloutSample], ConversationReport]] | None
    vocabulary: Vocabulary | None  # of the draft, when it is not the target's
    decode: Callable[[Sequence[int]], str]  # token ids -> text
    reward: Reward | None  # of opd.reward
    # servers to start, name -> model; empty = the trainer's own copy of the target scores
    teachers: dict[str, str]
    notes: list[str]  # worth knowing, but not errors

    @property
    def token_map(self) -> str | None:
        """Checksum of the draft's own vocabulary, as the engine reports it; None without one."""
        if self.vocabulary is None:
            return None
        return checksum(
            {"d2t": self.vocabulary.token_ids - torch.arange(len(self.vocabulary.token_ids))}
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal for a run directory or a checkpoint to be continued."""
        config = {name: value for name, value in self.draft_config.items() if name != _ORIGIN}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
        return {
            "target": self.cfg.target.path,
            "family": self.cfg.draft.family,
            "draft_config": digest,
            "vocab_size": self.draft_config["vocab_size"],
            "num_speculative_tokens": self.cfg.rollout.num_speculative_tokens,
            "template": self.cfg.data.apply_chat_template_kwargs,
        }

    @property
    def diagnostics(self) -> dict[str, object]:
        """The configured interface between draft and target, printed with every diagnosis."""
        family, config = get_family(self.cfg.draft.family), self.draft_config
        return {
            "family": family.name,
            "target_layer_ids": family.layer_ids(config),
            "mask_token_id": family.mask_token_id(config),
            "block_size": family.block_size(config, self.cfg.rollout.num_speculative_tokens),
            "num_speculative_tokens": self.cfg.rollout.num_speculative_tokens,
            "convention": self.cfg.opd.convention,
            "LM head": "the draft's own" if family.has_own_head else "the target's",
            "template": self.cfg.data.apply_chat_template_kwargs or "defaults",
        }


def prepare(cfg: Config) -> Job:
    """Load tokenizer, data and configs; ConfigError for what cannot work. Starts nothing."""
    device = resolve_device(cfg.trainer.device)
    target, tokenizer = _read_target(cfg)
    check_target_supported(target)
    check_isolation(device, os.environ)
    if device.stack == "ascend":
        check_npu(cfg, target.num_hidden_layers, os.environ)

    family = get_family(cfg.draft.family)
    if family.v2_runner and not device.v2_runner:
        raise ConfigError(
            f"draft.family={family.name} needs vLLM's V2 model runner, which does not run on "
            "a CPU: use an accelerator, or dflash or eagle3"
        )
    draft_config, notes = _marked(draft_config_of(cfg, target), cfg)
    mask = family.mask_token_id(draft_config)
    stop_ids = stop_token_ids(cfg.target.path, target, tokenizer)
    if cfg.draft.path is None and mask is not None:
        check_mask_token(mask, tokenizer, target.vocab_size, stop_ids)

    teachers = teacher_models(cfg)
    for name, model in teachers.items():
        check_same_vocabulary(
            f"teacher.models.{name}",
            model,
            tokenizer,
            target.vocab_size,
            cfg.target.trust_remote_code,
        )
    train, report, benchmarks = _load_prompts(cfg, tokenizer, teachers)
    return Job(
        cfg=cfg,
        device=device,
        draft_config=draft_config,
        train=train,
        train_report=report,
        benchmarks=benchmarks,
        conversations=_conversations(cfg, tokenizer, stop_ids),
        vocabulary=family.vocabulary(draft_config, cfg.draft.path),
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        reward=None if cfg.opd.reward is None else load_reward(cfg.opd.reward),
        teachers=teachers,
        notes=notes,
    )


def _read_target(cfg: Config) -> tuple[PretrainedConfig, Any]:
    """Configuration and tokenizer of the target."""
    from transformers import AutoConfig, AutoTokenizer

    path, trust = cfg.target.path, cfg.target.trust_remote_code
    try:
        return (
            AutoConfig.from_pretrained(path, trust_remote_code=trust),
            AutoTokenizer.from_pretrained(path, trust_remote_code=trust),
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"target.path={path} cannot be read: {error}") from error


def _marked(draft_config: dict[str, Any], cfg: Config) -> tuple[dict[str, Any], list[str]]:
    """`draft_config` with the settings that this run trains it with, and a note when it was trained
    with others before.
    """
    before = draft_config.get(_ORIGIN, {})
    now = {"apply_chat_template_kwargs": dict(cfg.data.apply_chat_template_kwargs)}
    notes = []
    if before and before != now:
        notes.append(f"this draft was trained with {before}, this run uses {now}")
    return {**draft_config, _ORIGIN: now}, notes


def _load_prompts(
    cfg: Config, tokenizer: Any, teachers: dict[str, str]
) -> tuple[list[Prompt], DataReport, dict[str, list[Prompt]]]:
    """Prompts to train on, how their rows were read, and the benchmarks by name."""
    data = cfg.data
    load = partial(
        load_prompts,
        tokenizer=tokenizer,
        prompt_key=data.prompt_key,
        max_prompt_length=data.max_prompt_length,
        template_kwargs=data.apply_chat_template_kwargs,
    )
    train, report = load(
        data.train_files,
        max_samples=data.max_samples,
        teacher_key=cfg.teacher.key,
        teachers=teachers,
    )
    benchmarks = {
        name: load([path], max_samples=data.val_max_samples)[0]
        for name, path in data.val_files.items()
    }
    return train, report, benchmarks


def _conversations(
    cfg: Config, tokenizer: Any, stop_ids: frozenset[int]
) -> Callable[[], tuple[list[RolloutSample], ConversationReport]] | None:
    """A function that reads sft.files at its first call; None without such files."""
    if not cfg.sft.files:
        return None
    data = cfg.data
    return cache(
        partial(
            load_conversations,
            cfg.sft.files,
            tokenizer,
            key=cfg.sft.messages_key,
            max_length=data.max_prompt_length + data.max_response_length,
            stop_ids=stop_ids,
            template_kwargs=data.apply_chat_template_kwargs,
        )
    )


def load_reward(name: str) -> Reward:
    """The function that opd.reward names as "module:function"; ConfigError when there is none."""
    module, _, function = name.partition(":")
    try:
        found: Reward = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"opd.reward={name} is not an importable module:function ({error})"
        ) from error
    return found
