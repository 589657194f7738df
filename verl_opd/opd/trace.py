"""What the engine did with the draft's proposals: verify steps, traces and rollout samples (plain
records).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np


@dataclass(frozen=True)
class VerifyStep:
    """One verification of one drafted block."""

    # response position (0-based; 0 = the token sampled by prefill) of the block's first token,
    # which is known before drafting
    anchor: int
    # the K proposed token ids; proposal j (1-based offset) is for response position anchor + j
    drafted: tuple[int, ...]
    # a, how many leading proposals the target accepted (0 <= a <= K)
    accepted: int
    # tokens that entered the response: a + 1 (correction or bonus included) unless the response
    # ended inside the block
    committed: int
    # natural-log target probability of every rejected proposal drafted[a:], conditioned on the
    # draft's own prefix
    rejected_logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        drafted, scored = len(self.drafted), len(self.rejected_logprobs)
        counts_fit = 0 <= self.accepted <= drafted and 1 <= self.committed <= self.accepted + 1
        if not (drafted and counts_fit and scored == drafted - self.accepted):
            raise ValueError(
                f"impossible verify step at anchor {self.anchor}: {drafted} drafted, "
                f"{self.accepted} accepted, {self.committed} committed, "
                f"{scored} log-probs of rejected tokens"
            )

    @property
    def rejected(self) -> tuple[int, ...]:
        return self.drafted[self.accepted :]


@dataclass(frozen=True)
class VerifyTrace:
    """How one response was verified."""

    # R, tokens of the response
    response_len: int
    # in order
    steps: tuple[VerifyStep, ...]
    # response positions committed by decode steps without a draft
    draft_free: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class TeacherScores:
    """A teacher server's scores of one response of R tokens, each token given the prompt and all
    tokens before it; natural logarithms. ValueError when the shapes disagree.
    """

    # [R] float32: of the response's own tokens
    logprobs: np.ndarray
    # [R, k] int32: the k most likely tokens, best first; k = 0 when they were not requested
    top_ids: np.ndarray
    # [R, k] float32: of top_ids
    top_logprobs: np.ndarray

    def __post_init__(self) -> None:
        if (
            self.logprobs.ndim != 1
            or self.top_ids.shape != self.top_logprobs.shape
            or self.top_ids.shape[:1] != self.logprobs.shape
        ):
            raise ValueError(
                f"teacher scores of shapes {self.logprobs.shape}, {self.top_ids.shape} and "
                f"{self.top_logprobs.shape} do not belong together"
            )


@dataclass(frozen=True, kw_only=True)
class RolloutSample:
    """One finished response and how it was drafted."""

    # stable name of the data row and epoch, "<epoch>-<row>"
    sample_id: str
    # which benchmark or data set the row belongs to
    data_source: str
    # token ids [P]
    prompt_ids: tuple[int, ...]
    # token ids [R]
    response_ids: tuple[int, ...]
    trace: VerifyTrace
    # version of the draft that proposed the blocks
    draft_version: int
    # stop | length | abort, as the engine reports it
    finish_reason: str
    # scores of a teacher server, in runs that have one
    teacher: TeacherScores | None = None
    # per response token, whether the target would have generated it, for text that was given (a
    # conversation); None = all of them
    supervised: tuple[bool, ...] | None = None


def is_finite(sample: RolloutSample) -> bool:
    """Whether every log-prob of `sample` is a number; minus infinity, an impossible
    token, is one.
    """
    parts = [np.array([value for step in sample.trace.steps for value in step.rejected_logprobs])]
    if sample.teacher is not None:
        parts += [sample.teacher.logprobs, sample.teacher.top_logprobs]
    return all(bool((part < np.inf).all()) for part in parts)  # a NaN is not below anything


# What the engine records of one decode step: (accepted, drafted token ids, target log-probs of the
# rejected ones); (0, [], []) = draft-free.
Event = tuple[int, Sequence[int], Sequence[float]]


@dataclass(frozen=True)
class Rejection:
    """One rejected proposal."""

    # response position of its block's anchor
    anchor: int
    # 1-based place in the block
    offset: int
    # token id
    token: int
    # the target's, on the draft's own prefix
    logprob: float


def trace_from_events(events: Iterable[Event], response_len: int) -> VerifyTrace:
    """Replay the engine's events from the prefill token (position 0) on, clipped where the response
    ended.

    The engine may verify past the end (EOS inside an accepted prefix, one over-scheduled step):
    such a step commits only what the response holds, and steps that start at or after the last
    token are dropped. ValueError for an event whose lists do not fit each other.
    """
    anchor, steps, draft_free = 0, [], []
    for accepted, drafted, logprobs in events:
        room = response_len - 1 - anchor
        if room <= 0:
            break
        if not drafted:
            anchor += 1
            draft_free.append(anchor)
            continue
        committed = min(accepted + 1, room)
        steps.append(VerifyStep(anchor, tuple(drafted), accepted, committed, tuple(logprobs)))
        anchor += accepted + 1
    return VerifyTrace(response_len, tuple(steps), tuple(draft_free))


def boundaries(trace: VerifyTrace) -> list[int]:
    """Response position of the last committed token of every verify step."""
    return [step.anchor + step.committed for step in trace.steps]


def rejections(trace: VerifyTrace) -> list[Rejection]:
    """All rejected proposals, first and suffix, of the steps that reached their rejection point
    before the response ended.
    """
    return [
        Rejection(step.anchor, step.accepted + 1 + index, token, logprob)
        for step in trace.steps
        if step.committed == step.accepted + 1
        for index, (token, logprob) in enumerate(
            zip(step.rejected, step.rejected_logprobs, strict=True)
        )
    ]


def accept_length(trace: VerifyTrace) -> float | None:
    """tau: tokens committed by verify steps / verify steps (bonus counted); None without any verify
    step.
    """
    return sum(step.committed for step in trace.steps) / len(trace.steps) if trace.steps else None


def accepted_by_position(steps: Sequence[VerifyStep]) -> tuple[int, ...]:
    """How many of `steps` accepted proposal k, for k = 1..K (index k - 1), whether or not the
    response ended before it.
    """
    width = max((len(step.drafted) for step in steps), default=0)
    return tuple(sum(step.accepted >= k for step in steps) for k in range(1, width + 1))


def check_trace(trace: VerifyTrace, response_ids: Sequence[int]) -> None:
    """ValueError unless `trace` commits every response token after the prefill token exactly once,
    with the accepted proposals' ids, and replaces no rejected proposal by itself.

    Exact verification never does the latter: it rejects a token only where the draft's probability
    exceeds the target's, and draws the replacement where the target's exceeds the draft's. Such a
    rollout would not follow the target's distribution.
    """
    if trace.response_len != len(response_ids):
        raise ValueError(
            f"the trace covers {trace.response_len} tokens and the response has "
            f"{len(response_ids)}: they do not belong together"
        )
    committed = [step.anchor + j for step in trace.steps for j in range(1, step.committed + 1)]
    for expected, position in zip_longest(
        range(1, len(response_ids)), sorted([*trace.draft_free, *committed])
    ):
        if expected != position:
            where = f"commits response position {position}" if position is not None else "ends"
            raise ValueError(
                f"trace {where} where position {expected} of {len(response_ids)} should follow"
            )
    for step in trace.steps:
        for j, token in enumerate(step.drafted[: min(step.accepted, step.committed)], start=1):
            if token != response_ids[step.anchor + j]:
                raise ValueError(
                    f"accepted proposal {j} of the block anchored at {step.anchor} is token "
                    f"{token}, "
                    f"but the response holds {response_ids[step.anchor + j]} at position "
                    f"{step.anchor + j}"
                )
        end = step.anchor + step.accepted + 1
        if (
            step.committed == step.accepted + 1
            and step.rejected
            and step.rejected[0] == response_ids[end]
        ):
            raise ValueError(
                f"proposal {step.accepted + 1} of the block anchored at {step.anchor} was rejected "
                f"and replaced by itself (token {response_ids[end]}): "
                "the engine does not verify exactly"
            )
