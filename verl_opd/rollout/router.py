"""Chooses the server of a request: the one with the fewest outstanding requests, and always the
same one for one session.
"""

from __future__ import annotations

from typing import Any

import ray


class Router:
    """Sessions stick to a server until they are closed, so that a multi-turn loop finds its prefix
    cached.
    """

    def __init__(self, servers: int) -> None:
        if servers < 1:
            raise ValueError(f"a router needs at least one server, got {servers}")
        self.outstanding = [0] * servers
        self._sessions: dict[str, int] = {}

    def acquire(self, session: str) -> int:
        """Index of the server for one more request of `session`; ties go to the lowest index."""
        server = self._sessions.setdefault(
            session, min(range(len(self.outstanding)), key=self.outstanding.__getitem__)
        )
        self.outstanding[server] += 1
        return server

    def release(self, session: str) -> None:
        """One request of `session` is done; the session keeps its server. KeyError for a session
        that is not open.
        """
        self.outstanding[self._sessions[session]] -= 1

    def reset(self) -> None:
        """Forget everything. Called when nothing is in flight: agent loops that died never released
        their requests.
        """
        self.outstanding = [0] * len(self.outstanding)
        self._sessions.clear()

    def close(self, session: str) -> None:
        """Forget `session`, whether or not it ever acquired a server."""
        self._sessions.pop(session, None)


# Router as a Ray actor, shared by all agent loop workers.
RouterActor: Any = ray.remote(Router)
