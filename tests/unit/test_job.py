"""What is known about a run before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.tiny import MASK_TOKEN_ID
from verl_opd.config.schema import Config
from verl_opd.controller.job import prepare
from verl_opd.drafts import get_family


@pytest.fixture
def cfg(tiny_llama_dir: Path, tmp_path: Path) -> Config:
    (tmp_path / "train.jsonl").write_text('{"prompt": "say one"}\n')
    cfg = Config()
    cfg.target.path, cfg.data.train_files, cfg.trainer.device = str(tiny_llama_dir), [str(tmp_path / "train.jsonl")], "cpu"
    cfg.draft.mask_token_id, cfg.draft.target_layer_ids, cfg.rollout.num_speculative_tokens = MASK_TOKEN_ID, [0, 2, 5], 3
    return cfg


def test_a_draft_remembers_its_template_mode_and_another_one_is_noted(cfg: Config, tmp_path: Path):
    """A7: a draft trained on thinking text loses most of its acceptance without it, and nobody remembers which it was."""
    cfg.data.apply_chat_template_kwargs = {"enable_thinking": False}
    first = prepare(cfg)
    assert first.notes == []
    family = get_family("dflash")
    family.save_pretrained(family.build(first.draft_config, seed=0, init_std=0.02).state_dict(), first.draft_config, tmp_path / "draft")
    written = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert written["verl_opd"] == {"apply_chat_template_kwargs": {"enable_thinking": False}}

    cfg.draft.path = str(tmp_path / "draft")
    same = prepare(cfg)
    assert same.notes == []
    assert same.identity == first.identity
    cfg.data.apply_chat_template_kwargs = {"enable_thinking": True}
    (note,) = prepare(cfg).notes
    assert "'enable_thinking': False" in note
    assert "'enable_thinking': True" in note


def test_teachers_need_the_targets_vocabulary(cfg: Config, tiny_qwen3_dir: Path, tmp_path: Path):
    cfg.teacher.models = {"other": str(tiny_qwen3_dir)}
    assert prepare(cfg).teachers == {"other": str(tiny_qwen3_dir)}
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for file in tiny_qwen3_dir.iterdir():
        (foreign / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((foreign / "tokenizer.json").read_text())
    tokenizer["added_tokens"][-1]["content"] = "<|something_else|>"
    (foreign / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_file({}, foreign / "model.safetensors")
    cfg.teacher.models = {"other": str(foreign)}
    with pytest.raises(ValueError, match=r"teacher.models.other=.* has another vocabulary than the target .*something_else"):
        prepare(cfg)
