"""summary.json, and what is printed of it, also of those that older runs wrote."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest

from tests.fakes import result
from verl_opd.report.console import Console
from verl_opd.report.summary import Outcome, print_summary, write_summary
from verl_opd.report.timing import Stopwatch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    clock = Stopwatch()
    with clock.part("gen"):
        time.sleep(0.02)
    outcome = Outcome(
        results={
            "before": [result(1.0), result(None, "c")],
            "after_sft": [result(1.5), result(1.25, "c")],
            "after_opd": [result(1.75), result(1.5, "c")],
        },
        steps={"sft": 3, "opd": 2, "optimiser": 5},
        weight_sync={"version": 5, "seconds": 0.1, "bytes": 10},
        export=tmp_path / "exports" / "draft",
        serve="vllm serve t",
    )
    write_summary(tmp_path, outcome, clock)
    return tmp_path


def shown(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> tuple[str, list[str]]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "verl_opd"):
        print_summary(Console(), folder)
    return capsys.readouterr().out, caplog.messages


def test_a_summary_holds_and_shows_what_the_run_gained(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    written = json.loads((folder / "summary.json").read_text())
    assert written["steps"] == {"sft": 3, "opd": 2, "optimiser": 5}
    assert written["results"]["after_opd"][0]["tau"] == 1.75
    assert set(written["seconds"]) == {"gen", "total"}
    out, messages = shown(folder, capsys, caplog)
    assert "after sft" in out
    assert "rollout (engines)" in out
    assert messages == [
        "tau b: 1.000 -> 1.750",
        f"exported draft   {folder / 'exports' / 'draft'}",
        "serve it with    vllm serve t",
        f"run directory    {folder}",
    ]


def test_a_summary_that_calls_the_supervised_stage_warmup_is_shown_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    now = shown(folder, capsys, caplog)
    file = folder / "summary.json"
    file.write_text(file.read_text().replace('"after_sft"', '"after_warmup"'))
    assert shown(folder, capsys, caplog) == now
