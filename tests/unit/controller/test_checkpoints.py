"""When a run writes a checkpoint, and what happens when it cannot."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeTrainers, result
from verl_opd.controller.checkpoints import Checkpoints
from verl_opd.controller.position import Position
from verl_opd.controller.progress import Progress
from verl_opd.data.loader import Loader
from verl_opd.data.prompts import Prompt
from verl_opd.errors import CheckpointError, ConfigError
from verl_opd.report.timing import Stopwatch
from verl_opd.training.checkpoint import CheckpointStore


def checkpoints(folder: Path, actions: list[str], trainers: Any = None) -> Checkpoints:
    prompts = Loader([Prompt("a", "t", (1,), ())], 1, False, 0)
    return Checkpoints(
        store=CheckpointStore(folder, keep_last=9),
        trainers=trainers or FakeTrainers(actions),
        position=Position(prompts, Progress(steps=Counter({"sft": 0, "opd": 7}))),
        identity={"target": "t"},
        clock=Stopwatch(),
    )


def test_a_point_is_written_once_and_marked_best_afterwards(tmp_path: Path):
    actions: list[str] = []
    kept = checkpoints(tmp_path, actions)
    kept.save()
    kept.save(tau=1.25)
    kept.save(required=True)
    assert actions == ["write dcp", "write draft"]
    assert kept.store.best() == kept.store.latest() == (kept.store.root / "step_7").resolve()
    state = kept.store.read_state(kept.store.root / "step_7")
    assert set(state) == {"progress", "data", "conversations", "identity"}
    assert state["conversations"] is None
    assert Progress.from_state(state["progress"]).steps == {"sft": 0, "opd": 7}


def test_a_step_with_a_new_result_is_another_point(tmp_path: Path):
    actions: list[str] = []
    kept = checkpoints(tmp_path, actions)
    kept.save()
    kept.position.progress.results["after_opd"] = [result()]
    kept.save()
    assert actions == ["write dcp", "write draft"] * 2


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        ConfigError("disk full"),
        CheckpointError("step_7 was not written"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_is_logged_and_training_goes_on_unless_it_is_the_last(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
):
    class FullDisk(FakeTrainers):
        def save(self, directory: Path) -> None:
            raise error

    kept = checkpoints(tmp_path, [], FullDisk([]))
    kept.save()
    assert kept.metrics() == {"training/failed_checkpoints": 1}
    assert caplog.record_tuples == [
        ("verl_opd.controller.checkpoints", logging.ERROR, f"no checkpoint of step 7: {error}")
    ]
    with pytest.raises(type(error)):
        kept.save(required=True)
