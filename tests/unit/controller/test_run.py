"""How a run answers the death of its processes; nothing is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_opd.config.schema import Config
from verl_opd.controller import run
from verl_opd.controller.faults import Restarts
from verl_opd.errors import ConfigError, RestartsExhausted, RunError, WorkerDied
from verl_opd.signals import Stopped

FIRST = Path("given")


class Starts:
    """Stands for a Training whose starts end like `outcomes`; notes where each started from."""

    def __init__(self, *outcomes: Exception | None, restarts: int = 2, committed: int = 0) -> None:
        self._outcomes, self.began = iter(outcomes), list[Path | None]()
        self.restarts = Restarts(restarts)
        self.stop = SimpleNamespace(asked=False)
        self.job = SimpleNamespace(cfg=Config())
        self.store = SimpleNamespace(committed=committed, latest=lambda: "the newest")

    def start(self, checkpoint: Path | None) -> None:
        self.began.append(checkpoint)
        if (outcome := next(self._outcomes)) is not None:
            raise outcome


def go(starts: Any) -> list[Path | None]:
    run._with_restarts(starts, FIRST, ["verl-opd", "train"])
    return starts.began


def test_a_run_in_which_nothing_dies_starts_once():
    assert go(Starts(None)) == [FIRST]


def test_after_a_death_it_starts_again_where_it_started_until_there_is_a_newer_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
):
    assert go(Starts(WorkerDied("a"), WorkerDied("b"), None)) == [FIRST] * 3
    monkeypatch.setattr(run, "resolve_resume", lambda mode, path, store: Path(mode))
    assert go(Starts(WorkerDied("a"), None, committed=1)) == [FIRST, Path("auto")]


def test_used_up_restarts_end_it_whatever_their_message():
    with pytest.raises(RestartsExhausted, match=r"b, and trainer\.max_restarts=1 is used up"):
        go(Starts(WorkerDied("a"), WorkerDied("b"), restarts=1))
    used_up = Starts(RestartsExhausted("inside the fleet"), None)
    with pytest.raises(RestartsExhausted, match="inside the fleet"):
        go(used_up)
    assert used_up.restarts.left == 2
    named = Starts(WorkerDied("a log line with trainer.max_restarts in it"), None)
    assert go(named) == [FIRST] * 2


def test_what_cannot_start_again_names_the_line_that_continues():
    with pytest.raises(ConfigError, match="too small"):
        go(Starts(ConfigError("too small")))
    with pytest.raises(
        WorkerDied, match="the run cannot restart: too small\nthe newest checkpoint is the newest"
    ):
        go(Starts(WorkerDied("a"), ConfigError("too small")))


def test_other_errors_and_stops_are_not_restarted():
    with pytest.raises(RunError):
        go(Starts(RunError("x")))
    stopped = Starts(None)
    stopped.stop.asked = True
    with pytest.raises(Stopped):
        go(stopped)
