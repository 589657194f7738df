"""The one place for token alignment: from samples and block plans to padded tensors.

Full-sequence index of response position r is P + r (prompt length P). A block anchored at full
index F has B slots; slot j (0 = the anchor itself) has position id F + j and predicts the token at
F + j: no shift inside a block. The target scores that same token with its row F + j - 1, as every
causal language model does. The block's context is the target features of positions strictly before
F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from verl_opd.opd.plan import TrainItem, verified_proposals
from verl_opd.opd.trace import TeacherScores


def full_anchor(prompt_len: int, anchor: int) -> int:
    """Full-sequence index of a response position; -1 is the last prompt token. ValueError below
    that.
    """
    if anchor < -1:
        raise ValueError(f"anchor {anchor} lies before the last prompt token")
    return prompt_len + anchor


_no_floats = partial(torch.zeros, 0)
_no_ids = partial(torch.zeros, 0, dtype=torch.long)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Slots of one loss stream, flat over the micro-batch: M entries, int64 unless noted."""

    # [M], row of the micro-batch
    sample: Tensor
    # [M], n*B + j: index into the sample's N*B draft slots
    slot: Tensor
    # [M], token id; in the verified stream 1 where the target accepted the proposal, else 0
    token: Tensor
    # [M], j, 1-based
    offset: Tensor
    # response stream [M]: which of the sample's S target rows scores the same token; else empty
    target_row: Tensor = field(default_factory=_no_ids)
    # float32 [M]. response stream: from a teacher server, else empty. rejected stream: as the
    # engine recorded it, conditioned on the draft's own prefix. Other streams: empty
    teacher_logprob: Tensor = field(default_factory=_no_floats)


@dataclass(frozen=True)
class TeacherTop:
    """A teacher server's most likely tokens, parallel to the response stream; k = 0 without one."""

    # [M, k] int64, best first
    ids: Tensor = field(default_factory=partial(torch.zeros, 0, 0, dtype=torch.long))
    # [M, k] float32
    logprobs: Tensor = field(default_factory=partial(torch.zeros, 0, 0))


@dataclass(frozen=True)
class PolicyTerms:
    """Terms of the policy-gradient form, parallel to the response stream."""

    # [M] float32, as TrainItem.old_logprobs; empty when the items have none
    old_logprob: Tensor = field(default_factory=_no_floats)
    # [M] float32, as TrainItem.reward
    reward: Tensor = field(default_factory=_no_floats)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A padded micro-batch of b samples."""

    # [b, S] int64, right-padded with 0
    input_ids: Tensor
    # [b] int64, true lengths
    lengths: Tensor
    # [b, N] int64, full-sequence indices; 0 where padded
    anchors: Tensor
    # [b, N] bool, False where padded
    block_keep: Tensor
    # [b, N, B] int64, the anchor token, then the engine's proposals; in a block that no engine
    # drafted, then the response's own tokens (0 past its end)
    block_tokens: Tensor
    # B
    block_size: int
    # committed tokens, supervised by the target
    response: Stream
    # rejected proposals, supervised by the engine's record of the target
    rejected: Stream
    # every proposal of the engine, accepted or not; only the replay check uses it
    drafted: Stream
    # proposals that the target verified: supervise a confidence head
    verified: Stream
    teacher_top: TeacherTop = field(default_factory=TeacherTop)
    policy: PolicyTerms = field(default_factory=PolicyTerms)

    @property
    def context_len(self) -> int:
        """Number of leading positions that some block can see; later features are not used."""
        return int(self.anchors.max())


def build_layout(
    items: Sequence[TrainItem],
    device: torch.device | str = "cpu",
    drafted: bool = True,
    verified: bool = True,
) -> Layout:
    """Pad `items` (same block size, at least one) into tensors on `device`. ValueError for a plan
    that does not fit its sample.

    drafted=False leaves the drafted stream empty: it is the longest one, and only the replay check
    uses it. verified=False leaves the verified stream empty: only a confidence head uses it.
    """
    sizes = {item.plan.block_size for item in items}
    if len(sizes) != 1:
        raise ValueError(f"a micro-batch needs one block size, got {sorted(sizes)}")
    lengths = [_length(item) for item in items]
    blocks = max(_blocks(item) for item in items)
    input_ids = torch.zeros(len(items), max(lengths), dtype=torch.long)  # [b, S]
    anchors = torch.zeros(len(items), blocks, dtype=torch.long)  # [b, N]
    keep = torch.zeros(len(items), blocks, dtype=torch.bool)  # [b, N]
    tokens = torch.zeros(len(items), blocks, max(sizes), dtype=torch.long)  # [b, N, B]
    scores = _teacher_scores(items)
    for row, item in enumerate(items):
        input_ids[row, : lengths[row]] = torch.tensor(item.prompt_ids + item.response_ids)
        count = len(item.plan.anchors)
        fulls = [_checked_anchor(item, anchor) for anchor in item.plan.anchors]
        anchors[row, :count] = torch.tensor(fulls, dtype=torch.long)
        keep[row, :count] = True
        for block, known in enumerate(_block_tokens(item)):
            tokens[row, block, : len(known)] = torch.tensor(known)
    return Layout(
        input_ids=input_ids.to(device),
        lengths=torch.tensor(lengths, device=device),
        anchors=anchors.to(device),
        block_keep=keep.to(device),
        block_tokens=tokens.to(device),
        block_size=sizes.pop(),
        response=_response_stream(items, scores.logprobs, device),
        rejected=_rejected_stream(items, device),
        drafted=_drafted_stream(items if drafted else (), device),
        verified=_verified_stream(items if verified else (), device),
        teacher_top=TeacherTop(
            ids=torch.from_numpy(scores.top_ids.astype(np.int64)).to(device),
            logprobs=torch.from_numpy(scores.top_logprobs).to(device),
        ),
        policy=_policy_terms(items, device),
    )


def _length(item: TrainItem) -> int:
    return len(item.prompt_ids) + len(item.response_ids)


def _blocks(item: TrainItem) -> int:
    """Blocks the sample takes in a layout; never 0, so that a draft forward always has a slot."""
    return max(1, len(item.plan.anchors))


def _checked_anchor(item: TrainItem, anchor: int) -> int:
    full = full_anchor(len(item.prompt_ids), anchor)
    if not 0 <= full < _length(item) - 1:
        raise ValueError(
            f"sample {item.sample_id}: nothing follows anchor {anchor} in a response of "
            f"{len(item.response_ids)} tokens"
        )
    return full


def _block_tokens(item: TrainItem) -> list[tuple[int, ...]]:
    ids, size = item.prompt_ids + item.response_ids, item.plan.block_size
    drafted = item.plan.drafted or ((),) * len(item.plan.anchors)
    blocks = []
    for anchor, proposals in zip(item.plan.anchors, drafted, strict=True):
        full = full_anchor(len(item.prompt_ids), anchor)
        blocks.append((ids[full], *proposals)[:size] if proposals else ids[full : full + size])
    return blocks


def _slot(item: TrainItem, block: int, offset: int) -> int:
    plan = item.plan
    if not (0 <= block < len(plan.anchors) and 0 < offset < plan.block_size):
        raise ValueError(
            f"sample {item.sample_id}: block {block}, offset {offset} has no slot among "
            f"{len(plan.anchors)} blocks of {plan.block_size}"
        )
    return block * plan.block_size + offset


def _teacher_scores(items: Sequence[TrainItem]) -> TeacherScores:
    """The servers' scores at every response label [M]; without any, arrays of length 0. ValueError
    when only some samples have them.
    """
    scored = [item for item in items if item.teacher is not None]
    if not scored:
        return TeacherScores(
            np.zeros(0, np.float32), np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
        )
    logprobs, ids, values = [], [], []
    for item in items:
        plan, scores = item.plan, item.teacher
        if scores is None or len(scores.logprobs) != len(item.response_ids):
            have = 0 if scores is None else len(scores.logprobs)
            raise ValueError(
                f"sample {item.sample_id}: teacher scores of {have} tokens for a response of "
                f"{len(item.response_ids)}"
            )
        slots = zip(plan.response_block, plan.response_offset, strict=True)
        positions = np.array(
            [plan.anchors[block] + offset for block, offset in slots], dtype=np.int64
        )
        logprobs.append(scores.logprobs[positions])
        ids.append(scores.top_ids[positions])
        values.append(scores.top_logprobs[positions])
    return TeacherScores(np.concatenate(logprobs), np.concatenate(ids), np.concatenate(values))


def _response_stream(
    items: Sequence[TrainItem], teacher: np.ndarray, device: torch.device | str
) -> Stream:
    entries: list[tuple[int, int, int, int, int]] = []
    for index, item in enumerate(items):
        plan, ids = item.plan, item.prompt_ids + item.response_ids
        for block, offset, label in zip(
            plan.response_block, plan.response_offset, plan.response_label, strict=True
        ):
            slot = _slot(item, block, offset)
            position = full_anchor(len(item.prompt_ids), plan.anchors[block]) + offset
            if ids[position : position + 1] != (label,):
                raise ValueError(
                    f"sample {item.sample_id}: anchor {plan.anchors[block]}, offset {offset} is "
                    f"labelled {label}, "
                    f"but the sequence of {len(ids)} tokens does not hold it at {position}"
                )
            entries.append((index, slot, label, offset, position - 1))
    sample, slots, tokens, offsets, rows = _columns(entries, 5, device)
    return Stream(
        sample=sample,
        slot=slots,
        token=tokens,
        offset=offsets,
        target_row=rows,
        teacher_logprob=torch.from_numpy(teacher).to(device),
    )


def _rejected_stream(items: Sequence[TrainItem], device: torch.device | str) -> Stream:
    entries: list[tuple[int, int, int, int]] = []
    logprobs: list[float] = []
    for index, item in enumerate(items):
        plan = item.plan
        for block, offset, token in zip(
            plan.rejected_block, plan.rejected_offset, plan.rejected_token, strict=True
        ):
            entries.append((index, _slot(item, block, offset), token, offset))
        logprobs.extend(plan.rejected_logprob)
    if len(logprobs) != len(entries):
        raise ValueError(
            f"{len(entries)} rejected tokens came with {len(logprobs)} target log-probs"
        )
    scores = torch.tensor(logprobs, dtype=torch.float32, device=device)
    return replace(_unscored(entries, device), teacher_logprob=scores)


def _drafted_stream(items: Sequence[TrainItem], device: torch.device | str) -> Stream:
    entries = [
        (index, _slot(item, block, offset), token, offset)
        for index, item in enumerate(items)
        for block, tokens in enumerate(item.plan.drafted)
        for offset, token in enumerate(tokens, start=1)
    ]
    return _unscored(entries, device)


def _verified_stream(items: Sequence[TrainItem], device: torch.device | str) -> Stream:
    entries = [
        (index, _slot(item, block, offset), int(accepted), offset)
        for index, item in enumerate(items)
        for block, offset, accepted in verified_proposals(item.plan)
    ]
    return _unscored(entries, device)


def _unscored(entries: Sequence[tuple[int, ...]], device: torch.device | str) -> Stream:
    """A stream of (sample, slot, token, offset) without scores of a teacher."""
    sample, slots, tokens, offsets = _columns(entries, 4, device)
    return Stream(sample=sample, slot=slots, token=tokens, offset=offsets)


def _columns(
    entries: Sequence[tuple[int, ...]], width: int, device: torch.device | str
) -> tuple[Tensor, ...]:
    """`width` columns [M] of M entries."""
    rows = torch.tensor(entries, dtype=torch.long, device=device)
    return rows.reshape(-1, width).unbind(1)


def _policy_terms(items: Sequence[TrainItem], device: torch.device | str) -> PolicyTerms:
    for item in items:
        if item.old_logprobs and len(item.old_logprobs) != len(item.plan.response_label):
            raise ValueError(
                f"sample {item.sample_id}: {len(item.old_logprobs)} old log-probs for "
                f"{len(item.plan.response_label)} labels"
            )
    old = [value for item in items for value in item.old_logprobs]
    rewards = [item.reward for item in items for _ in item.plan.response_label]
    return PolicyTerms(
        old_logprob=torch.tensor(old, dtype=torch.float32, device=device),
        reward=torch.tensor(rewards, dtype=torch.float32, device=device),
    )


def slot_rows(layout: Layout, sample: Tensor, slot: Tensor) -> Tensor:
    """[M], index into flat hidden states [b*N*B, h] of `slot` [M] of `sample` [M]."""
    return sample * (layout.anchors.shape[1] * layout.block_size) + slot


def target_rows(layout: Layout) -> Tensor:
    """[M], index into the flat target rows [b*S, h] that score the response stream."""
    return layout.response.sample * layout.input_ids.shape[1] + layout.response.target_row


def cost(item: TrainItem) -> int:
    """Tokens of one sample: context plus draft slots."""
    return _length(item) + _blocks(item) * item.plan.block_size


def split_micro_batches(items: Sequence[TrainItem], max_tokens: int) -> list[list[TrainItem]]:
    """Micro-batches whose padded cost b * (S + N*B) stays within `max_tokens`; costliest samples
    first, the order is deterministic.

    A sample larger than the budget forms a micro-batch of its own.
    """
    batches: list[list[TrainItem]] = []
    length = slots = 0
    for item in sorted(items, key=lambda item: (-cost(item), item.sample_id)):
        own_length, own_slots = _length(item), _blocks(item) * item.plan.block_size
        length, slots = max(length, own_length), max(slots, own_slots)
        if batches and (len(batches[-1]) + 1) * (length + slots) <= max_tokens:
            batches[-1].append(item)
        else:
            batches.append([item])
            length, slots = own_length, own_slots
    return batches
