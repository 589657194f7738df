"""Stop signals: the first one lets a run finish its step, the second interrupts."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any


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
    """While entered, the first SIGINT or SIGTERM only sets `asked`; the second interrupts at
    once.
    """

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
            f"{signal.Signals(number).name}: finishing this step, then writing a checkpoint; a "
            "second signal stops at once\n"
        )
        # unbuffered: the interrupted code may hold the lock of any buffered stream
        os.write(2, text.encode())
