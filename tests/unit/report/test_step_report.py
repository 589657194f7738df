"""What becomes of a finished step: one set of metrics for all who show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import result
from tests.rollouts import worked_sample
from verl_opd.opd.metrics import StepMetrics
from verl_opd.report.console import Console
from verl_opd.report.sample_log import SampleLog
from verl_opd.report.step_report import FinishedStep, StepReporter
from verl_opd.report.timing import Stopwatch
from verl_opd.report.trackers import Trackers

RESULT = result(1.5)


def reporter(folder: Path) -> StepReporter:
    return StepReporter(
        trackers=Trackers(["jsonl"], folder, "project", "name", {}),
        console=Console(),
        samples=SampleLog(folder / "samples.log", lambda ids: str(list(ids))),
        clock=Stopwatch(),
        diagnostics={"mask_token_id": 3},
    )


def finished(**changes: Any) -> FinishedStep:
    part = StepMetrics()
    part.add_mean("actor/distillation/loss", 3.0, 2)
    part.add_sum("perf/total_num_tokens", 100)
    return FinishedStep(
        **{
            "number": 7,
            "parts": [part, part],
            "counters": {"training/global_step": 7},
            "results": [],
            "shown": worked_sample(),
            "on_policy": True,
            "checksum": "abc",
            **changes,
        }
    )


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_measurements_counters_benchmarks_and_times_are_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    made = reporter(tmp_path)
    with made.stage("opd", 4, 2) as bar:
        with made.clock.part("gen"):
            pass
        made.step(bar, finished(results=[RESULT]))
    (row,) = rows(tmp_path)
    assert row["step"] == row["training/global_step"] == 7
    assert row["actor/distillation/loss"] == 1.5
    assert row["test_rollout/b/vllm_spec_accept_length"] == 1.5
    assert row["perf/throughput"] == pytest.approx(200 / row["timing_s/step"])
    assert "timing_s/gen" in row
    assert capsys.readouterr().out.startswith("OPD 3/4  loss 1.5")
    assert "== step 7, sample 0-0" in (tmp_path / "samples.log").read_text()


def test_a_symptom_is_reported_with_what_is_known_but_not_in_supervised_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    part = StepMetrics()
    part.add_mean("actor/distillation/loss", 0.0, 1)
    made = reporter(tmp_path)
    with made.stage("sft", 2, 0) as bar:
        made.step(bar, finished(parts=[part], on_policy=False))
        assert caplog.messages == []
        made.step(bar, finished(parts=[part]))
        made.step(bar, finished(parts=[part]))
    (message,) = caplog.messages
    assert "the loss is exactly 0" in message
    assert "mask_token_id: 3\n  checksum in engine: abc" in message


def test_benchmarks_at_a_named_point_are_logged_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    reporter(tmp_path).benchmarks(5, "after_sft", [RESULT])
    (row,) = rows(tmp_path)
    assert (row["step"], row["test_rollout/b/vllm_spec_accept_length"]) == (5, 1.5)
    shown = capsys.readouterr().out
    assert "held-out accept length, after sft" in shown
    assert "1.500" in shown
