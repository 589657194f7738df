"""`verl-opd bench`: what its arguments lack is one line and exit code 2, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl_opd.cli import main
from verl_opd.commands import bench


@pytest.fixture
def arguments(tmp_path: Path, tiny_llama_dir: Path) -> dict[str, str]:
    """Complete arguments, by key."""
    (tmp_path / "recipe.yaml").write_text("trainer: {device: cpu}\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "say one"}\n')
    (tmp_path / "empty").mkdir()
    return {
        "target.path": str(tiny_llama_dir),
        "data.train_files": f"[{tmp_path}/rows.jsonl]",
        "draft.mask_token_id": "3",
        "draft.target_layer_ids": "[0,2,5]",
        "trainer.run_dir": str(tmp_path / "run"),
    }


class Started(Exception):
    """Every check has passed."""


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def running(*_: Any) -> None:
        raise Started

    monkeypatch.setattr(bench, "running", running)


def _main(tmp_path: Path, arguments: dict[str, str]) -> int:
    recipe = str(tmp_path / "recipe.yaml")
    return main(["bench", recipe, *(f"{key}={value}" for key, value in arguments.items())])


def test_complete_arguments_pass_every_check(tmp_path: Path, arguments: dict[str, str]) -> None:
    with pytest.raises(Started):
        _main(tmp_path, arguments)


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"target.path": None}, ["target.path has no value", "target.path=..."]),
        ({"target.path": "{tmp}/nowhere"}, ["target.path=", "does not exist"]),
        ({"target.path": "{tmp}/empty"}, ["target.path=", "cannot be read"]),
        ({"data.train_files": None}, ["data.train_files has no value"]),
        ({"data.train_files": "[{tmp}/no.jsonl]"}, ["data.train_files", "does not exist"]),
        ({"draft.path": "{tmp}/nowhere"}, ["draft.path=", "does not exist"]),
        ({"draft.path": "{tmp}/empty"}, ["{tmp}/empty", "config.json"]),
        ({"draft.mask_token_id": None}, ["draft.mask_token_id"]),
        ({"draft.family": "medusa"}, ["draft.family", "medusa", "dflash"]),
        ({"bench.pushes": "3"}, ["unknown key bench.pushes"]),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(
    tmp_path: Path,
    arguments: dict[str, str],
    changed: dict[str, str | None],
    parts: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for key, value in changed.items():
        arguments.pop(key, None)
        if value is not None:
            arguments[key] = value.replace("{tmp}", str(tmp_path))
    assert _main(tmp_path, arguments) == 2
    text = capsys.readouterr().err
    assert text.startswith("verl-opd: ")
    assert text.count("\n") == 1
    parts = [part.replace("{tmp}", str(tmp_path)) for part in parts]
    assert [part for part in parts if part not in text] == [], text
    assert not (tmp_path / "run").exists()
