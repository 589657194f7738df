"""What a run does when one of its processes dies, and when a signal stops it."""

from __future__ import annotations

import logging
import os
import signal
from types import FrameType
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
        """Take one restart and log its reason; RestartsExhausted when none is left."""
        if self.left <= 0:
            raise RestartsExhausted(
                f"{reason}, and trainer.max_restarts={self.allowed} are used up"
            )
        self.left -= 1
        log.warning(f"{reason}: starting again, {self.left} of {self.allowed} restarts left")


class Stopped(Exception):
    """The run received a stop signal and has written its checkpoint."""


def asked_to_stop(error: BaseException) -> bool:
    """Whether `error` stems from a stop signal: Stopped, or the SystemExit that Ray's own handler
    of SIGTERM raises during ray.init.
    """
    return isinstance(error, Stopped) or (
        isinstance(error, SystemExit) and error.code == signal.SIGTERM
    )


class StopSignal:
    """While entered, the first SIGINT or SIGTERM is only noted; the second interrupts at once."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self.asked = False

    def __enter__(self) -> StopSignal:
        self._before = {
            number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
        }
        self.arm()
        return self

    def arm(self) -> None:
        """Install the handlers, again where another has replaced them: ray.init does."""
        for number in self._before:
            signal.signal(number, self._note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        text = (
            f"{signal.Signals(number).name}: finishing this step, then a checkpoint; once more to "
            "stop at once\n"
        )
        # unbuffered: the interrupted code may hold the lock of any buffered stream
        os.write(2, text.encode())


def failure(server: Any) -> str:
    """Why an engine server cannot go on; empty when it can."""
    try:
        return str(ray.get(server.failure.remote(), timeout=_PING_SECONDS))
    except ray.exceptions.GetTimeoutError:
        return f"no answer in {_PING_SECONDS:.0f} s"
    except ray.exceptions.RayError as error:
        return first_line(error)


def death(rank: Any) -> str:
    """How a trainer rank ended; empty while it lives, however busy."""
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
