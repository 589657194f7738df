"""Writes the checkpoints of a run: each point once, the best one marked, failures counted."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from verl_opd.controller.position import Position
from verl_opd.controller.trainers import Trainers
from verl_opd.errors import CheckpointError, ConfigError
from verl_opd.report.timing import Stopwatch
from verl_opd.training.checkpoint import CheckpointStore, checkpoint_bytes

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Checkpoints:
    """The checkpoints of a run."""

    store: CheckpointStore
    trainers: Trainers
    position: Position  # where the run is in its data; part of every checkpoint
    identity: dict[str, Any]  # a checkpoint with another identity cannot be continued
    clock: Stopwatch
    failed: int = 0  # checkpoints that could not be written
    # global step and number of measured points of the newest checkpoint
    saved: tuple[int, int] | None = None

    def save(self, tau: float | None = None, required: bool = False) -> None:
        """Write a checkpoint of this point unless there is one. With `tau`, the accept length on
        held-out prompts, mark it as best if no other reached as much. When it cannot be written (a
        full disk), that is logged and counted and training continues; a `required` one raises.
        """
        try:
            self._write(tau)
        except (CheckpointError, ConfigError, OSError) as error:
            if required:
                raise
            self.failed += 1
            log.error("no checkpoint of step %d: %s", self.position.progress.global_step, error)

    def metrics(self) -> dict[str, float]:
        return {"training/failed_checkpoints": self.failed}

    def _write(self, tau: float | None) -> None:
        progress = self.position.progress
        step, point = progress.global_step, (progress.global_step, len(progress.results))
        with self.clock.part("save_checkpoint"):
            if self.saved != point:
                directory = self.store.begin(step, checkpoint_bytes(self.trainers.draft_parameters))
                self.trainers.save(directory / "dcp")
                self.trainers.export(directory / "draft")
                self.store.commit(step, {**self.position.state(), "identity": self.identity})
                self.saved = point
            if tau is not None:
                self.store.mark_best(step, tau)
