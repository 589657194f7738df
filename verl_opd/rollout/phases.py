"""The order in which one rollout replica sleeps, receives weights and wakes. Any other order is
an error.
"""

from __future__ import annotations

from enum import Enum


class Phase(str, Enum):
    """What a replica is ready for."""

    ROLLOUT = "rollout"  # awake, serving requests
    ASLEEP = "asleep"  # memory released (or only paused, where the device cannot release it)
    WEIGHTS = "weights"  # weights mapped again, no KV cache
    SYNCED = "synced"  # draft pushed and read back
    KV_CACHE = "kv_cache"  # KV cache mapped, still holding entries of the old draft


_TRANSITIONS = {
    ("sleep", Phase.ROLLOUT): Phase.ASLEEP,
    ("wake_weights", Phase.ASLEEP): Phase.WEIGHTS,
    ("sync", Phase.WEIGHTS): Phase.SYNCED,
    ("wake_kv_cache", Phase.SYNCED): Phase.KV_CACHE,
    ("reset_prefix_cache", Phase.KV_CACHE): Phase.ROLLOUT,
}


class PhaseMachine:
    """The phase of one replica.

    `advance(action)` is called before the action is sent; RuntimeError names the replica, its phase
    and the actions that are allowed in it.
    """

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.phase = Phase.ROLLOUT

    def advance(self, action: str) -> None:
        following = _TRANSITIONS.get((action, self.phase))
        if following is None:
            allowed = [name for name, phase in _TRANSITIONS if phase is self.phase]
            raise RuntimeError(
                f"replica {self.replica} is in phase {self.phase.value!r}: {action!r} is out of "
                f"order, expected {allowed}"
            )
        self.phase = following

    def require_rollout(self) -> None:
        if self.phase is not Phase.ROLLOUT:
            raise RuntimeError(
                f"replica {self.replica} cannot generate in phase {self.phase.value!r}"
            )
