"""From a configuration to the config.json of its draft."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from verl_opd.config.schema import Config
from verl_opd.drafts import get_family
from verl_opd.drafts.files import local_directory


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
