"""Composition from recipes and overrides, and the one-line errors of everything that can be
misspelt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_opd.config.load import compose_config, load_config, to_yaml
from verl_opd.config.recipes import recipe_names, shipped_root
from verl_opd.config.schema import Config
from verl_opd.errors import ConfigError


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A minimal recipe of a user's own, with the files it names."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "hi"}\n')
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"target:\n  path: {tmp_path}\ndata:\n  train_files: [{tmp_path}/train.jsonl]\n  seed: 7\n"
    )
    return str(path)


def _error(recipe: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, list(overrides))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_recipe_and_schema_defaults_compose(recipe: str) -> None:
    cfg = load_config(recipe, ["trainer.n_student_workers=2", "data.max_samples=null"])
    assert isinstance(cfg, Config)
    assert (cfg.data.seed, cfg.trainer.n_student_workers, cfg.data.max_samples) == (7, 2, None)
    assert cfg.rollout.num_speculative_tokens == 7
    assert cfg.trainer.run_dir == "runs/verl-opd/default"
    assert cfg.optim.betas == (0.9, 0.95)


def test_shipped_recipes_compose() -> None:
    assert "quickstart" in recipe_names()
    for name in recipe_names():
        cfg = load_config(name, ["data.train_files=[x.jsonl]"])
        assert cfg.trainer.experiment_name != "default", name


def test_recipe_extends_another_recipe_and_a_shipped_one(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "longer.yaml").write_text("defaults: [mine, _self_]\ntrainer:\n  total_epochs: 9\n")
    cfg = load_config(str(tmp_path / "longer.yaml"), [])
    assert (cfg.data.seed, cfg.trainer.total_epochs) == (7, 9)
    (tmp_path / "quick.yaml").write_text(
        "defaults: [quickstart, _self_]\ntrainer:\n  total_training_steps: 3\n"
    )
    cfg = load_config(str(tmp_path / "quick.yaml"), [])
    assert (cfg.trainer.experiment_name, cfg.trainer.total_training_steps) == ("quickstart", 3)


@pytest.mark.parametrize(
    ("override", "section", "expected"),
    [
        ("rollout.engine_kwargs.block_size=32", "rollout.engine_kwargs", {"block_size": 32}),
        ("+rollout.engine_kwargs.block_size=32", "rollout.engine_kwargs", {"block_size": 32}),
        ("++rollout.engine_kwargs.block_size=32", "rollout.engine_kwargs", {"block_size": 32}),
        (
            "rollout.engine_kwargs={a: [1, 2], b: {c: x}}",
            "rollout.engine_kwargs",
            {"a": [1, 2], "b": {"c": "x"}},
        ),
        (
            r'rollout.engine_kwargs.compilation_config="{\"level\": 0}"',
            "rollout.engine_kwargs",
            {"compilation_config": '{"level": 0}'},
        ),
        (
            "data.apply_chat_template_kwargs.enable_thinking=false",
            "data.apply_chat_template_kwargs",
            {"enable_thinking": False},
        ),
        ("ray.runtime_env.env_vars={A: b}", "ray.runtime_env", {"env_vars": {"A": "b"}}),
        ("data.val_files.gsm8k=x.jsonl", "data.val_files", {"gsm8k": "x.jsonl"}),
        ("++trainer.total_epochs=3", "trainer.total_epochs", 3),
        ("draft.target_layer_ids=[1,4]", "draft.target_layer_ids", [1, 4]),
        ("optim.lr=1e-3", "optim.lr", 1e-3),
        ("optim={lr: 0.5}", "optim.lr", 0.5),
        ("trainer.logger=[console,jsonl]", "trainer.logger", ["console", "jsonl"]),
    ],
)
def test_override_forms(recipe: str, override: str, section: str, expected: Any) -> None:
    cfg = OmegaConf.structured(load_config(recipe, [override]))
    value = OmegaConf.select(cfg, section)
    assert (OmegaConf.to_container(value) if OmegaConf.is_config(value) else value) == expected


def test_entries_of_free_form_sections_can_be_deleted(tmp_path: Path, recipe: str) -> None:
    with open(recipe, "a") as file:
        file.write("rollout:\n  engine_kwargs: {a: 1, b: 2}\n")
    assert load_config(recipe, ["~rollout.engine_kwargs.a"]).rollout.engine_kwargs == {"b": 2}
    assert "rollout.engine_kwargs.c" in _error(recipe, "~rollout.engine_kwargs.c")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.trian_files=[x]", ["data.trian_files", "'x'", "data.train_files?"]),
        ("+data.foo=1", ["data.foo", "1", "did you mean data."]),
        ("++data.shufle=false", ["data.shufle", "False", "data.shuffle?"]),
        ("trainer.lr=3", ["trainer.lr", "3", "optim.lr?"]),
        ("data={shufle: true}", ["data.shufle", "True", "data.shuffle?"]),
        ("rolout={}", ["rolout", "rollout?"]),
        ("+quickstart=1", ["quickstart", "1"]),
        ("data.seed.x=3", ["data.seed.x", "data.seed?"]),
        ("data@rollout=3", ["data@rollout"]),
        ("warmup.nope=3", ["warmup.nope"]),
    ],
)
def test_unknown_key_names_key_value_and_nearest(
    recipe: str, override: str, parts: list[str]
) -> None:
    text = _error(recipe, override)
    assert text.startswith("unknown key ")
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.seed=abc", ["data.seed='abc'", "Integer"]),
        ("data.train_batch_size=1.5", ["data.train_batch_size=1.5"]),
        ("data.seed=null", ["data.seed", "None", "not Optional"]),
        ("data.train_files=a.jsonl", ["data.train_files='a.jsonl'", "[a,b]"]),
        ("data.val_files.x=[1]", ["data.val_files.x=[1]"]),
        ("optim.betas=[a,b]", ["optim.betas[0]='a'"]),
        ("data=3", ["data=3", "section"]),
        ("data.seed=1,2", ["data.seed=1,2", "list"]),
        ("data.seed", ["'data.seed'", "section.key=value"]),
        ("=3", ["'=3'", "section.key=value"]),
        ("data.train_files=[a", ["'data.train_files=[a'"]),
        ("+data.seed=1", ["'data.seed'", "'++data.seed=1'"]),
        ("~data.seed", ["~data.seed"]),
        (
            "target.path=${oc.env:VERL_OPD_NO_SUCH_VARIABLE}",
            ["target.path", "VERL_OPD_NO_SUCH_VARIABLE"],
        ),
        ("target.path=${no.such.key}", ["target.path", "no.such.key"]),
    ],
)
def test_wrong_values_and_wrong_syntax(recipe: str, override: str, parts: list[str]) -> None:
    text = _error(recipe, override)
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (
            "data:\n  trian_files: [x]\n",
            ["recipe bad", "data.trian_files", "['x']", "data.train_files?"],
        ),
        ("warmup: {lr: 1}\n", ["recipe bad: warmup ", "now called sft"]),
        ("training:\n  attention: sdpa\n", ["recipe bad: training ", "now called compute"]),
        (
            "trainer:\n  warmup_steps: 3\n",
            ["recipe bad: trainer.warmup_steps (value 3) is now called sft.steps"],
        ),
        ("data:\n  seed: abc\n", ["recipe bad", "data.seed='abc'"]),
        ("data: 3\n", ["recipe bad", "data=3", "section"]),
        ("data: [3\nx: y: z", ["bad.yaml", "line 2"]),
        ("defaults: [nope]\n", ["recipe bad", "'nope'"]),
        ("- 3\n", ["recipe bad"]),
        ("data:\n  seed: 1\n  seed: 2\n", ["bad.yaml", "seed"]),
    ],
)
def test_faults_in_a_recipe(tmp_path: Path, content: str, parts: list[str]) -> None:
    (tmp_path / "bad.yaml").write_text(content)
    text = _error(str(tmp_path / "bad.yaml"))
    assert [part for part in parts if part not in text] == [], text


def test_unknown_recipes(tmp_path: Path) -> None:
    text = _error("quickstrat")
    assert "did you mean 'quickstart'?" in text
    assert all(name in text for name in recipe_names())
    assert "nowhere.yaml does not exist" in _error(str(tmp_path / "nowhere.yaml"))
    (tmp_path / "x.yml").write_text("")
    assert "must end in .yaml" in _error(str(tmp_path / "x.yml"))


def test_missing_value_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("target:\n  path: x\n")
    assert _error(str(tmp_path / "empty.yaml")).startswith("data.train_files has no value")


def test_relative_files_come_from_the_current_folder_first(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = next((shipped_root() / "recipes").glob("*.yaml"))
    relative = f"recipes/{shipped.name}"
    monkeypatch.chdir(tmp_path)
    override = f"data.train_files=[{relative},nowhere.jsonl]"
    assert load_config(recipe, [override]).data.train_files == [str(shipped), "nowhere.jsonl"]
    (tmp_path / "recipes").mkdir()
    (tmp_path / relative).write_text("")
    assert load_config(recipe, [override]).data.train_files[0] == str(tmp_path / relative)


def test_yaml_of_a_config_is_a_recipe_of_the_same_config(recipe: str, tmp_path: Path) -> None:
    cfg = load_config(recipe, ["rollout.engine_kwargs.a=[1,{b: c}]", "draft.block_size=8"])
    (tmp_path / "again.yaml").write_text(to_yaml(cfg))
    assert load_config(str(tmp_path / "again.yaml"), []) == cfg
    assert "${" not in to_yaml(cfg)


def test_composed_tree_may_miss_values(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert "train_files: ???" in to_yaml(compose_config(str(tmp_path / "empty.yaml"), []))
