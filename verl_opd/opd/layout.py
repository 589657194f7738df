"""The one place for token alignment: from samples and block plans to padded tensors and back.

Full-sequence index of response position r is P + r (prompt length P). A block anchored at full index F has B slots; slot j (0 = the anchor
itself) has position id F + j and predicts the token at F + j, so there is no shift inside a block. The target scores that same token with its
row F + j - 1, as every causal language model does. The block's context is the target features of positions strictly before F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_opd.opd.plan import TrainItem


def full_anchor(prompt_len: int, anchor: int) -> int:
    """Full-sequence index of a response position; -1 is the last prompt token. ValueError below that."""
    if anchor < -1:
        raise ValueError(f"anchor {anchor} lies before the last prompt token")
    return prompt_len + anchor


@dataclass(frozen=True)
class Stream:
    """Supervised slots of one loss stream, flat over the micro-batch (M entries, int64 unless said).

    sample [M]; slot [M]: index n*B + j into the sample's N*B draft slots; target_row [M]: index into S of the target row that scores the same
    token; token [M]; offset [M]: j, 1-based; teacher_logprob [M] float32: recorded by the engine (refused stream), else empty.
    """

    sample: Tensor
    slot: Tensor
    target_row: Tensor
    token: Tensor
    offset: Tensor
    teacher_logprob: Tensor


@dataclass(frozen=True)
class Layout:
    """A padded micro-batch of b samples.

    input_ids [b, S] int64 right-padded with 0; lengths [b]; anchors [b, N] int64 full-sequence indices (0 where padded);
    block_keep [b, N] bool; block_size B.
    """

    input_ids: Tensor
    lengths: Tensor
    anchors: Tensor
    block_keep: Tensor
    block_size: int
    response: Stream
    refused: Stream

    @property
    def context_len(self) -> int:
        """Positions that any block can see: features from here on are never used."""
        return int(self.anchors.max()) if self.block_keep.any() else 0


def build_layout(items: Sequence[TrainItem], device: torch.device | str = "cpu") -> Layout:
    """Pad `items` (same block size, at least one) into tensors on `device`."""
    sizes = {item.plan.block_size for item in items}
    if len(sizes) != 1:
        raise ValueError(f"a micro-batch needs one block size, got {sorted(sizes)}")
    block_size = sizes.pop()
    lengths = [len(item.prompt_ids) + len(item.response_ids) for item in items]
    input_ids = torch.zeros(len(items), max(lengths), dtype=torch.long)
    blocks = max(1, *(len(item.plan.anchors) for item in items))
    anchors = torch.zeros(len(items), blocks, dtype=torch.long)
    keep = torch.zeros(len(items), blocks, dtype=torch.bool)
    for row, item in enumerate(items):
        input_ids[row, : lengths[row]] = torch.tensor(item.prompt_ids + item.response_ids)
        count = len(item.plan.anchors)
        anchors[row, :count] = torch.tensor([_checked_anchor(item, a) for a in item.plan.anchors], dtype=torch.long)
        keep[row, :count] = True
    response = _stream(items, "response")
    refused = _stream(items, "refused")
    return Layout(
        input_ids.to(device),
        torch.tensor(lengths, device=device),
        anchors.to(device),
        keep.to(device),
        block_size,
        _to(response, device),
        _to(refused, device),
    )


def _checked_anchor(item: TrainItem, anchor: int) -> int:
    full = full_anchor(len(item.prompt_ids), anchor)
    if not 0 < full < len(item.prompt_ids) + len(item.response_ids):
        raise ValueError(f"sample {item.sample_id}: anchor {anchor} lies outside a response of {len(item.response_ids)} tokens")
    return full


def _stream(items: Sequence[TrainItem], name: str) -> Stream:
    rows: list[tuple[int, int, int, int, int]] = []
    logprobs: list[float] = []
    for index, item in enumerate(items):
        plan = item.plan
        token_key = "response_label" if name == "response" else "refused_token"
        entries = zip(getattr(plan, f"{name}_block"), getattr(plan, f"{name}_offset"), getattr(plan, token_key), strict=True)
        for block, offset, token in entries:
            if not 0 < offset < plan.block_size:
                raise ValueError(f"sample {item.sample_id}: offset {offset} has no slot in a block of {plan.block_size}")
            row = full_anchor(len(item.prompt_ids), plan.anchors[block]) + offset - 1
            rows.append((index, block * plan.block_size + offset, row, token, offset))
        if name == "refused":
            logprobs.extend(plan.refused_logprob)
    columns = torch.tensor(rows, dtype=torch.long).reshape(-1, 5).unbind(1)
    return Stream(*columns, torch.tensor(logprobs, dtype=torch.float32))


def _to(stream: Stream, device: torch.device | str) -> Stream:
    return Stream(*(getattr(stream, name).to(device) for name in Stream.__dataclass_fields__))


def cost(item: TrainItem) -> int:
    """Tokens of one sample: context plus draft slots."""
    return len(item.prompt_ids) + len(item.response_ids) + len(item.plan.anchors) * item.plan.block_size


def split_micro_batches(items: Sequence[TrainItem], max_tokens: int) -> list[list[TrainItem]]:
    """Micro-batches whose padded cost b * (max context + max slots) stays within `max_tokens`, longest samples first, order deterministic.

    A sample larger than the budget forms a micro-batch of its own.
    """
    batches: list[list[TrainItem]] = []
    longest = blocks = 0
    for item in sorted(items, key=lambda item: (-cost(item), item.sample_id)):
        length = len(item.prompt_ids) + len(item.response_ids)
        slots = len(item.plan.anchors) * item.plan.block_size
        padded = max(longest, length) + max(blocks, slots)
        if batches and (len(batches[-1]) + 1) * padded <= max_tokens:
            batches[-1].append(item)
            longest, blocks = max(longest, length), max(blocks, slots)
        else:
            batches.append([item])
            longest, blocks = length, slots
    return batches
