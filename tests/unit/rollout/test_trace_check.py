"""Traces that explain their response, and those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from verl_opd.errors import RolloutError
from verl_opd.rollout.trace_check import TraceCheck

GOOD = [(1, [11, 99], [-2.0])]
RESPONSE = (10, 11, 12)


def test_a_trace_that_explains_its_response_is_kept():
    check = TraceCheck()
    assert len(check.explain("a", GOOD, RESPONSE).steps) == 1
    assert check.explain("b", [], ()).steps == ()
    assert check.stats() == {"responses": 2, "broken_traces": 0, "last_broken_trace": ""}


@pytest.mark.parametrize(
    "events",
    [
        [],  # lost
        [(0, [98, 99], [-1.0, -2.0])],  # one token short
        [(1, [77, 99], [-2.0])],  # accepted another token than the response holds
        [(1, [11, 99], [])],  # a rejected token without its log-prob
    ],
)
def test_a_trace_that_does_not_is_dropped_and_counted(events: list[Any]):
    check = TraceCheck()
    trace = check.explain("odd", events, RESPONSE)
    assert (trace.response_len, trace.steps) == (3, ())
    assert check.broken == 1
    assert "request odd" in check.last_broken


def test_more_than_a_twentieth_of_broken_traces_ends_the_run():
    check = TraceCheck()
    for index in range(98):
        check.explain(str(index), GOOD, RESPONSE)
    for _ in range(6):
        check.explain("odd", [], RESPONSE)  # 6 of 104 are within 1 + 5%
    with pytest.raises(
        RolloutError,
        match=r"7 of 105 verify traces do not explain their response; request last: .*position 1",
    ):
        check.explain("last", [], RESPONSE)
