"""What a run does when one of its processes dies, and when a signal stops it."""

from __future__ import annotations

import logging
from typing import Any

import ray

from verl_opd.errors import RestartsExhausted

log = logging.getLogger(__name__)
_PING_SECONDS = 30.0


class Restarts:
    """The budget of trainer.max_restarts: every process that is replaced costs one."""

    def __init__(self, allowed: int) -> None:
        self.allowed = self.left = allowed

    def spend(self, reason: str) -> None:
        """Use up one restart and log its reason; RestartsExhausted when none is left."""
        if self.left <= 0:
            raise RestartsExhausted(f"{reason}, and trainer.max_restarts={self.allowed} is used up")
        self.left -= 1
        log.warning(f"{reason}: starting again, {self.left} of {self.allowed} restarts left")


def failure(server: Any) -> str:
    """Why a server cannot continue; empty when it can."""
    try:
        return str(ray.get(server.failure.remote(), timeout=_PING_SECONDS))
    except ray.exceptions.GetTimeoutError:
        return f"no answer in {_PING_SECONDS:.0f} s"
    except ray.exceptions.RayError as error:
        return first_line(error)


def death(rank: Any) -> str:
    """How a trainer rank ended; empty while it runs, also when it is too busy to answer."""
    try:
        ray.get(rank.ping.remote(), timeout=_PING_SECONDS)
    except ray.exceptions.GetTimeoutError:
        return ""
    except ray.exceptions.RayActorError as error:
        return first_line(error)
    return ""


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
