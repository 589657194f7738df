"""EAGLE-3 config.json: read public ones, derive new ones, reject what replay cannot reproduce."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import checks, files, formats
from verl_opd.drafts.formats import Use
from verl_opd.errors import ConfigError
from verl_opd.targets.layers import (
    eagle3_default_layer_ids,
    from_vllm_aux_ids,
    to_vllm_aux_ids,
)

ARCHITECTURE = "LlamaForCausalLMEagle3"
_REQUIRED = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "rms_norm_eps",
)


def derive_config(target: PretrainedConfig, draft: DraftConfig) -> dict[str, Any]:
    """config.json of a new one-layer draft that fits `target`, over the target's whole
    vocabulary.
    """
    if draft.num_hidden_layers not in (None, 1):
        raise ConfigError(
            f"draft.num_hidden_layers={draft.num_hidden_layers}: an EAGLE-3 draft has one layer; "
            "leave the key out"
        )
    if draft.mask_token_id is not None:
        raise ConfigError(
            f"draft.mask_token_id={draft.mask_token_id}: EAGLE-3 drafts token by token and has no "
            "mask token; leave the key out"
        )
    if draft.block_size is not None:
        raise ConfigError(
            f"draft.block_size={draft.block_size}: an EAGLE-3 block is as long as "
            "rollout.num_speculative_tokens; leave the key out"
        )
    heads, layers = target.num_attention_heads, target.num_hidden_layers
    ids = (
        list(draft.target_layer_ids)
        if draft.target_layer_ids is not None
        else eagle3_default_layer_ids(layers)
    )
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_target_layers": layers,
        "num_hidden_layers": 1,
        "eagle_aux_hidden_state_layer_ids": to_vllm_aux_ids(ids),
        "num_aux_hidden_states": len(ids),
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
        "intermediate_size": draft.intermediate_size or target.intermediate_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": files.rope_settings(target.to_dict(), "target")["rope_theta"],
        "max_position_embeddings": target.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_residual": False,
        "fc_norm": False,
        "norm_output": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def target_layer_ids(config: Mapping[str, Any]) -> list[int]:
    """Layers whose outputs the draft reads, in the engine's order; public drafts that name none
    mean the default three.
    """
    named = config.get("eagle_aux_hidden_state_layer_ids") or (
        config.get("eagle_config") or {}
    ).get("eagle_aux_hidden_state_layer_ids")
    if named:
        return from_vllm_aux_ids(named)
    count = config.get("num_target_layers")
    if count is None:
        raise ConfigError(
            "the draft's config.json names neither eagle_aux_hidden_state_layer_ids nor "
            "num_target_layers: add one of them"
        )
    return eagle3_default_layer_ids(int(count))


def head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def draft_vocab_size(config: Mapping[str, Any]) -> int:
    return int(config.get("draft_vocab_size") or config["vocab_size"])


def check(config: Mapping[str, Any], target: PretrainedConfig) -> None:
    """See DraftFamily.check."""
    absent = [name for name in _REQUIRED if config.get(name) is None]
    checks.check_complete(absent, "an EAGLE-3")
    _check_supported(config)
    checks.check_sizes(config, target)
    size = config.get("draft_vocab_size")
    if size is not None and not (isinstance(size, int) and 0 < size <= config["vocab_size"]):
        raise ConfigError(
            f"draft_vocab_size={size!r} must be a whole number from 1 to "
            f"vocab_size={config['vocab_size']}"
        )
    ids, count = target_layer_ids(config), target.num_hidden_layers
    if ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < count:
        raise ConfigError(
            f"the draft reads the outputs of target layers {ids} (eagle_aux_hidden_state_layer_ids "
            "- 1): they must be ascending, distinct "
            f"layers in 0..{count - 1}"
        )


def _check_supported(config: Mapping[str, Any]) -> None:
    checks.check_architecture(config, ARCHITECTURE)
    found = files.rope_settings(config, "draft")
    eagle = config.get("eagle_config") or {}
    values: dict[str, tuple[Any, tuple[Any, ...]]] = {
        **{key: (value, (None,)) for key, value in found["extra"].items()},
        "rope_type": (found["rope_type"], ("default",)),
        "num_hidden_layers": (config["num_hidden_layers"], (1,)),
        "attention_bias": (config.get("attention_bias"), (None, False)),
        "mlp_bias": (config.get("mlp_bias"), (None, False)),
        "hidden_act": (config.get("hidden_act"), (None, "silu")),
        "logit_scale": (config.get("logit_scale"), (None, 1)),
        "norm_before_fc": (
            eagle.get("norm_before_fc", config.get("norm_before_fc")),
            (None, False),
        ),
        "use_aux_hidden_state": (eagle.get("use_aux_hidden_state"), (None, True)),
        "target_hidden_size": (config.get("target_hidden_size"), (None, config["hidden_size"])),
        "parallel_drafting": (config.get("parallel_drafting"), (None, False)),
        "quantization_config": (config.get("quantization_config"), (None,)),
    }
    checks.check_replayed(values, "EAGLE-3")


_SWITCHES = ("norm_before_residual", "fc_norm", "norm_output")
_OWN = (
    *_SWITCHES,
    "architectures",
    "num_target_layers",
    "num_aux_hidden_states",
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_config",
)
_IDS = "eagle_aux_hidden_state_layer_ids"


def to_speculators(config: Mapping[str, Any], use: Use) -> dict[str, Any]:
    """The same draft as a speculators file, with explicit switches: that format has other defaults
    for them.
    """
    network = {key: value for key, value in config.items() if key not in (*_OWN, _IDS)}
    own = {
        "architectures": ["Eagle3Speculator"],
        _IDS: to_vllm_aux_ids(target_layer_ids(config)),
        "draft_vocab_size": draft_vocab_size(config),
        **{name: bool(config.get(name)) for name in _SWITCHES},
        "norm_before_fc": False,
    }
    return formats.to_speculators("eagle3", network, use, own)


def from_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """A public file's own layout; a speculators file in that layout, as vLLM reads it."""
    parts = formats.speculators_parts(config, "eagle3")
    if parts is None:
        return dict(config)
    network, own = parts
    kept = {
        key: own[key]
        for key in (*_SWITCHES, "norm_before_fc", "draft_vocab_size", "target_hidden_size", _IDS)
        if own.get(key) is not None
    }
    kept.setdefault("norm_before_residual", True)  # vLLM's default for such files (update_eagle3)
    return {**network, **kept, "architectures": [ARCHITECTURE]}


def to_sglang(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same draft for SGLang, which reads our layer ids from eagle_config. ConfigError for
    switches that SGLang ignores.
    """
    on = [name for name in _SWITCHES if config.get(name)]
    if on:
        raise ConfigError(
            f"this EAGLE-3 draft has {', '.join(on)} switched on, which SGLang does not read: use "
            "--format vllm or speculators"
        )
    rest = {key: value for key, value in config.items() if key != _IDS}
    return {**rest, "eagle_config": {"use_aux_hidden_state": True, _IDS: target_layer_ids(config)}}
