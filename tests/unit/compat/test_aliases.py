"""Override lines written for verl and Draft-OPD: every row of the table, conflicts, quoting, and a
whole launcher against a shipped recipe.
"""

from __future__ import annotations

import sys
import types
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from scripts.alias_page import markdown
from tests.alias_combinations import CONFLICTS, LAUNCHER, TOGETHER
from tests.alias_rows import (
    ACTOR,
    DROPPED,
    LOSS,
    MODEL,
    RENAMED,
    ROLLOUT,
    UNSUPPORTED,
    VERL,
)
from verl_opd.cli import main
from verl_opd.compat.aliases import TABLE, Drop, To, Unsupported, With
from verl_opd.compat.translate import notices, translate
from verl_opd.config.keys import is_free_form, is_known
from verl_opd.config.load import compose_config, load_config
from verl_opd.config.schema import Config
from verl_opd.config.validate import validate
from verl_opd.errors import ConfigError

ROOT = Path(__file__).parents[3]


def _load(recipe: str, lines: list[str]) -> Config:
    return load_config(recipe, translate(lines)[0])


def _compose(recipe: str, lines: list[str]) -> DictConfig:
    return compose_config(recipe, translate(lines)[0])


def _error(*lines: str) -> str:
    with pytest.raises(ConfigError) as caught:
        translate(list(lines))
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(("old", "new"), RENAMED)
def test_renamed(old: str, new: str) -> None:
    assert translate([old])[0] == [new]
    assert [(entry.old, entry.new) for entry in translate([old])[1]] == [(old, (new,))]


@pytest.mark.parametrize("old", DROPPED)
def test_dropped_with_a_reason(old: str) -> None:
    lines, translations = translate([old])
    assert lines == []
    assert [(entry.old, entry.new) for entry in translations] == [(old, ())]
    assert translations[0].reason


@pytest.mark.parametrize(("old", "part"), UNSUPPORTED)
def test_unsupported_with_a_reason(old: str, part: str) -> None:
    text = _error(old)
    assert old in text or (LOSS in text and "_kl_weight" in text), text
    assert part in text


@pytest.mark.parametrize(("old", "new"), TOGETHER)
def test_keys_that_decide_together(old: list[str], new: list[str]) -> None:
    assert sorted(translate(old)[0]) == sorted(new)
    assert sorted(translate(old[::-1])[0]) == sorted(new)


@pytest.mark.parametrize(("lines", "parts"), CONFLICTS)
def test_lines_that_disagree_name_each_other(lines: list[str], parts: list[str]) -> None:
    text = _error(*lines)
    assert [part for part in parts if part not in text] == [], text


def test_every_row_is_tested() -> None:
    lines = [
        *(old for old, _ in RENAMED + UNSUPPORTED),
        *DROPPED,
        *(line for old, _ in TOGETHER for line in old),
    ]
    keys = {line.split("=")[0] for line in lines}
    tested = {
        key if key in TABLE else next((row for row in TABLE if fnmatchcase(key, row)), "")
        for key in keys
    }
    assert set(TABLE) - tested == set()


def test_every_target_is_a_key_of_ours_and_no_old_name_is_another_key() -> None:
    for key, row in TABLE.items():
        for new in [row.new] if isinstance(row, To) else row.news if isinstance(row, With) else []:
            assert is_known(new), new
            assert "*" not in new or is_free_form(new), new
        if is_known(key):
            assert isinstance(row, To), key
            assert row.new == key
        assert not isinstance(row, Drop | Unsupported) or row.why


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_prefixes(prefix: str) -> None:
    assert translate([f"{prefix}{ACTOR}optim.lr=1e-4"])[0] == ["optim.lr=1e-4"]
    cfg = _compose(
        "qwen3_4b_dflash_8gpu",
        [f"{prefix}data.apply_chat_template_kwargs.enable_thinking=True", f"{prefix}{MODEL}path=x"],
    )
    assert (cfg.data.apply_chat_template_kwargs.enable_thinking, cfg.target.path) == (True, "x")


def test_our_keys_and_unknown_ones_pass_unchanged() -> None:
    lines = [
        *(
            "data.seed=3",
            "++trainer.seed=4",
            "+data.nope=1",
            "~data.val_files.x",
            "data.seed",
            "=3",
            "data@x=3",
            "data.train_files=[a",
        ),
        *(
            "data.train_files=a.jsonl",
            "data.val_files={a: b}",
            "trainer.logger=[console]",
            "trainer.resume_mode=auto",
            "no.such.key=1,2",
        ),
        *(f"{ROLLOUT}nope=1", f"{ROLLOUT}temperature=[1"),
    ]
    assert translate(lines) == (lines, [])


def test_unknown_keys_keep_their_error() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown key actor_rollout_ref\.rollout\.temprature .*did you mean "
        r"rollout\.temperature\?",
    ):
        _compose("quickstart", [f"{ROLLOUT}temprature=0"])
    with pytest.raises(ConfigError, match="cannot be read"):
        _compose("quickstart", [f"{ROLLOUT}temperature=[1"])


def test_an_error_about_a_type_names_our_key() -> None:
    with pytest.raises(ConfigError, match=r"optim\.lr='fast'"):
        _compose("quickstart", [f"{ACTOR}optim.lr=fast"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [8,16,32,64]}',
            '{"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [8,16,32,64]}',
        ),
        (r'"{\"level\": 0}"', '{"level": 0}'),
        ('\'{"it": "x"}\'', '{"it": "x"}'),
        ('{"it": "isn\'t"}', '{"it": "isn\'t"}'),
        ("'a, b=c'", "a, b=c"),
        ("[1,2]", [1, 2]),
        ("null", None),
    ],
)
def test_quoting_survives(text: str, expected: Any) -> None:
    cfg = _load("quickstart", [f"++{ROLLOUT}engine_kwargs.vllm.compilation_config={text}"])
    assert cfg.rollout.engine_kwargs == {"compilation_config": expected}


def test_paths_with_commas_spaces_and_quotes_survive() -> None:
    lines = [
        f"{MODEL}path='/m, n/o p'",
        "data.train_files=\"['/x, y.jsonl']\"",
        r"data.val_files=['/d, e/it\'s {1}.jsonl']",
    ]
    cfg = _load("qwen3_4b_dflash_1gpu", lines)
    assert (cfg.target.path, cfg.data.train_files, cfg.data.val_files) == (
        "/m, n/o p",
        ["/x, y.jsonl"],
        {"it_s__1_": "/d, e/it's {1}.jsonl"},
    )


def test_the_last_of_several_lines_counts() -> None:
    lines, translations = translate(
        [
            f"{ROLLOUT}name=sglang",
            "trainer.n_gpus_per_node=6",
            f"++{ROLLOUT}name=vllm",
            "trainer.n_gpus_per_node=7",
        ]
    )
    assert lines == ["trainer.n_student_workers=7", "trainer.nnodes=1"]
    assert [entry.old for entry in translations] == [
        f"++{ROLLOUT}name=vllm",
        "trainer.n_gpus_per_node=7",
    ]
    assert translate(["trainer.resume_mode=resume_path", "trainer.resume_mode=auto"])[0] == [
        "trainer.resume_mode=auto"
    ]
    assert (
        translate(["trainer.resume_mode=auto", "trainer.resume_mode=resume_path"])[0][-1]
        == "trainer.resume_mode=path"
    )


def test_equal_spellings_are_written_once() -> None:
    lines, translations = translate(
        [f"{MODEL}path=/m", f"+{VERL}dflash_main_model_path='/m'", "target.path=/m"]
    )
    assert lines == ["target.path=/m"]
    assert len(translations) == 2


def test_translated_lines_are_not_translated_again() -> None:
    once = translate(LAUNCHER)[0]
    assert translate(once) == (once, [])


def test_a_whole_launcher_composes_and_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = _load("qwen3_4b_dflash_8gpu", LAUNCHER)
    assert (cfg.target.path, cfg.draft.path, cfg.draft.family) == (
        "Qwen/Qwen3-4B",
        "/draft",
        "dflash",
    )
    assert cfg.data.val_files == {
        "aime24": "/data/aime24.jsonl",
        "gsm8k": "/data/gsm8k_128_user_prompt.jsonl",
    }
    assert (
        cfg.data.train_batch_size,
        cfg.trainer.n_student_workers,
        cfg.trainer.nnodes,
        cfg.teacher.replicas,
    ) == (28, 14, 1, 2)
    assert (cfg.opd.response_loss, cfg.opd.rejected_loss, cfg.opd.policy_gradient) == (
        "forward_kl",
        "k3",
        False,
    )
    assert (
        cfg.opd.response_stream_weight,
        cfg.opd.rejected_stream_weight,
        cfg.opd.rejected_position_decay,
    ) == (1.0, 1.0, 0.8)
    assert (cfg.opd.loss_max_clamp, cfg.opd.log_prob_min_clamp, cfg.opd.max_response_anchors) == (
        10.0,
        -10.0,
        186,
    )
    assert (
        cfg.optim.lr,
        cfg.optim.lr_warmup_ratio,
        cfg.trainer.update_accumulation_steps,
        cfg.trainer.updates_per_step,
    ) == (
        3e-4,
        0.05,
        10,
        1,
    )
    assert (
        cfg.rollout.num_speculative_tokens,
        cfg.rollout.max_model_len,
        cfg.rollout.agent.num_workers,
    ) == (7, None, 14)
    assert (
        cfg.rollout.gpu_memory_utilization,
        cfg.teacher.gpu_memory_utilization,
        cfg.teacher.top_k,
    ) == (0.4, 0.2, 1)
    assert (
        cfg.compute.attention,
        cfg.compute.gradient_checkpointing,
        cfg.compute.lm_head_chunk_size,
    ) == ("sdpa", True, 512)
    assert (cfg.trainer.run_dir, cfg.trainer.logger, cfg.trainer.resume_mode) == (
        "/ckpt",
        ["console", "wandb"],
        "disable",
    )
    assert set(cfg.rollout.engine_kwargs) == {"compilation_config", "max_num_batched_tokens"}
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    monkeypatch.setattr(Path, "is_dir", lambda self: True)
    validate(cfg)


def test_the_command_prints_the_table_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "hi"}\n')
    old = [
        f"{MODEL}path={tmp_path}",
        f"{ROLLOUT}name=vllm",
        "trainer.n_gpus_per_node=2",
        f"data.train_files=[{tmp_path}/t.jsonl]",
    ]
    calls: list[Any] = []
    for name in ("controller.run", "commands.eval", "commands.bench", "commands.doctor"):
        monkeypatch.setitem(sys.modules, f"verl_opd.{name}", module := types.ModuleType(name))
        for function in ("train", "run", "print_diagnosis"):
            setattr(module, function, lambda cfg, *_: calls.append(cfg) or True)
    for verb in (["train"], ["eval"], ["bench"], ["doctor"], ["train", "--cfg", "job"]):
        assert main([verb[0], "quickstart", *old, *verb[1:]]) == 0
        assert capsys.readouterr().err == notices(translate(old)[1])
    assert [(cfg.target.path, cfg.trainer.n_student_workers) for cfg in calls] == [
        (str(tmp_path), 2)
    ] * 4
    assert main(["train", "quickstart", "--cfg", "job", "data.seed=1"]) == 0
    assert capsys.readouterr().err == ""


def test_the_table_is_aligned() -> None:
    printed = notices(translate([f"{ROLLOUT}name=vllm", "trainer.n_gpus_per_node=2"])[1])
    assert printed == (
        "  actor_rollout_ref.rollout.name=vllm -> dropped: the engine is vLLM\n"
        "  trainer.n_gpus_per_node=2           -> trainer.n_student_workers=2  trainer.nnodes=1\n"
    )


def test_unsupported_values_end_the_command_with_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "quickstart", f"{ROLLOUT}name=sglang"]) == 2
    assert (
        capsys.readouterr().err
        == f"verl-opd: {ROLLOUT}name=sglang is not supported (the engine is vLLM): use vllm, or "
        "leave it out\n"
    )


def test_recipes_know_our_keys_only(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("actor_rollout_ref:\n  model:\n    path: x\n")
    with pytest.raises(ConfigError, match="unknown key actor_rollout_ref"):
        _compose(str(tmp_path / "old.yaml"), [])


def test_the_page_is_printed_from_the_table() -> None:
    assert (ROOT / "docs" / "aliases.md").read_text() == markdown()
