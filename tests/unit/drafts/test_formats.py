"""One draft in several file formats: what each engine understands, and that nothing is lost on the
way there and back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.transformers_utils.config import maybe_override_with_speculators
from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

from tests.drafts import MASK, VOCAB, draft_config, shapes_of, target_config
from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import files, get_family
from verl_opd.drafts.dflash.config import layer_attention
from verl_opd.drafts.dspark.config import as_dflash
from verl_opd.drafts.formats import Use
from verl_opd.errors import ConfigError
from verl_opd.training.checkpoint import CheckpointStore
from verl_opd.training.export import export_checkpoint, serve_line

K = 3
KEYS = DraftConfig(mask_token_id=MASK, target_layer_ids=[1, 3, 5], num_hidden_layers=2)
EAGLE_KEYS = DraftConfig(target_layer_ids=[1, 3, 5])
SLIDING = {
    "layer_types": ["sliding_attention"] * 2,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5], "swa_window_size": 8},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", draft_config()),
    "dflash, sliding and causal": ("dflash", {**draft_config(), **SLIDING}),
    "dflash, sliding, not causal": (
        "dflash",
        {
            **draft_config(),
            **SLIDING,
            "dflash_config": {**SLIDING["dflash_config"], "causal": False},
        },
    ),
    "dflash with nulls, as public files have them": (
        "dflash",
        {**draft_config(), "rope_scaling": None, "sliding_window": None},
    ),
    "eagle3": ("eagle3", get_family("eagle3").derive_config(target_config(), EAGLE_KEYS, K)),
    "eagle3, 3.1 and a vocabulary of its own": (
        "eagle3",
        {
            **get_family("eagle3").derive_config(target_config(), EAGLE_KEYS, K),
            "fc_norm": True,
            "norm_output": True,
            "draft_vocab_size": 40,
        },
    ),
    "eagle3, norm before residual": (
        "eagle3",
        {
            **get_family("eagle3").derive_config(target_config(), EAGLE_KEYS, K),
            "norm_before_residual": True,
        },
    ),
    "dspark": (
        "dspark",
        {**get_family("dspark").derive_config(target_config(), KEYS, K), "markov_rank": 8},
    ),
    "dspark, sliding, not causal": (
        "dspark",
        {
            **get_family("dspark").derive_config(target_config(), KEYS, K),
            "markov_rank": 8,
            "layer_types": ["sliding_attention"] * 2,
            "sliding_window": 8,
            "use_sliding_window": True,
            "is_causal": False,
        },
    ),
}


def network(family: str, config: dict[str, Any]) -> nn.Module:
    draft = get_family(family).build(config, seed=1, init_std=0.2)
    if hasattr(draft, "d2t"):
        draft.d2t.copy_(torch.arange(40))  # every second token
        draft.t2d[torch.arange(40) * 2] = True
    return draft


def exported(tmp_path: Path, family: str, config: dict[str, Any], format: str) -> tuple[Path, Path]:
    """(checkpoint, export) of a new draft."""
    store = CheckpointStore(tmp_path / "run", keep_last=1)
    get_family(family).save_pretrained(
        network(family, config).state_dict(), config, store.begin(1) / "draft"
    )
    checkpoint = store.commit(
        1,
        {
            "identity": {
                "family": family,
                "target": str(tmp_path / "target"),
                "num_speculative_tokens": K,
            }
        },
    )
    return checkpoint, export_checkpoint(checkpoint, tmp_path / format, format=format)


@pytest.mark.parametrize("case", CASES)
def test_a_speculators_file_read_back_is_the_same_draft(case: str, tmp_path: Path) -> None:
    """B2, J4: another convention of layer ids and other names outside, one inside."""
    family, config = CASES[case]
    used, target = get_family(family), target_config()
    _, out = exported(tmp_path, family, config, "speculators")
    again = used.load_config(str(out), target)
    used.check(again, target, K, False)
    assert used.layer_ids(again) == used.layer_ids(config) == [1, 3, 5]
    assert used.mask_token_id(again) == used.mask_token_id(config)
    assert used.block_size(again, K) == used.block_size(config, K)
    reloaded, original = (
        used.build(again, seed=2, init_std=0.0),
        network(family, config).state_dict(),
    )
    used.load_weights(reloaded, str(out))
    assert all(
        torch.equal(tensor, files.narrow(original[name]).to(tensor.dtype))
        for name, tensor in reloaded.state_dict().items()
    )
    if family == "dflash":
        assert layer_attention(again) == layer_attention(config)
    if family == "dspark":
        assert layer_attention(as_dflash(again)) == layer_attention(as_dflash(config))


@pytest.mark.parametrize("case", CASES)
def test_vllm_understands_a_speculators_file_as_the_draft_it_is(case: str, tmp_path: Path) -> None:
    """B5, J4, J9: `vllm serve <draft>` finds target, method, proposals and every key that decides
    how it drafts.
    """
    family, config = CASES[case]
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"]})
    )
    checkpoint, out = exported(tmp_path, family, config, "speculators")
    assert serve_line(checkpoint, out, "speculators") == f"vllm serve {out}"
    target, tokenizer, speculative = maybe_override_with_speculators(str(out), None, False)
    assert target == tokenizer == str(tmp_path / "target")
    assert speculative == {"method": family, "model": str(out), "num_speculative_tokens": K}
    written = json.loads((out / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    seen = SpeculatorsConfig.from_pretrained(out)
    assert seen.eagle_aux_hidden_state_layer_ids == [2, 4, 6]
    for key in (
        "hidden_size",
        "head_dim",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "num_hidden_layers",
    ):
        assert getattr(seen, key) == config[key], key
    assert seen.draft_vocab_size == config.get("draft_vocab_size", VOCAB)
    assert seen.rope_theta == config["rope_theta"]
    if family == "dflash":
        (causal,) = {causal for _, causal in layer_attention(config)}
        expected = {
            "mask_token_id": MASK,
            "target_layer_ids": [1, 3, 5],
            "sample_from_anchor": False,
            "causal": causal,
        }
        assert seen.dflash_config == expected
    if family == "eagle3":
        for key in ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc"):
            assert getattr(seen, key) == bool(config.get(key)), key
    if family == "dspark":
        assert seen.is_causal == layer_attention(as_dflash(config))[0][1]
        assert (seen.target_layer_ids, seen.sample_from_anchor, seen.markov_rank) == (
            [1, 3, 5],
            True,
            8,
        )


def test_speculators_names_its_layer_as_its_engines_do(tmp_path: Path) -> None:
    _, out = exported(tmp_path, *CASES["eagle3"], "speculators")
    names = shapes_of(out / "model.safetensors")
    assert "layers.0.self_attn.q_proj.weight" in names
    assert not any("midlayer" in name for name in names)
    assert "embed_tokens.weight" not in names


def test_sglang_gets_unshifted_layer_ids_and_names_that_all_its_releases_know(
    tmp_path: Path,
) -> None:
    """B2: SGLang adds one itself; unknown names it would skip without a word. Written from its
    documented behaviour; no SGLang has read this.
    """
    family, config = CASES["eagle3"]
    checkpoint, out = exported(tmp_path, family, config, "sglang")
    written = json.loads((out / "config.json").read_text())
    assert written["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    }
    assert "eagle_aux_hidden_state_layer_ids" not in written
    assert written["num_hidden_layers"] == 1
    assert "midlayer.self_attn.q_proj.weight" in shapes_of(out / "model.safetensors")
    assert serve_line(checkpoint, out, "sglang") == (
        f"python -m sglang.launch_server --model-path {tmp_path / 'target'} "
        f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {out} "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    )
    for name in ("fc_norm", "norm_output", "norm_before_residual"):
        with pytest.raises(
            ConfigError, match=f"has {name} switched on, which SGLang does not read"
        ):
            get_family("eagle3").to_format({**config, name: True}, "sglang", Use("t", K))
    (tmp_path / "other").mkdir()
    _, same = exported(tmp_path / "other", *CASES["dflash"], "sglang")
    assert json.loads((same / "config.json").read_text()) == CASES["dflash"][1]
    with pytest.raises(ConfigError, match="SGLang does not draft with DSpark"):
        get_family("dspark").to_format(CASES["dspark"][1], "sglang", Use("t", K))


def test_no_format_has_a_null(tmp_path: Path) -> None:
    """J9."""
    _, out = exported(tmp_path, *CASES["dflash with nulls, as public files have them"], "vllm")
    assert "null" not in (out / "config.json").read_text()


def test_a_speculators_file_of_another_algorithm_or_anchor_is_an_error(tmp_path: Path) -> None:
    _, out = exported(tmp_path, *CASES["dflash"], "speculators")
    with pytest.raises(
        ConfigError, match=r"speculators_model_type='dflash': use draft\.family=dflash"
    ):
        get_family("eagle3").load_config(str(out))
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "sample_from_anchor": True}))
    with pytest.raises(ConfigError, match="predicts from its anchor slot"):
        get_family("dflash").load_config(str(out))
