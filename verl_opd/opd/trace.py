"""What the engine did with the draft's proposals: verify steps, traces and rollout samples (plain records)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VerifyStep:
    """One verification of one drafted block.

    anchor: response position (0-based; 0 = the token sampled by prefill) of the block's first, already known token.
    drafted: the K proposed token ids; proposal j (1-based offset) stands at response position anchor + j.
    accepted: a, how many leading proposals the target accepted (0 <= a <= K).
    committed: tokens that entered the response, a + 1 (correction or bonus included) unless the response ended inside the block.
    refused_logprobs: natural-log target probability of every refused proposal drafted[a:], conditioned on the draft's own prefix.
    """

    anchor: int
    drafted: tuple[int, ...]
    accepted: int
    committed: int
    refused_logprobs: tuple[float, ...]

    @property
    def refused(self) -> tuple[int, ...]:
        return self.drafted[self.accepted :]


@dataclass(frozen=True)
class VerifyTrace:
    """The verify steps of one response, in order, plus the response positions committed by draft-free decode steps."""

    response_len: int
    steps: tuple[VerifyStep, ...]
    draft_free: tuple[int, ...] = ()


@dataclass(frozen=True)
class RolloutSample:
    """One finished response and how it was drafted.

    sample_id: stable name of the data row and epoch, "<epoch>-<row>"; draft_version: version of the draft that proposed the blocks;
    finish_reason: stop | length | abort, as the engine reports it.
    """

    sample_id: str
    data_source: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    trace: VerifyTrace
    draft_version: int
    finish_reason: str


# One verify step as the engine records it: (accepted, drafted token ids, target log-probs of the refused ones); (0, [], []) = draft-free step.
Event = tuple[int, Sequence[int], Sequence[float]]


@dataclass(frozen=True)
class Refusal:
    """One refused proposal: block anchor, 1-based offset in the block, token id, target log-prob on the draft's own prefix."""

    anchor: int
    offset: int
    token: int
    logprob: float


def trace_from_events(events: Iterable[Event], response_len: int) -> VerifyTrace:
    """Replay the engine's events from the prefill token (position 0) on, clipped where the response ended.

    The engine may verify past the end (EOS inside an accepted prefix, one over-scheduled step): such a step commits only what the response
    holds, and steps that start at or after the last token are dropped.
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


def refusals(trace: VerifyTrace) -> list[Refusal]:
    """All refused proposals, first and suffix, of the steps that reached their rejection point before the response ended."""
    return [
        Refusal(step.anchor, step.accepted + 1 + index, token, logprob)
        for step in trace.steps
        if step.committed == step.accepted + 1
        for index, (token, logprob) in enumerate(zip(step.refused, step.refused_logprobs, strict=True))
    ]


def accept_length(trace: VerifyTrace) -> float | None:
    """tau: tokens committed by verify steps / verify steps (bonus counted); None without any verify step."""
    return sum(step.committed for step in trace.steps) / len(trace.steps) if trace.steps else None


def check_trace(trace: VerifyTrace, response_ids: Sequence[int]) -> None:
    """ValueError unless `trace` explains every token of the response after the prefill token."""
    if trace.response_len != len(response_ids):
        raise ValueError(f"trace of {trace.response_len} tokens belongs to another response of {len(response_ids)} tokens")
    covered = sorted([*trace.draft_free, *(step.anchor + j for step in trace.steps for j in range(1, step.committed + 1))])
    if covered != list(range(1, len(response_ids))):
        raise ValueError(f"trace covers {len(covered)} response positions ({covered[:5]}...), expected 1..{len(response_ids) - 1}")
    for step in trace.steps:
        for j in range(1, min(step.accepted, step.committed) + 1):
            if step.drafted[j - 1] != response_ids[step.anchor + j]:
                raise ValueError(
                    f"accepted proposal {j} of the block anchored at {step.anchor} is token {step.drafted[j - 1]}, "
                    f"but the response holds {response_ids[step.anchor + j]} there"
                )


_STEP_KEYS = ("dflash_replay_block_anchor_indices", "dflash_replay_block_accepted_lengths", "dflash_replay_block_drafted_lengths")
_REFUSAL_KEYS = (
    "dflash_rejected_draft_anchor_indices",
    "dflash_rejected_draft_token_indices",
    "dflash_rejected_draft_offsets",
    "dflash_rejected_draft_token_ids",
    "dflash_rejected_draft_teacher_logprobs",
)


def to_extra_fields(trace: VerifyTrace) -> dict[str, Any]:
    """The wire form of a trace: the `dflash_*` extra fields of a sample.

    `dflash_reject_token_indices` holds *every* verify-step end (the name is historical). The `rejected_draft` lists hold one entry per refused
    proposal, suffix included: block anchor, its own response position (anchor + offset), offset, token, target log-prob. The
    `replay_block` lists describe every block, its drafted tokens and the log-probs of its refused tail flattened. All keys are always there.
    """
    refused = refusals(trace)
    ends = boundaries(trace)
    return {
        "dflash_reject_token_indices": ends,
        _REFUSAL_KEYS[0]: [item.anchor for item in refused],
        _REFUSAL_KEYS[1]: [item.anchor + item.offset for item in refused],
        _REFUSAL_KEYS[2]: [item.offset for item in refused],
        _REFUSAL_KEYS[3]: [item.token for item in refused],
        _REFUSAL_KEYS[4]: [item.logprob for item in refused],
        _STEP_KEYS[0]: [step.anchor for step in trace.steps],
        _STEP_KEYS[1]: [step.accepted for step in trace.steps],
        _STEP_KEYS[2]: [len(step.drafted) for step in trace.steps],
        "dflash_replay_block_drafted_token_ids": [token for step in trace.steps for token in step.drafted],
        "dflash_replay_block_refused_logprobs": [value for step in trace.steps for value in step.refused_logprobs],
        "dflash_draft_free_token_indices": list(trace.draft_free),
        "dflash_reject_token_count": len(ends),
        "dflash_non_reject_token_count": trace.response_len - len(ends),
        "dflash_empty_reject_token_indices": int(trace.response_len > 0 and not ends),
        "dflash_num_verify_steps": len(trace.steps),
        "dflash_accept_length": accept_length(trace) or 0.0,
    }


def from_extra_fields(fields: Mapping[str, Any], response_len: int) -> VerifyTrace:
    """Invert `to_extra_fields`; ValueError names the keys that are missing or whose lengths disagree."""
    needed = (*_STEP_KEYS, "dflash_replay_block_drafted_token_ids", "dflash_replay_block_refused_logprobs", "dflash_draft_free_token_indices")
    missing = [key for key in needed if key not in fields]
    if missing:
        raise ValueError(f"extra fields lack {', '.join(missing)}")
    for group in (_STEP_KEYS, tuple(key for key in _REFUSAL_KEYS if key in fields)):
        lengths = {key: len(fields[key]) for key in group}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"parallel lists of different lengths: {lengths}")
    anchors, accepted, drafted = (list(fields[key]) for key in _STEP_KEYS)
    expected = {
        "dflash_replay_block_drafted_token_ids": sum(drafted),
        "dflash_replay_block_refused_logprobs": sum(drafted) - sum(accepted),
    }
    for key, count in expected.items():
        if len(fields[key]) != count:
            raise ValueError(f"{key} holds {len(fields[key])} entries, but the block lengths add up to {count}")
    tokens, values = iter(fields["dflash_replay_block_drafted_token_ids"]), iter(fields["dflash_replay_block_refused_logprobs"])
    steps = tuple(
        VerifyStep(
            anchor=anchor,
            drafted=tuple(next(tokens) for _ in range(count)),
            accepted=hits,
            committed=min(hits + 1, response_len - 1 - anchor),
            refused_logprobs=tuple(next(values) for _ in range(count - hits)),
        )
        for anchor, hits, count in zip(anchors, accepted, drafted, strict=True)
    )
    return VerifyTrace(response_len, steps, tuple(fields["dflash_draft_free_token_indices"]))
