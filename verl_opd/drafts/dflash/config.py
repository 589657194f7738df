"""DFlash config.json: read public ones, derive new ones, refuse what replay would not reproduce."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from verl_opd.config.schema import DraftConfig
from verl_opd.errors import ConfigError
from verl_opd.targets.layers import default_layer_ids


def derive_config(target: PretrainedConfig, draft: DraftConfig, num_speculative_tokens: int) -> dict[str, Any]:
    """config.json of a new draft that fits `target` (Llama or Qwen3 family), in the layout of public DFlash checkpoints."""
    if draft.mask_token_id is None:
        raise ConfigError("draft.mask_token_id is required with random initialisation: name an embedding row that text never uses")
    heads = target.num_attention_heads
    layers = draft.num_hidden_layers
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": draft.block_size or num_speculative_tokens + 1,
        "dflash_config": {
            "mask_token_id": draft.mask_token_id,
            "target_layer_ids": list(draft.target_layer_ids or default_layer_ids(target.num_hidden_layers, draft.num_target_features)),
        },
        "num_target_layers": target.num_hidden_layers,
        "num_hidden_layers": layers,
        "hidden_size": target.hidden_size,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
        "intermediate_size": draft.intermediate_size or target.intermediate_size,
        "vocab_size": target.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": _rope(target.to_dict(), "target")["rope_theta"],
        "max_position_embeddings": target.max_position_embeddings,
        "layer_types": ["full_attention"] * layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def dflash_key(config: Mapping[str, Any], name: str) -> Any:
    """A DFlash key, inside `dflash_config` or at top level as older checkpoints have it; None when absent."""
    inner = config.get("dflash_config") or {}
    return inner[name] if name in inner else config.get(name)


def _rope(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """rope_type and rope_theta from either spelling; ConfigError when theta is missing (a silent 10000 halves acceptance)."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ConfigError(f"{what} config.json has no rope_theta: add it, a guessed value would silently lower acceptance")
    return {"rope_type": rope.get("rope_type", rope.get("type", "default")), "rope_theta": float(theta)}


def rope_theta(config: Mapping[str, Any]) -> float:
    return float(_rope(config, "draft")["rope_theta"])


def check(config: Mapping[str, Any], target: PretrainedConfig, num_speculative_tokens: int, allow_block_size_mismatch: bool) -> None:
    """See DraftFamily.check."""
    _check_supported(config)
    for key in ("hidden_size", "vocab_size"):
        if config[key] != getattr(target, key):
            raise ConfigError(
                f"draft does not fit the target: {key} is {config[key]} in the draft and {getattr(target, key)} in the target"
            )
    layers = config.get("num_target_layers")
    if layers is not None and layers != target.num_hidden_layers:
        raise ConfigError(f"draft does not fit the target: made for {layers} target layers, the target has {target.num_hidden_layers}")
    ids = dflash_key(config, "target_layer_ids")
    if not ids or list(ids) != sorted(set(ids)) or not all(0 <= i < target.num_hidden_layers for i in ids):
        # vLLM sorts its aux layers (interfaces.py _set_aux_hidden_state_layers), so another order would feed the draft permuted features
        raise ConfigError(f"target_layer_ids={ids} must be ascending, distinct layers in 0..{target.num_hidden_layers - 1} of the target")
    block = dflash_key(config, "block_size")
    if block is None:
        raise ConfigError("draft config.json has no block_size")
    if num_speculative_tokens > block - 1:
        raise ConfigError(
            f"rollout.num_speculative_tokens={num_speculative_tokens} exceeds the {block - 1} proposals of a block of draft.block_size={block}"
        )
    if num_speculative_tokens != block - 1 and not allow_block_size_mismatch:
        raise ConfigError(
            f"draft.block_size={block} differs from rollout.num_speculative_tokens + 1 = {num_speculative_tokens + 1}: replayed blocks would not be "
            f"the drafted ones; set rollout.num_speculative_tokens={block - 1}, or draft.allow_block_size_mismatch=true"
        )
    if dflash_key(config, "mask_token_id") is None:
        raise ConfigError("draft config.json has no dflash_config.mask_token_id")


def _check_supported(config: Mapping[str, Any]) -> None:
    """Variants that the engine drafts with and this replay does not reproduce are refused, not approximated."""
    rope = _rope(config, "draft")["rope_type"]
    if rope != "default":
        raise ConfigError(f"draft rope_type={rope!r} is not supported; only 'default' is")
    sliding = [kind for kind in config.get("layer_types") or [] if kind != "full_attention"]
    unsupported = {
        "layer_types": sliding,
        "use_swa": dflash_key(config, "use_swa"),
        "causal": dflash_key(config, "causal") or config.get("is_causal"),
        "attention_sink_bias": dflash_key(config, "attention_sink_bias"),
        "attention_bias": config.get("attention_bias"),
        "attention_value_scale": dflash_key(config, "attention_value_scale"),
        "draft_vocab_size": config.get("draft_vocab_size") not in (None, config["vocab_size"]),
        "is_neox_style=false": config.get("is_neox_style") is False,
    }
    found = [name for name, value in unsupported.items() if value]
    if found:
        raise ConfigError(f"this DFlash draft uses {', '.join(found)}, which training does not reproduce; full non-causal attention only")
