from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.options import planned
from tests.rollouts import UNHURRIED, Rollout, make_sample, rollouts, worked_sample
from verl_opd.opd.layout import build_layout, cost, full_anchor, split_micro_batches
from verl_opd.opd.plan import BlockPlan, TrainItem, item_rng, plan_sft
from verl_opd.opd.trace import RolloutSample


def train_item(sample: RolloutSample, plan: BlockPlan) -> TrainItem:
    return TrainItem(
        sample_id=sample.sample_id,
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        plan=plan,
    )


def worked_item(**choices: str) -> TrainItem:
    return train_item(worked_sample(), planned(worked_sample(), block_size=4, **choices))


def empty_item(length: int, blocks: int = 0, name: str = "0-0") -> TrainItem:
    """A sample of `length` tokens and `blocks` blocks of four slots that supervises nothing."""
    return TrainItem(
        sample_id=name,
        prompt_ids=(1,),
        response_ids=tuple(range(length - 1)),
        plan=BlockPlan(
            block_size=4,
            anchors=tuple(range(blocks)),
            response_block=(),
            response_offset=(),
            response_label=(),
            rejected_block=(),
            rejected_offset=(),
            rejected_token=(),
            rejected_logprob=(),
        ),
    )


def test_worked_example_by_hand():
    # prompt 1 2 3 4 5 at 0..4, response 10..17 at 5..12; anchors 0, 2, 6 -> 5, 7, 11
    layout = build_layout([worked_item()])
    assert layout.input_ids.tolist() == [[1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15, 16, 17]]
    assert layout.lengths.tolist() == [13]
    assert layout.anchors.tolist() == [[5, 7, 11]]
    assert layout.block_keep.tolist() == [[True, True, True]]
    assert layout.block_size == 4
    assert layout.context_len == 11
    response = layout.response
    assert response.sample.tolist() == [0] * 6
    assert response.slot.tolist() == [1, 2, 5, 6, 7, 9]
    assert response.offset.tolist() == [1, 2, 1, 2, 3, 1]
    assert response.token.tolist() == [11, 12, 13, 14, 15, 17]
    assert response.target_row.tolist() == [5, 6, 7, 8, 9, 11]
    rejected = layout.rejected
    assert rejected.slot.tolist() == [2, 3, 9, 10, 11]
    assert rejected.offset.tolist() == [2, 3, 1, 2, 3]
    assert rejected.token.tolist() == [902, 903, 931, 932, 933]
    assert rejected.teacher_logprob.tolist() == [-2.5, -3.5, -4.0, -5.0, -6.0]
    assert rejected.teacher_logprob.dtype == torch.float32
    assert rejected.target_row.numel() == response.teacher_logprob.numel() == 0


def test_draft_opd_worked_example_starts_at_the_last_prompt_token():
    layout = build_layout([worked_item(convention="draft_opd")])
    assert layout.anchors.tolist() == [[4, 5, 7, 11]]
    assert layout.response.slot.tolist() == [1, 2, 3, 9, 10, 11, 13]
    assert layout.response.token.tolist() == [10, 11, 12, 13, 14, 15, 17]
    assert layout.response.target_row.tolist() == [4, 5, 6, 7, 8, 9, 11]
    assert layout.rejected.slot.tolist() == [6, 7, 13, 14, 15]


def test_padding_of_samples_and_blocks():
    short = make_sample([(0, [9, 9, 9], [-1.0] * 3)], [20, 21], prompt=[7])
    layout = build_layout([train_item(short, planned(short, block_size=4)), worked_item()])
    assert layout.input_ids.shape == (2, 13)
    assert layout.input_ids[0].tolist() == [7, 20, 21] + [0] * 10
    assert layout.lengths.tolist() == [3, 13]
    assert layout.anchors.tolist() == [[1, 0, 0], [5, 7, 11]]
    assert layout.block_keep.tolist() == [[True, False, False], [True, True, True]]
    assert layout.response.sample.tolist() == [0] + [1] * 6
    assert layout.response.slot.tolist() == [
        1,
        1,
        2,
        5,
        6,
        7,
        9,
    ]  # per sample, not flat over the batch
    assert layout.response.target_row.tolist() == [1, 5, 6, 7, 8, 9, 11]
    assert layout.rejected.sample.tolist() == [0, 0, 0] + [1] * 5


def test_a_sample_without_blocks_still_has_one_dropped_block():
    layout = build_layout([empty_item(3)])
    assert layout.block_keep.tolist() == [[False]]
    assert layout.context_len == layout.response.slot.numel() == layout.rejected.slot.numel() == 0


def test_one_token_prompt_can_anchor_the_first_block_of_the_upstream_convention():
    sample = make_sample([(0, [9], [-1.0])], [20, 21], prompt=[7])
    layout = build_layout(
        [train_item(sample, planned(sample, block_size=3, convention="draft_opd"))]
    )
    assert layout.anchors.tolist() == [[0, 1]]
    assert layout.response.target_row.tolist() == [0, 1]


@pytest.mark.parametrize(("anchor", "full"), [(-1, 4), (0, 5), (7, 12)])
def test_full_anchor(anchor, full):
    assert full_anchor(5, anchor) == full


def test_an_anchor_before_the_last_prompt_token_is_an_error():
    with pytest.raises(ValueError, match="anchor -2"):
        full_anchor(5, -2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"anchors": (0, 2, 7)}, "nothing follows anchor 7 in a response of 8 tokens"),
        (
            {"response_offset": (1, 2, 1, 2, 4, 1)},
            "block 1, offset 4 has no slot among 3 blocks of 4",
        ),
        ({"response_offset": (0, 2, 1, 2, 3, 1)}, "block 0, offset 0 has no slot"),
        ({"rejected_block": (0, 0, 2, 2, 3)}, "block 3, offset 3 has no slot"),
        (
            {"anchors": (1, 2, 6)},
            "anchor 1, offset 1 is labelled 11, but the sequence of 13 tokens does not hold it at "
            "7",
        ),
        ({"response_offset": (1, 2, 1, 2, 3, 2)}, "anchor 6, offset 2 is labelled 17, .* at 13"),
        ({"rejected_logprob": (-1.0,)}, "5 rejected tokens came with 1 target log-probs"),
    ],
)
def test_a_plan_that_does_not_fit_its_sample_is_an_error(change, message):
    item = worked_item()
    with pytest.raises(ValueError, match=message):
        build_layout([replace(item, plan=replace(item.plan, **change))])


def test_one_micro_batch_has_one_block_size():
    other = train_item(worked_sample(), planned(worked_sample(), block_size=3))
    with pytest.raises(ValueError, match=r"\[3, 4\]"):
        build_layout([worked_item(), other])


@given(
    st.lists(rollouts(), min_size=1, max_size=4),
    st.integers(2, 6),
    st.sampled_from(["exact", "draft_opd"]),
)
@UNHURRIED
def test_every_entry_points_at_its_token(batch: list[Rollout], block_size: int, convention: str):
    items = [
        train_item(r.sample, planned(r.sample, block_size=block_size, convention=convention))
        for r in batch
    ]
    layout = build_layout(items)
    for stream in (layout.response, layout.rejected):
        assert torch.equal(stream.slot % block_size, stream.offset)
        assert bool(layout.block_keep[stream.sample, stream.slot // block_size].all())
    stream = layout.response
    position = layout.anchors[stream.sample, stream.slot // block_size] + stream.offset
    assert torch.equal(layout.input_ids[stream.sample, position], stream.token)
    assert torch.equal(position, stream.target_row + 1)
    assert bool((position < layout.lengths[stream.sample]).all())
    stream = layout.rejected
    prompt = torch.tensor([len(item.prompt_ids) for item in items])[stream.sample]
    response_position = (
        layout.anchors[stream.sample, stream.slot // block_size] + stream.offset - prompt
    )
    assert torch.equal(
        stream.token, 900 + response_position
    )  # how the random rollouts number rejected tokens


def padded_cost(batch: list[TrainItem]) -> int:
    layout = build_layout(batch)
    return layout.input_ids.numel() + layout.anchors.numel() * layout.block_size


def test_cost_counts_context_and_slots():
    assert cost(worked_item()) == 13 + 3 * 4
    assert cost(empty_item(5)) == 5 + 4  # the dropped block takes its slots


def test_micro_batches_by_hand():
    # costs 30 + 8 = 38, 10 + 24 = 34, 10 + 4 = 14, 5 + 4 = 9
    long, wide, small, tiny = (
        empty_item(30, 2, "a"),
        empty_item(10, 6, "b"),
        empty_item(10, 1, "c"),
        empty_item(5, 1, "d"),
    )
    # long and wide together pad to 2 * (30 + 24) = 108
    assert split_micro_batches([tiny, small, wide, long], 108) == [[long, wide], [small, tiny]]
    assert split_micro_batches([tiny, small, wide, long], 107) == [[long], [wide, small, tiny]]
    assert split_micro_batches([tiny, small, wide, long], 10) == [[long], [wide], [small], [tiny]]
    assert split_micro_batches([], 10) == []


@given(
    st.lists(st.tuples(st.integers(2, 40), st.integers(0, 8)), max_size=12),
    st.integers(1, 200),
    st.randoms(),
)
@UNHURRIED
def test_micro_batches_hold_every_sample_once_within_the_budget(shapes, budget, random):
    items = [
        empty_item(length, min(blocks, length - 2), f"0-{i}")
        for i, (length, blocks) in enumerate(shapes)
    ]
    batches = split_micro_batches(items, budget)
    assert sorted(item.sample_id for batch in batches for item in batch) == sorted(
        item.sample_id for item in items
    )
    assert all(padded_cost(batch) <= budget or len(batch) == 1 for batch in batches)
    assert all(padded_cost([item]) == cost(item) for item in items)
    shuffled = items[:]
    random.shuffle(shuffled)
    assert split_micro_batches(shuffled, budget) == batches


def test_sft_blocks_lay_out_as_well():
    sample = make_sample([], range(100, 106), prompt=[1, 2])
    layout = build_layout(
        [
            train_item(
                sample,
                plan_sft(sample, block_size=3, anchors_per_sample=9, rng=item_rng(0, 0, "a")),
            )
        ]
    )
    assert layout.anchors.tolist() == [[2, 3, 4, 5, 6]]
    assert layout.response.target_row.tolist() == [2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert layout.response.token.tolist() == [101, 102, 102, 103, 103, 104, 104, 105, 105]
    assert layout.rejected.slot.numel() == 0
