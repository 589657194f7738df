"""What the engine did with the draft's proposals: verify steps, traces and rollout samples (plain
records).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np


@dataclass(frozen=True)
class VerifyStep:
    """One verification of one drafted block.

    anchor: response position (0-based; 0 = the token sampled by prefill) of the block's first,
    already known token. drafted: the K proposed token ids; proposal j (1-based offset) stands at
    response position anchor + j. accepted: a, how many leading proposals the target accepted (0 <=
    a <= K). committed: tokens that entered the response, a + 1 (correction or bonus included)
    unless the response ended inside the block. rejected_logprobs: natural-log target probability of
    every rejected proposal drafted[a:], conditioned on the draft's own prefix.
    """

    anchor: int
    drafted: tuple[int, ...]
    accepted: int
    committed: int
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
    """The verify steps of one response, in order, plus the response positions committed by
    draft-free decode steps.
    """

    response_len: int
    steps: tuple[VerifyStep, ...]
    draft_free: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class TeacherScores:
    """What a teacher server says about one response of R tokens, each given the prompt and all
    tokens before it; natural logarithms.

    logprobs [R] float32: of the response's own tokens. top_ids [R, k] int32 and top_logprobs [R, k]
    float32: of the k most likely ones, best first; k is 0 when nobody asked for them. ValueError
    when the shapes disagree.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
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


@dataclass(frozen=True)
class RolloutSample:
    """One finished response and how it was drafted.

    sample_id: stable name of the data row and epoch, "<epoch>-<row>"; draft_version: version of the
    draft that proposed the blocks; finish_reason: stop | length | abort, as the engine reports it;
    teacher: its scores when a teacher server was asked. supervised: per response token, whether the
    target would have generated it, for text that was given (a conversation); None = all of them.
    """

    sample_id: str
    data_source: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    trace: VerifyTrace
    draft_version: int
    finish_reason: str
    teacher: TeacherScores | None = None
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
    """One rejected proposal: block anchor, 1-based offset in the block, token id, target log-prob
    on the draft's own prefix.
    """

    anchor: int
    offset: int
    token: int
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
    with the accepted proposals' ids, and no rejected proposal as its own replacement: exact
    verification never does that (a token is rejected only where draft probability exceeds the
    target's, and the replacement is drawn from what the target has more of), so the rollout would
    be off the target's distribution.
    """
    if trace.response_len != len(response_ids):
        raise ValueError(
            f"trace of {trace.response_len} tokens belongs to another response of "
            f"{len(response_ids)} tokens"
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


def to_extra_fields(trace: VerifyTrace) -> dict[str, Any]:
    """The wire form of a trace: the `dflash_*` extra fields of a sample, lists and numbers only.
    All keys are always there.

    dflash_reject_token_indices: the end of *every* verify step (the name is historical);
    dflash_reject_token_count counts them, and dflash_empty_reject_token_indices is 1 when a
    response has none. dflash_rejected_draft_*: one entry per rejected proposal, suffix included:
    anchor of its block, its own response position anchor + offset (in the suffix possibly past the
    end), offset, token, target log-prob. dflash_replay_block_*: every block, its drafted tokens and
    the log-probs of its rejected ones flattened. A trace is rebuilt from these.
    dflash_draft_free_token_indices: positions committed without drafting. dflash_accept_length:
    tau, 0 without verify steps.
    """
    rejected, ends = rejections(trace), boundaries(trace)
    return {
        "dflash_reject_token_indices": ends,
        "dflash_rejected_draft_anchor_indices": [item.anchor for item in rejected],
        "dflash_rejected_draft_token_indices": [item.anchor + item.offset for item in rejected],
        "dflash_rejected_draft_offsets": [item.offset for item in rejected],
        "dflash_rejected_draft_token_ids": [item.token for item in rejected],
        "dflash_rejected_draft_teacher_logprobs": [item.logprob for item in rejected],
        "dflash_replay_block_anchor_indices": [step.anchor for step in trace.steps],
        "dflash_replay_block_accepted_lengths": [step.accepted for step in trace.steps],
        "dflash_replay_block_drafted_lengths": [len(step.drafted) for step in trace.steps],
        "dflash_replay_block_drafted_token_ids": [
            token for step in trace.steps for token in step.drafted
        ],
        "dflash_replay_block_refused_logprobs": [
            value for step in trace.steps for value in step.rejected_logprobs
        ],
        "dflash_draft_free_token_indices": list(trace.draft_free),
        "dflash_reject_token_count": len(ends),
        "dflash_non_reject_token_count": trace.response_len - len(ends),
        "dflash_empty_reject_token_indices": int(trace.response_len > 0 and not ends),
        "dflash_num_verify_steps": len(trace.steps),
        "dflash_accept_length": accept_length(trace) or 0.0,
    }


_ALL_KEYS = tuple(to_extra_fields(VerifyTrace(0, ())))
_REFUSAL_KEYS = tuple(key for key in _ALL_KEYS if key.startswith("dflash_rejected_draft_"))
_BLOCK_KEYS = (
    "dflash_replay_block_anchor_indices",
    "dflash_replay_block_accepted_lengths",
    "dflash_replay_block_drafted_lengths",
)


def from_extra_fields(fields: Mapping[str, Any], response_len: int) -> VerifyTrace:
    """Invert `to_extra_fields`; ValueError names the keys that are missing or whose lengths
    disagree.
    """
    missing = [key for key in _ALL_KEYS if key not in fields]
    if missing:
        raise ValueError(f"extra fields lack {', '.join(missing)}")
    for group in (_BLOCK_KEYS, _REFUSAL_KEYS):
        lengths = {key: len(fields[key]) for key in group}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"parallel lists of different lengths: {lengths}")
    anchors, accepted, drafted = (fields[key] for key in _BLOCK_KEYS)
    tokens, logprobs = (
        fields["dflash_replay_block_drafted_token_ids"],
        fields["dflash_replay_block_refused_logprobs"],
    )
    if len(tokens) != sum(drafted) or len(logprobs) != sum(drafted) - sum(accepted):
        raise ValueError(
            f"dflash_replay_block_drafted_token_ids has {len(tokens)} and "
            f"dflash_replay_block_refused_logprobs {len(logprobs)} entries, "
            f"but blocks of {sum(drafted)} proposals with {sum(accepted)} accepted were announced"
        )
    steps, token, logprob = [], 0, 0
    for anchor, hits, count in zip(anchors, accepted, drafted, strict=True):
        committed = min(hits + 1, response_len - 1 - anchor)
        rejected = tuple(logprobs[logprob : logprob + count - hits])
        steps.append(
            VerifyStep(anchor, tuple(tokens[token : token + count]), hits, committed, rejected)
        )
        token, logprob = token + count, logprob + count - hits
    return VerifyTrace(response_len, tuple(steps), tuple(fields["dflash_draft_free_token_indices"]))
