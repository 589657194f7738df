"""DFlash config.json: what is derived, what public files look like, what is unsupported, and the
messages.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from tests.drafts import LAYERS, MASK, QWEN3_4B_DFLASH, VOCAB, draft_config, target_config
from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import get_family
from verl_opd.drafts.dflash.config import layer_attention, rope_theta
from verl_opd.errors import ConfigError

FAMILY = get_family("dflash")


def _qwen3_4b() -> PretrainedConfig:
    return Qwen3Config(
        hidden_size=2560,
        num_hidden_layers=36,
        vocab_size=151936,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )


def _error(config: dict[str, Any], target: PretrainedConfig | None = None, tokens: int = 3) -> str:
    with pytest.raises(ConfigError) as caught:
        FAMILY.check(config, target or target_config(LlamaConfig), tokens, False)
    return str(caught.value)


def test_public_config_fits_its_target() -> None:
    FAMILY.check(QWEN3_4B_DFLASH, _qwen3_4b(), 15, False)
    assert FAMILY.layer_ids(QWEN3_4B_DFLASH) == [1, 9, 17, 25, 33]
    assert FAMILY.mask_token_id(QWEN3_4B_DFLASH) == 151669
    assert FAMILY.block_size(QWEN3_4B_DFLASH, 15) == 16
    assert rope_theta(QWEN3_4B_DFLASH) == 1e6


def test_block_size_may_lie_in_dflash_config() -> None:
    config = deepcopy(QWEN3_4B_DFLASH)
    config["dflash_config"]["block_size"] = config.pop("block_size")
    FAMILY.check(config, _qwen3_4b(), 15, False)
    assert FAMILY.block_size(config, 15) == 16


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_derived_from_the_target(kind: type[PretrainedConfig]) -> None:
    target = target_config(kind)
    config = FAMILY.derive_config(
        target, DraftConfig(mask_token_id=MASK, num_hidden_layers=3, num_target_features=3), 7
    )
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 8,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]},
        "num_target_layers": LAYERS,
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "max_position_embeddings": 512,
        "layer_types": ["full_attention"] * 3,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    assert None not in config.values()
    FAMILY.check(config, target, 7, False)


def test_keys_override_what_is_derived() -> None:
    keys = DraftConfig(
        mask_token_id=MASK, block_size=6, target_layer_ids=[0, 7], intermediate_size=20
    )
    config = FAMILY.derive_config(target_config(), keys, 3)
    assert (
        config["block_size"],
        config["dflash_config"]["target_layer_ids"],
        config["intermediate_size"],
    ) == (6, [0, 7], 20)


def test_head_dim_follows_from_the_heads_when_the_target_names_none() -> None:
    target = target_config(LlamaConfig)
    target.head_dim = None
    assert draft_config(target=target)["head_dim"] == 8


def test_random_initialisation_needs_a_mask_token() -> None:
    with pytest.raises(ConfigError, match=r"draft\.mask_token_id is required"):
        FAMILY.derive_config(target_config(), DraftConfig(), 7)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_engines_read_the_same_numbers_from_the_file(
    kind: type[PretrainedConfig], tmp_path: Path
) -> None:
    """vLLM parses config.json with transformers' Qwen3Config: nothing there may be replaced by a
    default.
    """
    config = draft_config(target=target_config(kind))
    (tmp_path / "config.json").write_text(json.dumps(config))
    parsed = AutoConfig.from_pretrained(tmp_path)
    assert parsed.rope_parameters == {"rope_type": "default", "rope_theta": rope_theta(config)}
    for key in (
        "head_dim",
        "num_key_value_heads",
        "rms_norm_eps",
        "hidden_size",
        "intermediate_size",
        "dflash_config",
        "layer_types",
    ):
        assert getattr(parsed, key) == config[key], key


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 7e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}},
        {"rope_theta": 7e5, "rope_scaling": None},
    ],
)
def test_both_rope_spellings(spelling: dict[str, Any]) -> None:
    config = draft_config()
    del config["rope_theta"]
    assert rope_theta({**config, **spelling}) == 7e5


def test_rope_theta_is_never_guessed() -> None:
    """K9: a base of 10000 against one of a million trains happily."""
    config = draft_config()
    del config["rope_theta"]
    assert "draft's config.json has no rope_theta" in _error(config)
    assert "draft's config.json has no rope_theta" in _error(
        {**config, "rope_parameters": {"rope_type": "default"}}
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types=['chunked_attention']",
        ),
        (
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "dflash_config": {"swa_window_size": 8},
            },
            "mixes sliding and full",
        ),
        ({"dflash_config": {"use_swa": True}}, "names no window"),
        ({"dflash_config": {"use_swa": True}, "sliding_window": 8}, "use_sliding_window=true"),
        (
            {"dflash_config": {"use_swa": True, "swa_window_size": 3}},
            "window of 3 tokens is smaller than its block of 4",
        ),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias=True"),
        ({"dflash_config": {"attention_value_scale": 0.5}}, "attention_value_scale=0.5"),
        ({"dflash_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"is_neox_style": False}, "is_neox_style=False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"draft_vocab_size": 50}, "draft_vocab_size=50"),
        ({"target_hidden_size": 64}, "target_hidden_size=64"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
            "eagle_aux_hidden_state_layer_ids=[1, 3, 5]",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
            "mrope_section=[2, 3, 3]",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type='linear' is not supported",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0}},
            "rope_type='llama3' is not supported",
        ),
        (
            {"architectures": ["LlamaForCausalLMEagle3"]},
            "architectures=['LlamaForCausalLMEagle3'] is not supported",
        ),
    ],
)
def test_variants_that_replay_does_not_reproduce_are_unsupported(
    change: dict[str, Any], named: str
) -> None:
    config = draft_config()
    inner = {**config["dflash_config"], **change.get("dflash_config", {})}
    message = _error({**config, **change, "dflash_config": inner})
    assert named in message


def test_harmless_spellings_pass() -> None:
    config = draft_config()
    config.update(
        is_causal=False,
        is_neox_style=True,
        draft_vocab_size=VOCAB,
        logit_scale=1.0,
        eagle_aux_hidden_state_layer_ids=[2, 4, 6],
    )
    config["dflash_config"].update(causal=False, use_swa=False, attention_sink_bias=False)
    FAMILY.check(config, target_config(LlamaConfig), 3, False)


@pytest.mark.parametrize(
    "key", ["head_dim", "num_key_value_heads", "rms_norm_eps", "block_size", "hidden_size"]
)
def test_missing_numbers_are_not_left_to_engine_defaults(key: str) -> None:
    config = draft_config()
    del config[key]
    assert f"no {key}" in _error(config)


def test_layer_ids_at_top_level_are_not_what_the_engine_reads() -> None:
    """B2: the same list means other layers under another key."""
    config = draft_config()
    config["target_layer_ids"] = config["dflash_config"].pop("target_layer_ids")
    assert "no dflash_config.target_layer_ids" in _error(config)


@pytest.mark.parametrize(
    ("target", "numbers"),
    [
        ({"hidden_size": 64}, "hidden_size is 32 in the draft and 64"),
        ({"vocab_size": 100}, "vocab_size is 97 in the draft and 100"),
        ({"num_hidden_layers": 9}, "made for 8 target layers, the target has 9"),
    ],
)
def test_both_numbers_of_a_mismatch_are_named(target: dict[str, Any], numbers: str) -> None:
    assert numbers in _error(draft_config(), target_config(LlamaConfig, **target))


@pytest.mark.parametrize("ids", [(1, 3, 8), (-1, 3, 5), (3, 1, 5), (1, 1, 5)])
def test_layer_ids_are_ascending_layers_of_the_target(ids: tuple[int, ...]) -> None:
    assert f"target_layer_ids={list(ids)} must be ascending, distinct layers in 0..7" in _error(
        draft_config(layer_ids=ids)
    )


def test_first_and_last_layer_are_allowed() -> None:
    FAMILY.check(draft_config(layer_ids=(0, 7)), target_config(LlamaConfig), 3, False)


@pytest.mark.parametrize("mask", [-1, VOCAB])
def test_the_mask_token_is_a_row_of_the_embedding(mask: int) -> None:
    """C8."""
    config = draft_config()
    config["dflash_config"]["mask_token_id"] = mask
    assert f"mask_token_id={mask} is not a row of the target's embedding of 97 rows" in _error(
        config
    )


def test_block_size_and_speculative_tokens() -> None:
    """B6: a block of B has B - 1 proposals."""
    config, target = draft_config(block=8), target_config(LlamaConfig)
    FAMILY.check(config, target, 7, False)
    assert "rollout.num_speculative_tokens=8 exceeds the 7 proposals" in _error(config, tokens=8)
    with pytest.raises(ConfigError, match="exceeds the 7 proposals"):
        FAMILY.check(config, target, 8, True)
    message = _error(config, tokens=5)
    assert "draft.block_size=8 differs from rollout.num_speculative_tokens + 1 = 6" in message
    assert "rollout.num_speculative_tokens=7" in message
    FAMILY.check(config, target, 5, True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (None, False)),
        ({"layer_types": None}, (None, False)),
        ({"dflash_config": {"causal": True}}, (None, True)),
        ({"is_causal": True}, (None, True)),
        ({"is_causal": False, "dflash_config": {"causal": True}}, (None, False)),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 8}}, (8, False)),
        (
            {"dflash_config": {"use_swa": True}, "sliding_window": 16, "use_sliding_window": True},
            (16, False),
        ),
        (
            {"layer_types": ["sliding_attention"] * 2, "dflash_config": {"swa_window_size": 8}},
            (8, True),
        ),
        (
            {
                "layer_types": ["sliding_attention"] * 2,
                "dflash_config": {"swa_window_size": 8, "causal": False},
            },
            (8, False),
        ),
    ],
)
def test_attention_of_a_layer_is_resolved_as_in_the_engine(
    change: dict[str, Any], expected: tuple[int | None, bool]
) -> None:
    """The table of vLLM's qwen3_dflash: z-lab, Gemma and MiMo drafts each spell it differently."""
    config = draft_config()
    inner = {**config["dflash_config"], **change.get("dflash_config", {})}
    config = {**config, **change, "dflash_config": inner}
    FAMILY.check(config, target_config(LlamaConfig), 3, False)
    assert layer_attention(config) == [expected] * 2


def test_a_trained_draft_goes_on_in_shorter_blocks_and_never_in_longer_ones() -> None:
    config = dict(QWEN3_4B_DFLASH)
    shorter = FAMILY.with_block(config, 8)
    assert FAMILY.block_size(shorter, 7) == 8
    assert {key: value for key, value in shorter.items() if key != "block_size"} == {
        k: v for k, v in config.items() if k != "block_size"
    }
    nested = {**config, "dflash_config": {**config["dflash_config"], "block_size": 16}}
    assert FAMILY.block_size(FAMILY.with_block(nested, 8), 7) == 8
    with pytest.raises(ConfigError, match=r"draft\.block_size=17 is longer than the 16 slots"):
        FAMILY.with_block(config, 17)
    for other in ("eagle3", "dspark"):
        with pytest.raises(ConfigError, match=r"as long as rollout\.num_speculative_tokens"):
            get_family(other).with_block({}, 8)
