"""What is known about a run before anything starts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import save_file

from verl_opd.config.schema import Config
from verl_opd.controller.job import Job, prepare
from verl_opd.controller.position import Position, position_at
from verl_opd.controller.progress import Progress
from verl_opd.drafts import get_family
from verl_opd.errors import ConfigError
from verl_opd.training.checkpoint import CheckpointStore


def test_a_draft_remembers_its_template_mode_and_another_one_is_noted(cfg: Config, tmp_path: Path):
    """A7: a draft trained on thinking text loses most of its acceptance without it, so the
    draft records which it was.
    """
    cfg.data.apply_chat_template_kwargs = {"enable_thinking": False}
    first = prepare(cfg)
    assert first.notes == []
    family = get_family("dflash")
    family.save_pretrained(
        family.build(first.draft_config, seed=0, init_std=0.02).state_dict(),
        first.draft_config,
        tmp_path / "draft",
    )
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
    with pytest.raises(
        ValueError,
        match=r"teacher.models.other=.* has a different vocabulary from the target.*something_else",
    ):
        prepare(cfg)


def conversations(path: Path, *answers: str) -> str:
    rows = [
        {"messages": [{"from": "human", "value": "say"}, {"from": "gpt", "value": answer}]}
        for answer in answers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def checkpoint(store: CheckpointStore, job: Job, at: Position, **steps: int) -> Path:
    """One at this position, as a run writes it."""
    store.begin(1)
    at.progress = Progress(steps=Counter(steps))
    return store.commit(1, {**at.state(), "identity": job.identity})


def test_given_conversations_go_on_where_they_were_and_other_ones_are_an_error(
    cfg: Config, tmp_path: Path
):
    """G1, G5: the same conversations in the same order; another file, or none, only once
    supervised steps are done with them.
    """
    cfg.data.train_batch_size, cfg.sft.samples_per_update, cfg.sft.steps = 1, 1, 4
    cfg.sft.files = [conversations(tmp_path / "a.jsonl", "one", "two", "three", "four", "five")]
    job, store = prepare(cfg), CheckpointStore(tmp_path / "run", keep_last=1)
    whole, at = position_at(job, None), position_at(job, None)
    assert whole.progress.steps == {"sft": 0, "opd": 0}, "every stage is counted from the start"
    assert "5 conversations (5 rows read" in at.given
    order = [sample.sample_id for _ in range(5) for sample in whole.conversations.next_batch()]
    assert [
        sample.sample_id for _ in range(3) for sample in at.conversations.next_batch()
    ] == order[:3]
    saved = checkpoint(store, job, at, sft=3)
    resumed = position_at(job, saved)
    assert [
        sample.sample_id for _ in range(2) for sample in resumed.conversations.next_batch()
    ] == order[3:]

    cfg.sft.files = [conversations(tmp_path / "b.jsonl", "one", "two", "three", "four", "six")]
    with pytest.raises(ConfigError, match="other data settings"):
        position_at(prepare(cfg), saved)
    cfg.sft.files = []
    with pytest.raises(ConfigError, match=r"written with sft\.files, between two supervised steps"):
        position_at(prepare(cfg), saved)
    done = checkpoint(store, job, at, sft=4, opd=1)
    assert position_at(prepare(cfg), done).conversations is None


def test_conversations_are_read_only_while_supervised_steps_learn_from_them(
    cfg: Config, tmp_path: Path
):
    cfg.data.train_batch_size, cfg.sft.files = 1, [str(tmp_path / "not there")]
    job = prepare(cfg)
    assert position_at(job, None).conversations is None  # no supervised steps
    cfg.sft.steps = 1
    with pytest.raises(ConfigError, match="not there cannot be read"):
        position_at(job, None)
