"""Errors a user can act on."""


class ConfigError(ValueError):
    """A configuration, data or model problem found before anything expensive starts; the CLI prints
    it on one line and exits 2.
    """


class RunError(RuntimeError):
    """Something went wrong in a run that only its message has to explain; the CLI prints it without
    a traceback and exits 1.
    """


class WeightSyncError(RunError):
    """The engine does not hold the draft that was pushed to it."""


class WorkerDied(RunError):
    """A process of the run is gone; the run can go on from its last checkpoint."""


class RestartsExhausted(WorkerDied):
    """A process of the run is gone, and trainer.max_restarts allows no other in its place."""


class CheckpointError(RunError):
    """A checkpoint could not be written; those before it are untouched."""


class ReplayError(RunError):
    """Training does not replay what the engine drafted."""


class RolloutError(RunError):
    """The engine could not start, or failed while generating."""
