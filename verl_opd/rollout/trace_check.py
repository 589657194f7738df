"""The check that a verify trace explains its response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_opd.errors import RolloutError
from verl_opd.opd.trace import VerifyTrace, check_trace, trace_from_events

_BROKEN_SHARE = 0.05


class TraceCheck:
    """Compares every trace with its response. A trace that does not explain it is dropped and
    counted; too many of them end the run.
    """

    def __init__(self) -> None:
        self.responses = 0
        self.broken = 0
        self.last_broken = ""

    def explain(
        self, request_id: str, events: Sequence[Any], token_ids: Sequence[int]
    ) -> VerifyTrace:
        """The verified trace of a response, or an empty one. RolloutError once more than
        _BROKEN_SHARE of the responses are unexplained.
        """
        self.responses += 1
        try:
            trace = trace_from_events(events, len(token_ids))
            check_trace(trace, token_ids)
        except ValueError as error:
            self.broken += 1
            self.last_broken = f"request {request_id}: {error}"
            if self.broken > 1 + _BROKEN_SHARE * self.responses:
                raise RolloutError(
                    f"{self.broken} of {self.responses} verify traces do not explain their "
                    f"response; {self.last_broken}"
                ) from error
            return VerifyTrace(len(token_ids), ())
        return trace

    def stats(self) -> dict[str, Any]:
        return {
            "responses": self.responses,
            "broken_traces": self.broken,
            "last_broken_trace": self.last_broken,
        }
