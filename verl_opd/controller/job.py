"""A run that has passed every check which needs no process: what it will train, on
what, with what.
"""

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
from verl_opd.controller.updates import Reward
from verl_opd.data.conversations import ConversationReport, load_conversations
from verl_opd.data.prompts import DataReport, Prompt, load_prompts
from verl_opd.devices import Device, check_isolation, resolve_device
from verl_opd.drafts import get_family
from verl_opd.drafts.base import Vocabulary
from verl_opd.drafts.files import local_directory
from verl_opd.errors import ConfigError
from verl_opd.opd.trace import RolloutSample
from verl_opd.snapshot import checksum
from verl_opd.targets.hf import check_target_supported
from verl_opd.targets.tokens import check_mask_token, check_same_vocabulary, stop_token_ids

# key of an exported config.json: what the draft was trained with that its weights do not show
_ORIGIN = "verl_opd"


@dataclass
class Job:
    """A run that has passed every check which needs no process: models, data, device."""

    cfg: Config
    device: Device
    draft_config: dict[str, Any]
    train: list[Prompt]
    train_report: DataReport
    benchmarks: dict[str, list[Prompt]]
    conversations: (
        Callable[[], tuple[list[RolloutSample], ConversationReport]] | None
    )  # what warm-up learns from; None = text that the target writes
    vocabulary: Vocabulary | None
    decode: Callable[[Sequence[int]], str]
    reward: Reward | None
    teachers: dict[
        str, str
    ]  # servers to start, name -> model; empty = the trainer's own copy of the target scores
    notes: list[str]  # what stops nothing and should be known

    @property
    def token_map(self) -> str | None:
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
    def facts(self) -> dict[str, object]:
        """What a diagnosis shows: how the draft sees its target, as configured."""
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
    """Load tokenizer, data and configs; ConfigError for whatever cannot work. Starts nothing."""
    from transformers import AutoConfig, AutoTokenizer

    device = resolve_device(cfg.trainer.device)
    trust = cfg.target.trust_remote_code
    try:
        target_config = AutoConfig.from_pretrained(cfg.target.path, trust_remote_code=trust)
        tokenizer = AutoTokenizer.from_pretrained(cfg.target.path, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise ConfigError(f"target.path={cfg.target.path} cannot be read: {error}") from error
    check_target_supported(target_config)
    check_isolation(device, os.environ)
    if device.stack == "ascend":
        check_npu(cfg, target_config.num_hidden_layers, os.environ)

    family = get_family(cfg.draft.family)
    if family.v2_runner and not device.v2_runner:
        raise ConfigError(
            f"draft.family={family.name} is drafted with by vLLM's V2 model runner only, which "
            "does not run on a CPU: use an accelerator, or dflash or eagle3"
        )
    draft_config = draft_config_of(cfg, target_config)
    trained_with, now = (
        draft_config.get(_ORIGIN, {}),
        {"apply_chat_template_kwargs": dict(cfg.data.apply_chat_template_kwargs)},
    )
    notes = (
        []
        if not trained_with or trained_with == now
        else [f"this draft was trained with {trained_with}, this run uses {now}"]
    )
    draft_config = {**draft_config, _ORIGIN: now}
    mask, stop_ids = (
        family.mask_token_id(draft_config),
        stop_token_ids(cfg.target.path, target_config, tokenizer),
    )
    if cfg.draft.path is None and mask is not None:
        check_mask_token(mask, tokenizer, target_config.vocab_size, stop_ids)

    data = cfg.data
    load = partial(
        load_prompts,
        tokenizer=tokenizer,
        prompt_key=data.prompt_key,
        max_prompt_length=data.max_prompt_length,
        template_kwargs=data.apply_chat_template_kwargs,
    )
    teachers = teacher_models(cfg)
    for name, model in teachers.items():
        check_same_vocabulary(
            f"teacher.models.{name}", model, tokenizer, target_config.vocab_size, trust
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
    conversations = partial(
        load_conversations,
        cfg.sft.files,
        tokenizer,
        key=cfg.sft.messages_key,
        max_length=data.max_prompt_length + data.max_response_length,
        stop_ids=stop_ids,
        template_kwargs=data.apply_chat_template_kwargs,
    )
    vocabulary = family.vocabulary(draft_config, cfg.draft.path)
    reward = None if cfg.opd.reward is None else load_reward(cfg.opd.reward)
    return Job(
        cfg,
        device,
        draft_config,
        train,
        report,
        benchmarks,
        cache(conversations) if cfg.sft.files else None,
        vocabulary,
        lambda ids: str(tokenizer.decode(list(ids))),
        reward,
        teachers,
        notes,
    )


def draft_config_of(cfg: Config, target: PretrainedConfig, weights: bool = True) -> dict[str, Any]:
    """config.json of the draft that `cfg` describes, checked against `target`; a hub id in
    draft.path becomes a local directory, with or without its weights.
    """
    family, tokens = get_family(cfg.draft.family), cfg.rollout.num_speculative_tokens
    if cfg.draft.path is not None:
        cfg.draft.path = local_directory(cfg.draft.path, weights)
        config = family.load_config(cfg.draft.path, target)
        if cfg.draft.block_size is not None:
            config = family.with_block(config, cfg.draft.block_size)
    else:
        config = family.derive_config(target, cfg.draft, tokens)
    family.check(config, target, tokens, cfg.draft.allow_block_size_mismatch)
    return config


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
