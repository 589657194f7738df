"""Every tracker gets every value under the step it belongs to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from verl_opd.errors import ConfigError
from verl_opd.report.trackers import Trackers


class WandbRun:
    """Drops, as wandb does, what is logged under an own step that has passed."""

    def __init__(self) -> None:
        self.kept: list[dict[str, float]] = []
        self.axes: list[tuple[str, str]] = []
        self.step, self.finished = 0, 0

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        at = self.step if step is None else step
        if at >= self.step:
            self.kept.append(metrics)
            self.step = at + 1

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = SimpleNamespace(run=WandbRun(), inits=[])
    fake.init = lambda **kwargs: fake.inits.append(kwargs) or fake.run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_a_validation_after_its_training_step_reaches_every_tracker(
    tmp_path: Path, wandb: Any
) -> None:
    """H10: every step once, and finished once."""
    trackers = Trackers(
        ["console", "jsonl", "tensorboard", "wandb"], tmp_path, "project", "name", {}
    )
    trackers.log(9, {"actor/lr": 0.5})
    trackers.log(9, {"test_rollout/x/vllm_spec_accept_length": 1.75})
    trackers.log(10, {"actor/lr": 0.25})
    trackers.close()

    assert wandb.run.axes == [("*", "training/global_step")]
    assert wandb.run.kept == [
        {"training/global_step": 9, "actor/lr": 0.5},
        {"training/global_step": 9, "test_rollout/x/vllm_spec_accept_length": 1.75},
        {"training/global_step": 10, "actor/lr": 0.25},
    ]
    assert wandb.run.finished == 1
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row.get("actor/lr")) for row in rows] == [(9, 0.5), (9, None), (10, 0.25)]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/lr")] == [
        (9, 0.5),
        (10, 0.25),
    ]
    assert [
        (event.step, event.value)
        for event in events.Scalars("test_rollout/x/vllm_spec_accept_length")
    ] == [(9, 1.75)]


def test_a_resumed_run_continues_its_wandb_run(tmp_path: Path, wandb: Any) -> None:
    for _ in range(2):
        Trackers(["wandb"], tmp_path, "project", "name", {}).close()
    first, second = wandb.inits
    assert first["id"] == second["id"]
    assert first["resume"] == "allow"


def test_wandb_that_is_not_installed_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"verl-opd\[wandb\]"):
        Trackers(["wandb"], tmp_path, "project", "name", {})
