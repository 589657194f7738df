"""`verl-opd eval` on engines that are made up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rollouts import worked_sample
from tests.tiny import MASK_TOKEN_ID
from verl_opd.commands import eval as command
from verl_opd.config.schema import Config
from verl_opd.errors import ConfigError


def test_without_benchmarks_there_is_nothing_to_evaluate():
    with pytest.raises(ConfigError, match=r"data\.val_files is empty"):
        command.run(Config(), [])


def test_results_are_printed_and_written(
    tiny_llama_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "say one"}\n')
    cfg = Config()
    cfg.target.path, cfg.trainer.device = str(tiny_llama_dir), "cpu"
    cfg.trainer.run_dir = str(tmp_path / "run")
    cfg.data.train_files = [str(tmp_path / "rows.jsonl")]
    cfg.data.val_files = {"words": str(tmp_path / "rows.jsonl")}
    cfg.draft.mask_token_id, cfg.draft.target_layer_ids = MASK_TOKEN_ID, [0, 2, 5]
    cfg.teacher.models = {"other": str(tiny_llama_dir)}
    started: list[dict[str, str]] = []

    @contextmanager
    def running(job: Any, run: Any) -> Iterator[tuple[None, None, Any]]:
        started.append(job.teachers)
        yield None, None, SimpleNamespace(generate=lambda *args: [worked_sample()])

    monkeypatch.setattr(command, "running", running)
    command.run(cfg, ["verl-opd", "eval"])
    assert started == [{}], "a teacher is not needed"
    assert "held-out accept length" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert (row["benchmark"], row["samples"]) == ("words", 1)
    assert (tmp_path / "run" / "command.txt").read_text() == "verl-opd eval\n"
