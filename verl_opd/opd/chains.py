"""Whole blocks as chains of states, for losses that look at a block end to end (Draft-OPD's exact
total variation).

A position's target distribution is conditioned on the draft's own tokens. Up to the first rejected
proposal these are the response's, so the target's rows over the recorded sequence serve; behind it
the target has to read the rejected tokens: a branch, the prefix up to the first rejected proposal
followed by the rejected ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_opd.opd.layout import full_anchor
from verl_opd.opd.plan import BlockPlan, TrainItem


@dataclass(frozen=True)
class Chains:
    """Positions of all blocks of a micro-batch, M entries, int64.

    sample [M], slot [M]: as in layout.Stream. block [M]: running number of the block in the
    micro-batch; place [M]: 0-based position in its chain. row [M]: index of the target row that
    scores the position, into the micro-batch's b*S rows followed by the branches' R*L rows.
    branch_ids [R, L] right-padded, branch_lengths [R]; R may be 0. count: number of blocks.
    """

    sample: Tensor
    slot: Tensor
    block: Tensor
    place: Tensor
    row: Tensor
    branch_ids: Tensor
    branch_lengths: Tensor
    count: int


def chain_offsets(plan: BlockPlan) -> list[tuple[list[int], list[int]]]:
    """Per block: (its offsets in order, the rejected ones among them). A block with rejections is
    its accepted prefix and what was rejected, without the correction; any other is its labelled
    segment. ValueError when rejected offsets do not follow each other.
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
    behind: list[tuple[int, int, int]] = []  # (entry, branch, row in branch)
    count = 0
    for index, item in enumerate(items):
        plan, ids = item.plan, item.prompt_ids + item.response_ids
        tokens = {
            (b, o): t
            for b, o, t in zip(
                plan.rejected_block, plan.rejected_offset, plan.rejected_token, strict=True
            )
        }
        for block, (offsets, suffix) in enumerate(chain_offsets(plan)):
            full = full_anchor(len(item.prompt_ids), plan.anchors[block])
            last = suffix[0] if suffix else (offsets[-1] if offsets else 0)
            if full + last > len(ids):
                raise ValueError(
                    f"sample {item.sample_id}: offset {last} of the block at anchor "
                    f"{plan.anchors[block]} lies past the response"
                )
            for place, offset in enumerate(offsets):
                if suffix and offset > suffix[0]:
                    behind.append((len(entries), len(branches), full + offset - 1))
                entries.append(
                    [
                        index,
                        block * plan.block_size + offset,
                        count,
                        place,
                        index * seq_len + full + offset - 1,
                    ]
                )
            if len(suffix) > 1:
                branches.append(
                    ids[: full + suffix[0]] + tuple(tokens[block, offset] for offset in suffix[:-1])
                )
            count += bool(offsets)
    longest = max((len(branch) for branch in branches), default=0)
    for entry, branch, row in behind:
        entries[entry][4] = len(items) * seq_len + branch * longest + row
    branch_ids = torch.zeros(len(branches), longest, dtype=torch.long)
    for number, branch_tokens in enumerate(branches):
        branch_ids[number, : len(branch_tokens)] = torch.tensor(branch_tokens)
    sample, slot, numbers, place_, row_ = (
        torch.tensor(entries, dtype=torch.long, device=device).reshape(-1, 5).unbind(1)
    )
    lengths = torch.tensor([len(branch) for branch in branches], dtype=torch.long, device=device)
    return Chains(sample, slot, numbers, place_, row_, branch_ids.to(device), lengths, count)


def end_to_end(tv: Tensor, chains: Chains) -> tuple[Tensor, Tensor]:
    """(loss [count], expected accepted proposals [count]) of every block from total variations tv
    [M] of its positions.

    With overlaps o = 1 - TV, a chain is accepted up to k with probability prod_{i<=k} o_i, so E =
    sum_k prod_{i<=k} o_i proposals are accepted on average; the loss is 1 - E / length of the
    chain.
    """
    width = int(chains.place.max()) + 1 if len(tv) else 0
    overlap = tv.new_zeros(chains.count, width).index_put((chains.block, chains.place), 1 - tv)
    expected = overlap.cumprod(1).sum(1)
    length = tv.new_zeros(chains.count).index_add(0, chains.block, torch.ones_like(tv))
    return 1 - expected / length, expected
