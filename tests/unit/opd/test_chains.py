"""Blocks as chains: which states they hold, what the target has read there, and the end-to-end
loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from tests.options import planned
from tests.rollouts import UNHURRIED, Rollout, rollouts, worked_sample
from verl_opd.opd.chains import Chains, build_chains, chain_offsets, count_chains, end_to_end
from verl_opd.opd.plan import BlockPlan, TrainItem


def worked_item() -> TrainItem:
    sample = (
        worked_sample()
    )  # prompt 1..5, response 10..17, blocks at 0 (1 accepted), 2 (all), 6 (none) with 3 proposals
    return TrainItem(
        sample_id="x",
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        plan=planned(sample, block_size=4),
    )


def test_positions_of_the_worked_example() -> None:
    assert chain_offsets(worked_item().plan) == [
        ([1, 2, 3], [2, 3]),
        ([1, 2, 3], []),
        ([1, 2, 3], [1, 2, 3]),
    ]
    chains = build_chains([worked_item()], 13)
    assert chains.count == 3
    assert chains.block.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert chains.place.tolist() == [0, 1, 2] * 3
    assert chains.slot.tolist() == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    # prompt and response up to the first rejected proposal, then the rejected ones but the last
    assert chains.branch_lengths.tolist() == [5 + 2 + 1, 5 + 7 + 2]
    assert chains.branch_ids.tolist() == [
        [1, 2, 3, 4, 5, 10, 11, 902, *[0] * 6],
        [1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15, 16, 931, 932],
    ]
    # a row scores the token behind it: block 0 reads 10, 11 from the response, then 902 from branch
    # 0; block 2 reads 16, then 931 and 932
    assert chains.row.tolist() == [5, 6, 13 + 7, 7, 8, 9, 11, 13 + 14 + 12, 13 + 14 + 13]


@given(rollouts())
@UNHURRIED
def test_every_row_has_read_what_the_draft_had(rollout: Rollout) -> None:
    sample = rollout.sample
    plan = planned(sample, block_size=rollout.num_drafts + 1)
    item = TrainItem(
        sample_id="x", prompt_ids=sample.prompt_ids, response_ids=sample.response_ids, plan=plan
    )
    ids = sample.prompt_ids + sample.response_ids
    chains = build_chains([item], len(ids))
    rows = [ids[: i + 1] for i in range(len(ids))]
    rows += [
        tuple(branch[: i + 1]) for branch in chains.branch_ids.tolist() for i in range(len(branch))
    ]
    drafted = {step.anchor: step.drafted for step in sample.trace.steps}
    for slot, row in zip(chains.slot.tolist(), chains.row.tolist(), strict=True):
        block, offset = divmod(slot, plan.block_size)
        anchor = plan.anchors[block]
        known = ids[: len(sample.prompt_ids) + anchor + 1]
        assert rows[row] == known + drafted[anchor][: offset - 1]
    assert chains.count == count_chains(plan)


class Counted(tuple[int, ...]):
    """A tuple that counts how often it is read through."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        type(self).passes += 1
        return super().__iter__()


def test_rejected_tokens_are_read_once_and_not_once_a_block() -> None:
    blocks, response = 50, tuple(range(100))
    plan = BlockPlan(
        block_size=4,
        anchors=tuple(range(blocks)),
        rejected_block=tuple(i for i in range(blocks) for _ in range(2)),
        rejected_offset=(2, 3) * blocks,
        rejected_token=Counted(range(2 * blocks)),
        rejected_logprob=(-1.0,) * (2 * blocks),
    )
    Counted.passes = 0
    item = TrainItem(sample_id="x", prompt_ids=(1, 2), response_ids=response, plan=plan)
    chains = build_chains([item], 102)
    # each branch ends with the first of its two rejected tokens
    ends = [row[n - 1] for row, n in zip(chains.branch_ids, chains.branch_lengths, strict=True)]
    assert ends == list(range(0, 2 * blocks, 2))
    assert Counted.passes == 1


def test_a_gap_in_a_rejected_suffix_is_an_error() -> None:
    plan = replace(
        worked_item().plan,
        rejected_block=(0, 0),
        rejected_offset=(1, 3),
        rejected_token=(1, 2),
        rejected_logprob=(0.0, 0.0),
    )
    with pytest.raises(ValueError, match=r"\[1, 3\] of the block at anchor 0 have a gap"):
        chain_offsets(plan)


def chains_of(lengths: list[int]) -> Chains:
    none = torch.zeros(0, dtype=torch.long)
    block = torch.tensor([b for b, n in enumerate(lengths) for _ in range(n)], dtype=torch.long)
    place = torch.tensor([i for n in lengths for i in range(n)], dtype=torch.long)
    return Chains(
        sample=none,
        slot=none,
        block=block,
        place=place,
        row=none,
        branch_ids=none.view(0, 0),
        branch_lengths=none,
        count=len(lengths),
    )


def test_the_documented_value() -> None:
    """TV (0.2, 0.4): overlaps 0.8 and 0.6, E = 0.8 + 0.48, loss 1 - 1.28 / 2."""
    loss, expected = end_to_end(torch.tensor([0.2, 0.4, 0.5]), chains_of([2, 1]))
    torch.testing.assert_close(expected, torch.tensor([1.28, 0.5]))
    torch.testing.assert_close(loss, torch.tensor([0.36, 0.5]))


def test_the_gradient_against_float64() -> None:
    tv = torch.tensor([0.2, 0.4, 0.9, 0.0, 1.0, 0.3], requires_grad=True)
    loss, _ = end_to_end(tv, chains_of([3, 2, 1]))
    loss.sum().backward()
    wide = tv.detach().double().requires_grad_()
    blocks = [wide[:3], wide[3:5], wide[5:]]
    reference = sum(
        1 - sum((1 - block[: k + 1]).prod() for k in range(len(block))) / len(block)
        for block in blocks
    )
    reference.backward()
    torch.testing.assert_close(tv.grad.double(), wide.grad, atol=1e-6, rtol=1e-5)


def test_no_block_gives_an_empty_loss() -> None:
    loss, expected = end_to_end(torch.zeros(0, requires_grad=True), chains_of([]))
    assert loss.shape == expected.shape == (0,)
