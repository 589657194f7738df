"""Errors that a user can act on, and what checks of a machine report. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


class ConfigError(ValueError):
    """A configuration, data or model problem found before anything expensive starts; the CLI prints
    it on one line and exits 2.
    """


class HubUnreachable(ConfigError):
    """A model is neither a local directory nor a hub repository that can be read from here."""


class RunError(RuntimeError):
    """A run failed for a reason that its message explains; the CLI prints it without a traceback
    and exits 1.
    """


class WeightSyncError(RunError):
    """The engine does not hold the draft that was sent to it."""


class WorkerDied(RunError):
    """A process of the run is gone; the run can continue from its last checkpoint."""


class RestartsExhausted(WorkerDied):
    """A process of the run is gone, and trainer.max_restarts allows no other in its place."""


class CheckpointError(RunError):
    """A checkpoint could not be written; those before it are untouched."""


class ReplayError(RunError):
    """Training does not reproduce what the engine drafted."""


class RolloutError(RunError):
    """The engine could not start, or failed while generating."""


@dataclass(frozen=True)
class Finding:
    """The result of one check of a machine or an installation."""

    what: str  # what was checked
    level: str  # ok | note (worth knowing, but not an error) | error
    seen: str  # what was found
    remedy: str = ""  # what to do about a note or an error
