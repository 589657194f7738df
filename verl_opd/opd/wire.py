"""The wire form of a verify trace: the `dflash_*` extra fields of a sample, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_opd.opd.trace import VerifyStep, VerifyTrace, accept_length, boundaries, rejections


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
_REJECTION_KEYS = tuple(key for key in _ALL_KEYS if key.startswith("dflash_rejected_draft_"))
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
    for group in (_BLOCK_KEYS, _REJECTION_KEYS):
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
            f"but the blocks have {sum(drafted)} proposals, {sum(accepted)} of them accepted"
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
