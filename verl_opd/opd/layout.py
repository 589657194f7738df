"""The one place for token alignment: from samples and block plans to padded tensors.

Full-sequence index of response position r is P + r (prompt length P). A block anchored at full
index F has B slots; slot j (0 = the anchor itself) has position id F + j and predicts the token at
F + j: no shift inside a block. The target scores that same token with its row F + j - 1, as every
causal language model does. The block's context is the target features of positions strictly before
F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from verl_opd.opd.plan import TrainItem
from verl_opd.opd.plan import verified_proposals as verified_proposals
from verl_opd.opd.trace import TeacherScores


def full_anchor(prompt_len: int, anchor: int) -> int:
    """Full-sequence index of a response position; -1 is the last prompt token. ValueError below
    that.
    """
    if anchor < -1:
        raise ValueError(f"anchor {anchor} lies before the last prompt token")
    return prompt_len + anchor


@dataclass(frozen=True)
class Stream:
    """Supervised slots of one loss stream, flat over the micro-batch (M entries, int64 unless
    said).

    sample [M]: row of the micro-batch. slot [M]: n*B + j, index into the sample's N*B draft slots.
    token [M]. offset [M]: j, 1-based. Response stream: target_row [M], index into the sample's S
    target rows, the one that scores the same token; teacher_logprob [M] float32 only when a teacher
    server scored the samples. Rejected stream: teacher_logprob [M] float32 as the engine recorded
    it, on the draft's own prefix, which no row of the response has seen; target_row is empty.
    Verified stream: proposals that the target verified, token = 1 where accepted, else 0. Drafted
    stream: every proposal of the engine, accepted or not; nothing is supervised with it.
    """

    sample: Tensor
    slot: Tensor
    token: Tensor
    offset: Tensor
    target_row: Tensor
    teacher_logprob: Tensor


@dataclass(frozen=True)
class Layout:
    """A padded micro-batch of b samples.

    input_ids [b, S] int64 right-padded with 0; lengths [b] int64; anchors [b, N] int64
    full-sequence indices (0 where padded); block_keep [b, N] bool; block_size B. block_tokens [b,
    N, B] int64: the anchor token and the tokens that followed it while drafting: the engine's
    proposals, in a block that no engine drafted the response's own tokens (0 beyond its end).
    old_logprob, reward: float32, parallel to the response stream (TrainItem); old_logprob is empty
    when the items carry none. top_ids [M, k] int64 and top_logprobs [M, k] float32, parallel to the
    response stream: the teacher's most likely tokens; k is 0 without a teacher server.
    """

    input_ids: Tensor
    lengths: Tensor
    anchors: Tensor
    block_keep: Tensor
    block_tokens: Tensor
    block_size: int
    response: Stream
    rejected: Stream
    drafted: Stream
    verified: Stream
    old_logprob: Tensor = field(default_factory=lambda: torch.zeros(0))
    reward: Tensor = field(default_factory=lambda: torch.zeros(0))
    top_ids: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    top_logprobs: Tensor = field(default_factory=lambda: torch.zeros(0, 0))

    @property
    def context_len(self) -> int:
        """Leading positions that some block can see: features from here on are never used."""
        return int(self.anchors.max())


def build_layout(
    items: Sequence[TrainItem],
    device: torch.device | str = "cpu",
    drafted: bool = True,
    verified: bool = True,
) -> Layout:
    """Pad `items` (same block size, at least one) into tensors on `device`. ValueError for a plan
    that does not fit its sample.

    drafted False leaves the drafted stream empty: only the replay check looks at it, and it is the
    longest. verified False likewise: only a confidence head does.
    """
    sizes = {item.plan.block_size for item in items}
    if len(sizes) != 1:
        raise ValueError(f"a micro-batch needs one block size, got {sorted(sizes)}")
    lengths = [_length(item) for item in items]
    blocks = max(_blocks(item) for item in items)
    input_ids = torch.zeros(len(items), max(lengths), dtype=torch.long)
    anchors = torch.zeros(len(items), blocks, dtype=torch.long)
    keep = torch.zeros(len(items), blocks, dtype=torch.bool)
    tokens = torch.zeros(len(items), blocks, max(sizes), dtype=torch.long)
    scores = _teacher_scores(items)
    for row, item in enumerate(items):
        input_ids[row, : lengths[row]] = torch.tensor(item.prompt_ids + item.response_ids)
        count = len(item.plan.anchors)
        anchors[row, :count] = torch.tensor(
            [_checked_anchor(item, anchor) for anchor in item.plan.anchors], dtype=torch.long
        )
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
        rejected=_refused_stream(items, device),
        drafted=_drafted_stream(items if drafted else (), device),
        verified=_judged_stream(items if verified else (), device),
        old_logprob=torch.tensor(_old_logprobs(items), dtype=torch.float32, device=device),
        reward=torch.tensor(
            [item.reward for item in items for _ in item.plan.response_label],
            dtype=torch.float32,
            device=device,
        ),
        top_ids=torch.from_numpy(scores.top_ids.astype(np.int64)).to(device),
        top_logprobs=torch.from_numpy(scores.top_logprobs).to(device),
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
    """The servers' scores at every response label; without any, arrays of length 0. ValueError when
    only some samples have them.
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
    sample, slots, token, offsets, row = (
        torch.tensor(entries, dtype=torch.long, device=device).reshape(-1, 5).unbind(1)
    )
    return Stream(sample, slots, token, offsets, row, torch.from_numpy(teacher).to(device))


def _refused_stream(items: Sequence[TrainItem], device: torch.device | str) -> Stream:
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
    sample, slots, tokens, offsets = (
        torch.tensor(entries, dtype=torch.long, device=device).reshape(-1, 4).unbind(1)
    )
    none = torch.zeros(0, dtype=torch.long, device=device)
    return Stream(
        sample,
        slots,
        tokens,
        offsets,
        none,
        torch.tensor(logprobs, dtype=torch.float32, device=device),
    )


def _drafted_stream(items: Sequence[TrainItem], device: torch.device | str) -> Stream:
    entries = [
        (index, _slot(item, block, offset), token, offset)
        for index, item in enumerate(items)
        for block, tokens in enumerate(item.plan.drafted)
        for offset, token in enumerate(tokens, start=1)
    ]
    return _unscored(entries, device)


def _judged_stream(items: Sequence[TrainItem], device: torch.device | str) -> Stream:
    return _unscored(
        [
            (index, _slot(item, block, offset), int(accepted), offset)
            for index, item in enumerate(items)
            for block, offset, accepted in verified_proposals(item.plan)
        ],
        device,
    )


def _unscored(entries: Sequence[tuple[int, int, int, int]], device: torch.device | str) -> Stream:
    """A stream of (sample, slot, token, offset) that no teacher scores."""
    sample, slots, tokens, offsets = (
        torch.tensor(entries, dtype=torch.long, device=device).reshape(-1, 4).unbind(1)
    )
    return Stream(
        sample,
        slots,
        tokens,
        offsets,
        torch.zeros(0, dtype=torch.long, device=device),
        torch.zeros(0, device=device),
    )


def _old_logprobs(items: Sequence[TrainItem]) -> list[float]:
    for item in items:
        if item.old_logprobs and len(item.old_logprobs) != len(item.plan.response_label):
            raise ValueError(
                f"sample {item.sample_id}: {len(item.old_logprobs)} old log-probs for "
                f"{len(item.plan.response_label)} labels"
            )
    return [value for item in items for value in item.old_logprobs]


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
