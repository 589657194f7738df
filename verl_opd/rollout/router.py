"""Which server a request goes to: the one with the fewest outstanding requests, and always the same one for one session."""

from __future__ import annotations

from typing import Any

import ray


class Router:
    """Sessions stick to a server while they live, so that a multi-turn loop finds its prefix cached."""

    def __init__(self, servers: int) -> None:
        if servers < 1:
            raise ValueError(f"a router needs at least one server, got {servers}")
        self.outstanding = [0] * servers
        self._sessions: dict[str, int] = {}

    def acquire(self, session: str) -> int:
        """Index of the server for one more request of `session`; ties go to the lowest index."""
        server = self._sessions.setdefault(session, min(range(len(self.outstanding)), key=self.outstanding.__getitem__))
        self.outstanding[server] += 1
        return server

    def release(self, session: str, *, last: bool = True) -> None:
        """One request of `session` is done; `last` forgets the session. KeyError for a session that holds none."""
        self.outstanding[self._sessions[session]] -= 1
        if last:
            del self._sessions[session]


# Router as a Ray actor, shared by all agent loop workers.
RouterActor: Any = ray.remote(Router)
