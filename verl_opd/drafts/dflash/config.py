"""DFlash config.json: read public ones, derive new ones, reject what replay cannot reproduce."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import checks, files, formats
from verl_opd.drafts.formats import Use
from verl_opd.errors import ConfigError
from verl_opd.targets.layers import default_layer_ids, from_vllm_aux_ids, to_vllm_aux_ids

_FULL, _SLIDING = "full_attention", "sliding_attention"
_REQUIRED = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
)


def derive_config(
    target: PretrainedConfig, draft: DraftConfig, num_speculative_tokens: int
) -> dict[str, Any]:
    """config.json of a new draft that fits `target` (Llama or Qwen3 family), in the layout of
    public DFlash checkpoints.
    """
    if draft.mask_token_id is None:
        raise ConfigError(
            "draft.mask_token_id is required with random initialisation: name an embedding row "
            "that text never uses"
        )
    heads = target.num_attention_heads
    layers = draft.num_hidden_layers or 2
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": draft.block_size or num_speculative_tokens + 1,
        "dflash_config": {
            "mask_token_id": draft.mask_token_id,
            "target_layer_ids": _chosen_layers(target, draft),
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
        "rope_theta": files.rope_settings(target.to_dict(), "target")["rope_theta"],
        "max_position_embeddings": target.max_position_embeddings,
        "layer_types": ["full_attention"] * layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _chosen_layers(target: PretrainedConfig, draft: DraftConfig) -> list[int]:
    if draft.target_layer_ids is not None:
        return list(draft.target_layer_ids)
    return default_layer_ids(target.num_hidden_layers, draft.num_target_features)


def dflash_key(config: Mapping[str, Any], name: str) -> Any:
    """A DFlash key, inside `dflash_config` or at top level as older checkpoints have it; None when
    absent.
    """
    inner = config.get("dflash_config") or {}
    return inner[name] if name in inner else config.get(name)


def target_layer_ids(config: Mapping[str, Any]) -> list[int]:
    """Only the nested key counts: vLLM's V1 runner ignores a top-level one and would feed the draft
    its own default layers.
    """
    return list((config.get("dflash_config") or {}).get("target_layer_ids") or [])


def rope_theta(config: Mapping[str, Any]) -> float:
    return float(files.rope_settings(config, "draft")["rope_theta"])


LayerAttention = tuple[int | None, bool]  # (sliding window or None, causal inside the block)


def layer_attention(config: Mapping[str, Any]) -> list[LayerAttention]:
    """The attention of every layer, resolved as the engine does
    (vLLM qwen3_dflash._resolve_layer_attention).

    ConfigError for a sliding layer without a window.
    """
    inner, layers = config.get("dflash_config") or {}, config["num_hidden_layers"]
    types = config.get("layer_types") or [_FULL] * layers
    use_swa = bool(inner.get("use_swa")) and _SLIDING not in types
    window = inner.get("swa_window_size") or (
        config.get("sliding_window") if config.get("use_sliding_window") else None
    )
    explicit = (
        config.get("is_causal") if config.get("is_causal") is not None else inner.get("causal")
    )
    resolved: list[LayerAttention] = []
    for index in range(layers):
        sliding = use_swa or types[index] == _SLIDING
        if sliding and window is None:
            raise ConfigError(
                f"layer {index} of the draft has sliding attention, but its config.json names no "
                "window: set dflash_config.swa_window_size (a top-level sliding_window "
                "counts only with use_sliding_window=true)"
            )
        causal = types[index] == _SLIDING if explicit is None else bool(explicit)
        resolved.append((int(window) if sliding and window is not None else None, causal))
    return resolved


def _check_attention(config: Mapping[str, Any]) -> None:
    attention = layer_attention(config)
    windows = {window for window, _ in attention}
    if len(windows) > 1:
        raise ConfigError(
            "this DFlash draft mixes sliding and full attention, which is not supported: it needs "
            "vLLM's V2 model runner, and DFlash runs on V1 here"
        )
    window, block = windows.pop(), int(dflash_key(config, "block_size"))
    if window is not None and window < block:
        raise ConfigError(
            f"the draft's sliding window of {window} tokens is smaller than its block of {block}"
        )


def check(
    config: Mapping[str, Any],
    target: PretrainedConfig,
    num_speculative_tokens: int,
    allow_block_size_mismatch: bool,
) -> None:
    """See DraftFamily.check."""
    _check_complete(config)
    _check_supported(config)
    _check_target(config, target)
    _check_attention(config)
    _check_block(
        int(dflash_key(config, "block_size")), num_speculative_tokens, allow_block_size_mismatch
    )


def _check_complete(config: Mapping[str, Any]) -> None:
    absent = [name for name in _REQUIRED if config.get(name) is None]
    absent += [name for name in ("block_size", "mask_token_id") if dflash_key(config, name) is None]
    absent += [] if target_layer_ids(config) else ["dflash_config.target_layer_ids"]
    checks.check_complete(absent, "a DFlash")


def _check_target(config: Mapping[str, Any], target: PretrainedConfig) -> None:
    checks.check_sizes(config, target)
    count = target.num_hidden_layers
    if config.get("num_target_layers") not in (None, count):
        raise ConfigError(
            f"draft does not fit the target: made for {config['num_target_layers']} target layers, "
            f"the target has {count}"
        )
    ids = target_layer_ids(config)
    if ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < count:
        # vLLM sorts its aux layers (EagleModelMixin._set_aux_hidden_state_layers), so another order
        # would feed the draft permuted features
        raise ConfigError(
            f"target_layer_ids={ids} must be ascending, distinct layers in 0..{count - 1} of the "
            "target"
        )
    mask = dflash_key(config, "mask_token_id")
    if not 0 <= mask < target.vocab_size:
        raise ConfigError(
            f"mask_token_id={mask} is not a row of the target's embedding of {target.vocab_size} "
            "rows"
        )


def _check_block(block: int, num_speculative_tokens: int, allow_mismatch: bool) -> None:
    if num_speculative_tokens > block - 1:
        raise ConfigError(
            f"rollout.num_speculative_tokens={num_speculative_tokens} exceeds the {block - 1} "
            f"proposals of a block of draft.block_size={block}"
        )
    if num_speculative_tokens != block - 1 and not allow_mismatch:
        raise ConfigError(
            f"draft.block_size={block} differs from rollout.num_speculative_tokens + 1 = "
            f"{num_speculative_tokens + 1}, so training would replay other blocks than the engine "
            f"drafts: set rollout.num_speculative_tokens={block - 1}, or "
            f"draft.block_size={num_speculative_tokens + 1} to continue in "
            "shorter blocks, or draft.allow_block_size_mismatch=true"
        )


def _check_supported(config: Mapping[str, Any]) -> None:
    checks.check_architecture(config, "DFlashDraftModel")
    rope = files.rope_settings(config, "draft")
    if rope["rope_type"] != "default":
        raise ConfigError(
            f"the draft's rope_type={rope['rope_type']!r} is not supported; only 'default' is"
        )
    ids = target_layer_ids(config)
    values: dict[str, tuple[Any, tuple[Any, ...]]] = {
        **{key: (value, (None,)) for key, value in rope["extra"].items()},
        "partial_rotary_factor": (
            config.get("partial_rotary_factor", rope["extra"].get("partial_rotary_factor")),
            (None, 1),
        ),
        "layer_types": (sorted(set(config.get("layer_types") or []) - {_FULL, _SLIDING}), ([],)),
        "attention_sink_bias": (dflash_key(config, "attention_sink_bias"), (None, False)),
        "add_swa_attention_sink_bias": (config.get("add_swa_attention_sink_bias"), (None, False)),
        "attention_bias": (config.get("attention_bias"), (None, False)),
        "attention_value_scale": (dflash_key(config, "attention_value_scale"), (None, 1)),
        "is_neox_style": (config.get("is_neox_style"), (None, True)),
        "hidden_act": (config.get("hidden_act"), (None, "silu")),
        "logit_scale": (config.get("logit_scale"), (None, 1)),
        "use_aux_hidden_state": (dflash_key(config, "use_aux_hidden_state"), (None, True)),
        "draft_vocab_size": (config.get("draft_vocab_size"), (None, config["vocab_size"])),
        "target_hidden_size": (config.get("target_hidden_size"), (None, config["hidden_size"])),
        "eagle_config": (config.get("eagle_config"), (None, {})),
        "eagle_aux_hidden_state_layer_ids": (
            config.get("eagle_aux_hidden_state_layer_ids"),
            (None, to_vllm_aux_ids(ids)),
        ),
        "quantization_config": (config.get("quantization_config"), (None,)),
    }
    checks.check_replayed(values, "DFlash")


def with_block(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The same draft in blocks of `size`. Longer blocks than the trained ones are an error: a slot
    sees all slots of its block, so the draft has learned for a certain number of them.
    """
    trained = int(dflash_key(config, "block_size"))
    if size > trained:
        raise ConfigError(
            f"draft.block_size={size} is longer than the {trained} slots that this draft was "
            f"trained with: use at most {trained}"
        )
    inner = {
        key: value
        for key, value in (config.get("dflash_config") or {}).items()
        if key != "block_size"
    }
    return {**config, "block_size": size, "dflash_config": inner}


_OWN = (
    "architectures",
    "auto_map",
    "block_size",
    "dflash_config",
    "num_target_layers",
    "is_causal",
)


def to_speculators(config: Mapping[str, Any], use: Use) -> dict[str, Any]:
    """The same draft as a speculators file, with every key that decides its attention."""
    network = {key: value for key, value in config.items() if key not in _OWN}
    window, causal = layer_attention(config)[0]
    if window is not None:
        layers = [_SLIDING] * config["num_hidden_layers"]
        network |= {
            "sliding_window": window,
            "use_sliding_window": True,
            "layer_types": layers,
            "max_window_layers": 0,
        }
    own = {
        "architectures": ["DFlashSpeculator"],
        "block_size": int(dflash_key(config, "block_size")),
        "mask_token_id": int(dflash_key(config, "mask_token_id")),
        "aux_hidden_state_layer_ids": to_vllm_aux_ids(target_layer_ids(config)),
        "draft_vocab_size": config["vocab_size"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": not causal,
    }
    return formats.to_speculators("dflash", network, use, own)


def from_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """A public file's own layout; a speculators file in that layout, as vLLM reads it."""
    parts = formats.speculators_parts(config, "dflash")
    if parts is None:
        return dict(config)
    network, own = parts
    if own.get("sample_from_anchor"):
        raise ConfigError(
            "this DFlash draft predicts from its anchor slot (sample_from_anchor), which training "
            "does not support"
        )
    inner = {
        "mask_token_id": own.get("mask_token_id"),
        "target_layer_ids": from_vllm_aux_ids(own.get("aux_hidden_state_layer_ids") or []),
        "causal": not own.get("sliding_window_non_causal", True),
    }
    kept: dict[str, Any] = {
        key: own[key]
        for key in ("block_size", "draft_vocab_size", "target_hidden_size")
        if key in own
    }
    return {**network, **kept, "architectures": ["DFlashDraftModel"], "dflash_config": inner}
