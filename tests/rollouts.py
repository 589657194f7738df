"""Rollout samples for tests: the documented worked example, and random ones with their ground
truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from verl_opd.opd.trace import Event, RolloutSample, trace_from_events

# Property tests on a machine that is busy with other things: no example may fail for being slow.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Three proposals per step (B = 4), prefill token at 0. Step 1 at anchor 0 accepts 1, step 2 at
# anchor 2 accepts all 3, step 3 at anchor 6 accepts none.
WORKED_RESPONSE = (10, 11, 12, 13, 14, 15, 16, 17)
WORKED_EVENTS: list[Event] = [
    (1, [11, 902, 903], [-2.5, -3.5]),
    (3, [13, 14, 15], []),
    (0, [931, 932, 933], [-4.0, -5.0, -6.0]),
]


def make_sample(
    events: Sequence[Event],
    response: Sequence[int],
    prompt: Sequence[int] = (1, 2, 3, 4, 5),
    sample_id: str = "0-0",
) -> RolloutSample:
    trace = trace_from_events(events, len(response))
    return RolloutSample(
        sample_id=sample_id,
        data_source="test",
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        trace=trace,
        draft_version=0,
        finish_reason="stop",
    )


def worked_sample() -> RolloutSample:
    return make_sample(WORKED_EVENTS, WORKED_RESPONSE)


@dataclass(frozen=True)
class Rollout:
    """A simulated response. spans: (anchor, accepted, end before clipping) of every step the engine
    ran, the ones past the end too.
    """

    sample: RolloutSample
    num_drafts: int
    spans: tuple[tuple[int, int, int], ...]
    draft_free: frozenset[int]

    @property
    def length(self) -> int:
        return len(self.sample.response_ids)


@st.composite
def rollouts(draw: st.DrawFn, sample_id: str = "0-0") -> Rollout:
    """Steps of K proposals with any number accepted, draft-free steps in between, the response cut
    anywhere (EOS inside a block).
    """
    count = draw(st.integers(1, 5))
    steps = draw(st.lists(st.none() | st.integers(0, count), max_size=8))
    events: list[Event] = []
    response, spans, draft_free = [100], [], set()
    for accepted in steps:
        anchor = len(response) - 1
        if accepted is None:
            events.append((0, [], []))
            draft_free.add(anchor + 1)
            response.append(100 + anchor + 1)
            continue
        right = [100 + anchor + j for j in range(1, accepted + 1)]
        wrong = [900 + anchor + j for j in range(accepted + 1, count + 1)]
        events.append((accepted, right + wrong, [-0.5 * (i + 1) for i in range(len(wrong))]))
        response.extend([*right, 100 + anchor + accepted + 1])
        spans.append((anchor, accepted, anchor + accepted + 1))
    cut = draw(st.integers(1, len(response)))
    prompt = range(1, draw(st.integers(1, 6)) + 1)
    sample = make_sample(events, response[:cut], prompt, sample_id)
    return Rollout(
        sample,
        count,
        tuple(spans),
        frozenset(position for position in draft_free if position < cut),
    )
