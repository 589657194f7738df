"""The command: which function a verb calls with what, its exit codes, and how little it imports to
get there.
"""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl_opd.cli import main
from verl_opd.errors import RolloutError


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "train.jsonl").write_text('{"prompt": "hi"}\n')
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"target:\n  path: {tmp_path}\ndata:\n  train_files: [{tmp_path}/train.jsonl]\n"
    )
    return str(path)


def _replace_module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = types.ModuleType(name)
    for key, function in functions.items():
        setattr(module, key, function)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("verb", "module", "function"),
    [
        ("train", "verl_opd.controller.run", "train"),
        ("eval", "verl_opd.commands.eval", "run"),
        ("bench", "verl_opd.commands.bench", "run"),
    ],
)
def test_recipe_verbs(
    monkeypatch: pytest.MonkeyPatch, recipe: str, verb: str, module: str, function: str
) -> None:
    calls: list[tuple[Any, list[str]]] = []
    _replace_module(
        monkeypatch, module, **{function: lambda cfg, command: calls.append((cfg, command))}
    )
    arguments = [verb, recipe, "data.seed=3", "++trainer.seed=4"]
    assert main(arguments) == 0
    (cfg, command), *rest = calls
    assert (cfg.data.seed, cfg.trainer.seed, command, rest) == (3, 4, ["verl-opd", *arguments], [])


def test_export(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    _replace_module(
        monkeypatch,
        "verl_opd.training.export",
        export_checkpoint=lambda *arguments: calls.append(arguments),
        serve_line=lambda checkpoint, draft, format: f"vllm serve {draft}",
    )
    assert main(["export", "runs/x/checkpoints/step_1", "--out", "draft", "--force"]) == 0
    assert main(["export", "runs/x", "--out", "draft", "--format", "sglang"]) == 0
    assert main(["export", "runs/x", "--out", "draft", "--reader", "speculators"]) == 0
    assert calls == [
        (Path("runs/x/checkpoints/step_1"), Path("draft"), True, "vllm"),
        (Path("runs/x"), Path("draft"), False, "sglang"),
        (Path("runs/x"), Path("draft"), False, "speculators"),
    ]


def test_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_module(monkeypatch, "verl_opd.commands.prepare", main=lambda: 7)
    assert main(["prepare"]) == 7


def test_former_names_are_read_with_a_notice(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, "--cfg", "job", "warmup.lr=1", "trainer.warmup_steps=3"]) == 0
    out, err = capsys.readouterr()
    assert err == "  warmup.lr=1            -> sft.lr=1\n  trainer.warmup_steps=3 -> sft.steps=3\n"
    assert yaml.safe_load(out)["sft"]["lr"] == 1.0
    assert yaml.safe_load(out)["sft"]["steps"] == 3


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_former_names_in_a_recipe_are_read_with_a_notice(
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    verb: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with open(recipe, "a") as file:
        file.write("warmup: {lr: 0.5}\ntraining: {attention: eager}\ntrainer: {warmup_steps: 3}\n")
    found: list[Any] = []
    module = {"plan": "verl_opd.commands.plan", "train": "verl_opd.controller.run"}[verb]
    _replace_module(monkeypatch, module, **{verb: lambda cfg, *_: found.append(cfg)})
    assert main([verb, recipe]) == 0
    assert [(cfg.sft.lr, cfg.sft.steps, cfg.compute.attention) for cfg in found] == [
        (0.5, 3, "eager")
    ]
    assert len(caplog.messages) == 3


def test_plan_of_a_recipe_with_former_names(recipe: str) -> None:
    """The whole command, where nothing else handles its notices."""
    with open(recipe, "a") as file:
        file.write("warmup: {lr: 0.5}\ntrainer: {warmup_steps: 3, device: cpu}\n")
    done = subprocess.run(
        [sys.executable, "-m", "verl_opd.cli", "plan", recipe],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "  steps: 3\n" in done.stdout
    assert done.stderr.splitlines()[:2] == [
        f"recipe mine ({recipe}): warmup.lr is now called sft.lr",
        f"recipe mine ({recipe}): trainer.warmup_steps is now called sft.steps",
    ]


@pytest.mark.parametrize(
    "order",
    [
        ["--cfg", "job", "data.seed=5"],
        ["data.seed=5", "--cfg", "job"],
        ["--cfg=job", "data.seed=5"],
    ],
)
def test_cfg_prints_the_resolved_configuration(
    recipe: str, order: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, "trainer.experiment_name=abc", *order]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["data"]["seed"] == 5
    assert printed["trainer"]["run_dir"] == "runs/verl-opd/abc"
    assert printed["rollout"]["agent"]["loop"] == "single_turn"


def test_values_are_checked_before_anything_is_called(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", recipe, "rollout.num_speculative_tokens=0"]) == 2
    assert (
        capsys.readouterr().err == "verl-opd: rollout.num_speculative_tokens=0 must be at least 1\n"
    )


def test_a_run_that_fails_says_what_happened_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise RolloutError("engine 0 did not start; log: x")

    _replace_module(monkeypatch, "verl_opd.controller.run", train=fails)
    assert main(["train", recipe]) == 1
    assert capsys.readouterr().err == "verl-opd: RolloutError: engine 0 did not start; log: x\n"


def test_interrupt(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    _replace_module(monkeypatch, "verl_opd.controller.run", train=interrupted)
    assert main(["train", recipe]) == 130


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["train"],
        ["train", "quickstart", "--cgf", "job"],
        ["export", "x"],
        ["export", "x", "y", "--out", "z"],
        ["export", "x", "--out", "z", "--format", "gguf"],
        ["prepare", "x"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_process_exit_code_and_single_line() -> None:
    command = [sys.executable, "-m", "verl_opd.cli", "train", "quickstart", "data.trian_files=[x]"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert (
        done.stderr
        == "verl-opd: unknown key data.trian_files (value ['x']): did you mean data.train_files?\n"
    )


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom verl_opd.cli import main\n"
        "try:\n    main(['train', '--help'])\nexcept SystemExit as done:\n    assert done.code == "
        "0\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'hydra', 'omegaconf'} & "
        "set(sys.modules)\nassert not heavy, heavy\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout
