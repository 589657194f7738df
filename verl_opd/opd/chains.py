"""Whole blocks as chains of states, for losses that look at a block end to end (Draft-OPD's exact
total variation).

A position's target distribution is conditioned on the draft's own tokens. Up to the first rejected
proposal these are the tokens of the response, so the target's rows over the recorded sequence score
them. After it the target has to read the rejected tokens in a branch: the prefix up to the first
rejected proposal, followed by the rejected ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_opd.opd.layout import full_anchor
from verl_opd.opd.plan import BlockPlan, TrainItem


@dataclass(frozen=True, kw_only=True)
class Chains:
    """Positions of all blocks of a micro-batch, flat: M entries of int64."""

    # [M], as in layout.Stream
    sample: Tensor
    # [M], as in layout.Stream
    slot: Tensor
    # [M], running number of the block in the micro-batch
    block: Tensor
    # [M], 0-based position in its chain
    place: Tensor
    # [M], target row that scores the position: an index into the micro-batch's b*S rows followed
    # by the branches' R*L rows
    row: Tensor
    # [R, L] token ids, right-padded; R may be 0
    branch_ids: Tensor
    # [R], true lengths
    branch_lengths: Tensor
    # number of blocks
    count: int


def chain_offsets(plan: BlockPlan) -> list[tuple[list[int], list[int]]]:
    """Per block: (its offsets in order, the rejected ones among them). A block with rejections has
    its accepted prefix and its rejected proposals, without the correction; any other block has its
    labelled segment. ValueError when rejected offsets have a gap.
    """
    labelled: list[list[int]] = [[] for _ in plan.anchors]
    rejected: list[list[int]] = [[] for _ in plan.anchors]
    for block, offset in zip(plan.response_block, plan.response_offset, strict=True):
        labelled[block].append(offset)
    for block, offset in zip(plan.rejected_block, plan.rejected_offset, strict=True):
        rejected[block].append(offset)
    chains = []
    for anchor, segment, suffix in zip(plan.anchors, labelled, rejected, strict=True):
        if suffix and suffix != list(range(suffix[0], suffix[0] + len(suffix))):
            raise ValueError(
                f"rejected offsets {suffix} of the block at anchor {anchor} have a gap"
            )
        chains.append(([*range(1, suffix[0]), *suffix] if suffix else sorted(segment), suffix))
    return chains


def count_chains(plan: BlockPlan) -> int:
    """Blocks with at least one position."""
    return sum(bool(offsets) for offsets, _ in chain_offsets(plan))


def build_chains(
    items: Sequence[TrainItem], seq_len: int, device: torch.device | str = "cpu"
) -> Chains:
    """Chains of a micro-batch whose padded sequences have `seq_len` positions."""
    entries: list[list[int]] = []
    branches: list[tuple[int, ...]] = []
    in_branch: list[tuple[int, int, int]] = []  # (entry, branch, row in branch)
    count = 0
    for index, item in enumerate(items):
        ids, rejected = item.prompt_ids + item.response_ids, _rejected_tokens(item.plan)
        for block, (offsets, suffix) in enumerate(chain_offsets(item.plan)):
            full = _start(item, block, suffix[0] if suffix else max(offsets, default=0))
            for place, offset in enumerate(offsets):
                if suffix and offset > suffix[0]:
                    in_branch.append((len(entries), len(branches), full + offset - 1))
                own_slot = block * item.plan.block_size + offset
                own_row = index * seq_len + full + offset - 1
                entries.append([index, own_slot, count, place, own_row])
            if len(suffix) > 1:
                # up to the first rejected proposal, then the rejected ones but the last
                branches.append((*ids[: full + suffix[0]], *rejected[block][:-1]))
            count += bool(offsets)
    longest = max((len(branch) for branch in branches), default=0)
    for entry, branch, row in in_branch:
        entries[entry][4] = len(items) * seq_len + branch * longest + row
    branch_ids = torch.zeros(len(branches), longest, dtype=torch.long)
    for number, branch_tokens in enumerate(branches):
        branch_ids[number, : len(branch_tokens)] = torch.tensor(branch_tokens)
    sample, slot, numbers, places, rows = (
        torch.tensor(entries, dtype=torch.long, device=device).reshape(-1, 5).unbind(1)
    )
    lengths = torch.tensor([len(branch) for branch in branches], dtype=torch.long, device=device)
    return Chains(
        sample=sample,
        slot=slot,
        block=numbers,
        place=places,
        row=rows,
        branch_ids=branch_ids.to(device),
        branch_lengths=lengths,
        count=count,
    )


def _start(item: TrainItem, block: int, last: int) -> int:
    """Full-sequence index of a block's anchor; ValueError when the response, and the token after
    it, end before offset `last` of the block.
    """
    anchor = item.plan.anchors[block]
    full = full_anchor(len(item.prompt_ids), anchor)
    if full + last > len(item.prompt_ids) + len(item.response_ids):
        raise ValueError(
            f"sample {item.sample_id}: offset {last} of the block at anchor {anchor} is past the "
            "end of the response"
        )
    return full


def _rejected_tokens(plan: BlockPlan) -> list[list[int]]:
    """Rejected tokens of each block, in the order of their offsets, as `chain_offsets` checks."""
    tokens: list[list[int]] = [[] for _ in plan.anchors]
    for block, token in zip(plan.rejected_block, plan.rejected_token, strict=True):
        tokens[block].append(token)
    return tokens


def end_to_end(tv: Tensor, chains: Chains) -> tuple[Tensor, Tensor]:
    """(loss [count], expected accepted proposals [count]) of every block from total variations tv
    [M] of its positions.

    With overlaps o = 1 - TV, a chain is accepted up to k with probability prod_{i<=k} o_i, so E =
    sum_k prod_{i<=k} o_i proposals are accepted on average; the loss is 1 - E / length of the
    chain.
    """
    width = int(chains.place.max()) + 1 if len(tv) else 0
    # [count, width], 0 past a chain's end
    overlap = tv.new_zeros(chains.count, width).index_put((chains.block, chains.place), 1 - tv)
    expected = overlap.cumprod(1).sum(1)  # [count]
    length = tv.new_zeros(chains.count).index_add(0, chains.block, torch.ones_like(tv))
    return 1 - expected / length, expected
