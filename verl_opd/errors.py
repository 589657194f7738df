"""Errors a user can act on."""


class ConfigError(ValueError):
    """A configuration, data or model problem found before anything expensive starts; the CLI prints it on one line and exits 2."""


class WeightSyncError(RuntimeError):
    """The engine does not hold the draft that was pushed to it."""


class WorkerDied(RuntimeError):
    """A process of the run is gone; the run can go on from its last checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those before it are untouched."""


class ReplayError(RuntimeError):
    """Training does not replay what the engine drafted."""


class RolloutError(RuntimeError):
    """The engine could not start, or failed while generating."""
