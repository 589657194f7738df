"""DSpark config.json: flat keys as in public files, read as a DFlash draft with a Markov head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import checks, formats
from verl_opd.drafts.dflash import config as dflash_config
from verl_opd.drafts.formats import Use
from verl_opd.errors import ConfigError
from verl_opd.targets.layers import from_vllm_aux_ids

ARCHITECTURE = "Qwen3DSparkModel"
_RANK = 256


def as_dflash(config: Mapping[str, Any]) -> dict[str, Any]:
    """The DFlash config.json of the same backbone."""
    inner = {
        "target_layer_ids": config.get("target_layer_ids"),
        "mask_token_id": config.get("mask_token_id"),
    }
    return {**config, "architectures": ["DFlashDraftModel"], "dflash_config": inner}


def derive_config(
    target: PretrainedConfig, draft: DraftConfig, num_speculative_tokens: int
) -> dict[str, Any]:
    """config.json of a new draft that fits `target`: one slot per proposal, the anchor's the first
    of them.
    """
    config = dflash_config.derive_config(target, draft, num_speculative_tokens)
    inner = config.pop("dflash_config")
    return {
        **config,
        **inner,
        "architectures": [ARCHITECTURE],
        "block_size": draft.block_size or num_speculative_tokens,
        "markov_rank": _RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": draft.confidence_head,
        "confidence_head_with_markov": draft.confidence_head,
        "sample_from_anchor": True,
    }


def check(config: Mapping[str, Any], target: PretrainedConfig, num_speculative_tokens: int) -> None:
    """See DraftFamily.check."""
    checks.check_architecture(config, ARCHITECTURE)
    absent = [
        name
        for name in ("markov_rank", "block_size", "mask_token_id", "target_layer_ids")
        if not config.get(name)
    ]
    checks.check_complete(absent, "a DSpark")
    values: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "markov_head_type": (config.get("markov_head_type"), (None, "vanilla")),
        "sample_from_anchor": (config.get("sample_from_anchor"), (None, True)),
        "dspark_draft_topk": (config.get("dspark_draft_topk"), (None,)),
        "dspark_bonus_anchor": (config.get("dspark_bonus_anchor"), (None, False)),
    }
    checks.check_replayed(values, "DSpark")
    block = int(config["block_size"])
    if num_speculative_tokens > block:
        raise ConfigError(
            f"rollout.num_speculative_tokens={num_speculative_tokens} exceeds the {block} "
            "proposals of this draft (block_size)"
        )
    # the engine queries exactly K slots, so K proposals are a valid block in themselves
    dflash_config.check(
        {**as_dflash(config), "block_size": num_speculative_tokens + 1},
        target,
        num_speculative_tokens,
        False,
    )


_HEADS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


def to_speculators(config: Mapping[str, Any], use: Use) -> dict[str, Any]:
    """The same draft as a speculators file."""
    backbone = {
        key: value
        for key, value in config.items()
        if key not in (*_HEADS, "target_layer_ids", "mask_token_id", "sample_from_anchor")
    }
    whole = dflash_config.to_speculators({**as_dflash(config), "architectures": None}, use)
    network = {
        key: value for key, value in whole["transformer_layer_config"].items() if key in backbone
    }
    _, causal = dflash_config.layer_attention(as_dflash(config))[0]
    network["is_causal"] = causal  # the only key from which vLLM reads a DSpark draft's causality
    kept = {
        key: whole[key]
        for key in ("mask_token_id", "aux_hidden_state_layer_ids", "draft_vocab_size")
    }
    own = {
        **kept,
        "architectures": [ARCHITECTURE],
        "block_size": config["block_size"],
        "sample_from_anchor": True,
    }
    return formats.to_speculators(
        "dspark", network, use, own | {key: config[key] for key in _HEADS if key in config}
    )


def from_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """A public file's own layout; a speculators file in that layout, as vLLM reads it."""
    parts = formats.speculators_parts(config, "dspark")
    if parts is None:
        return dict(config)
    network, own = parts
    kept = {
        key: own[key]
        for key in (
            *_HEADS,
            "block_size",
            "mask_token_id",
            "target_hidden_size",
            "draft_vocab_size",
        )
        if key in own
    }
    anchored = bool(own.get("sample_from_anchor", False))
    extra = {
        "target_layer_ids": from_vllm_aux_ids(own.get("aux_hidden_state_layer_ids") or []),
        "sample_from_anchor": anchored,
        "dspark_bonus_anchor": not anchored,
    }
    return {**network, **kept, **extra, "architectures": [ARCHITECTURE]}
