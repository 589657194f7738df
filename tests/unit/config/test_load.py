"""Composition from recipes and overrides, and the one-line errors of everything that can be
misspelt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
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
        ("data=3", ["data=3", "section", "int"]),
        ("trainer=null", ["trainer is empty", "a section is needed", "leave it out"]),
        ("data.train_files=[[1]]", ["data.train_files[0]=[1]", "a single value"]),
        ("data.train_files=[{a: 1}]", ["data.train_files[0]={'a': 1}", "a single value"]),
        ("draft.target_layer_ids=[1,[2]]", ["draft.target_layer_ids[1]=[2]", "a single value"]),
        ("data.val_files={a: [1]}", ["data.val_files.a=[1]", "a single value"]),
        ("rollout.agent=[1]", ["rollout.agent: a section is needed"]),
        ("rollout.engine_kwargs=[1]", ["rollout.engine_kwargs: a mapping is needed"]),
        ("draft.target_layer_ids={a: 1}", ["draft.target_layer_ids: a list is needed"]),
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
        (
            "warmup: {lr: 1}\nsft: {lr: 1}\n",
            ["recipe bad", "bad.yaml", "warmup.lr", "now called sft.lr", "keep one"],
        ),
        (
            "trainer: {warmup_steps: 3}\nsft: {steps: 4}\n",
            ["bad.yaml", "trainer.warmup_steps", "sft.steps", "keep one"],
        ),
        (
            "trainer: {warmup_steps: 3}\nwarmup: {steps: 4}\n",
            ["bad.yaml", "trainer.warmup_steps", "sft.steps", "keep one"],
        ),
        ("training:\ncompute: {}\n", ["bad.yaml", "training", "now called compute", "keep one"]),
        ("sft: 3\nwarmup: {lr: 1}\n", ["bad.yaml", "warmup.lr", "sft.lr", "keep one"]),
        ("warmup:\n", ["bad.yaml", "sft is empty"]),
        ("warmup: {nope: 3}\n", ["recipe bad", "sft.nope", "3"]),
        ("warmup: {lr: abc}\n", ["recipe bad", "sft.lr='abc'"]),
        (
            "trainer:\n",
            ["recipe bad", "bad.yaml", "trainer is empty", "a section is needed", "remove it"],
        ),
        ("rollout: {agent: }\n", ["bad.yaml", "rollout.agent is empty", "a section is needed"]),
        (
            "data: {val_files: }\n",
            ["bad.yaml", "data.val_files is empty", "a mapping is needed, {a: b}", "remove it"],
        ),
        ("data: {train_files: [[1]]}\n", ["data.train_files[0]=[1]", "a single value"]),
        ("3\n", ["recipe bad", "bad.yaml", "holds 3", "a recipe holds sections"]),
        ("abc\n", ["recipe bad", "bad.yaml", "holds 'abc'", "a recipe holds sections"]),
        ("[a, b]\n", ["recipe bad", "bad.yaml", "holds ['a', 'b']", "a recipe holds sections"]),
        ("data:\n  seed: abc\n", ["recipe bad", "data.seed='abc'"]),
        ("data: 3\n", ["recipe bad", "data=3", "section"]),
        ("rollout: {agent: 3}\n", ["recipe bad", "rollout.agent=3", "section"]),
        ("data:\n  train_files: x\n", ["recipe bad", "data.train_files='x'", "[a,b]"]),
        ("optim:\n  betas: [a, 1]\n", ["recipe bad", "optim.betas[0]='a'", "Float"]),
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


def test_faults_in_a_recipe_that_is_extended_name_its_file(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "child.yaml").write_text("defaults: [mine, _self_]\n")
    for content in ("3\n", "trainer:\n", "warmup: {lr: 1}\nsft: {lr: 2}\n"):
        Path(recipe).write_text(content)
        assert _error(str(tmp_path / "child.yaml")).startswith(f"recipe mine ({recipe})")


def test_a_recipe_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\xfa")
    text = _error(str(tmp_path / "bad.yaml"))
    assert "bad.yaml" in text
    assert "cannot be read" in text


FORMER = """\
warmup: {lr: 0.5, files: [a.jsonl], loss: forward_kl}
training: {attention: eager, num_threads: "${warmup.samples_per_update}"}
trainer: {warmup_steps: 3, total_epochs: 2, update_epochs: "${trainer.warmup_steps}"}
"""


def test_former_keys_of_a_recipe_are_read(
    recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open(recipe, "a") as file:
        file.write(FORMER)
    cfg = load_config(recipe, ["data.seed=3"])
    assert (cfg.sft.lr, cfg.sft.files, cfg.sft.loss) == (0.5, ["a.jsonl"], "forward_kl")
    assert (cfg.sft.steps, cfg.trainer.total_epochs, cfg.trainer.update_epochs) == (3, 2, 3)
    assert (cfg.compute.attention, cfg.compute.num_threads) == ("eager", 8)
    assert caplog.messages == [
        f"recipe mine ({recipe}): {line}"
        for line in (
            "warmup.lr is now called sft.lr",
            "warmup.files is now called sft.files",
            "warmup.loss is now called sft.loss",
            "training.attention is now called compute.attention",
            "training.num_threads is now called compute.num_threads",
            "trainer.warmup_steps is now called sft.steps",
        )
    ]


def test_former_keys_of_recipes_that_are_extended_are_read(
    recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the extending recipe has the other name: it is the later one, so it counts."""
    with open(recipe, "a") as file:
        file.write(FORMER)
    child = tmp_path / "child.yaml"
    child.write_text("defaults: [mine, _self_]\nsft: {lr: 0.25}\ntraining: {attention: sdpa}\n")
    cfg = load_config(str(child), [])
    assert (cfg.sft.lr, cfg.sft.steps, cfg.compute.attention) == (0.25, 3, "sdpa")
    assert len(caplog.messages) == 7
    assert (
        f"recipe child ({child}): training.attention is now called compute.attention"
        in caplog.messages
    )


def test_former_names_of_every_key_are_read(recipe: str, tmp_path: Path) -> None:
    """As in the config.yaml of a former run, which has all keys."""
    expected = load_config(recipe, ["sft.steps=5", "sft.loss=tv", "compute.num_threads=3"])
    saved = yaml.safe_load(to_yaml(expected))
    saved["trainer"]["warmup_steps"] = saved["sft"].pop("steps")
    saved["warmup"], saved["training"] = saved.pop("sft"), saved.pop("compute")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    assert load_config(str(tmp_path / "config.yaml"), []) == expected


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
