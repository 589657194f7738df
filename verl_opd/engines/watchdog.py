"""Whether an engine still moves, told by the tokens it computes and not by the clock alone."""

from __future__ import annotations

import time


class TokenProgress:
    """When the engine last computed a token for anybody: of a response, or of a prompt, whose
    chunks show in how full the KV cache is.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.cache_usage = 0.0

    def moved(self) -> None:
        self._last = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self._last
