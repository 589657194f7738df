"""Where time goes: wall seconds per named part, for one step and for the whole run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

WORKING = ("gen", "update_actor", "update_weights", "testing")


class Stopwatch:
    """Seconds per part since the last `lap`, and in total. Parts do not nest."""

    def __init__(self) -> None:
        self.total: dict[str, float] = {}
        self._lap: dict[str, float] = {}
        self._started = self._lap_started = time.monotonic()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            self.total[name] = self.total.get(name, 0.0) + seconds
            self._lap[name] = self._lap.get(name, 0.0) + seconds

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def lap(self) -> dict[str, float]:
        """timing_s/* since the last lap, with timing_s/step (all of it) and perf/idle_share: the
        share of that time in which neither engine nor trainer worked.
        """
        now = time.monotonic()
        step = now - self._lap_started
        busy = sum(self._lap.get(name, 0.0) for name in WORKING)
        values = {f"timing_s/{name}": seconds for name, seconds in self._lap.items()}
        values["timing_s/step"] = step
        values["perf/idle_share"] = max(0.0, 1.0 - busy / step) if step > 0 else 0.0
        self._lap, self._lap_started = {}, now
        return values
