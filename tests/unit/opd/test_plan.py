from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.options import planned
from tests.rollouts import UNHURRIED, Rollout, make_sample, rollouts, worked_sample
from verl_opd.opd.plan import BlockPlan, item_rng, plan_counts, plan_sft
from verl_opd.opd.trace import boundaries


def supervised(plan: BlockPlan) -> list[tuple[int, int]]:
    """(anchor, offset) of the response stream."""
    return [
        (plan.anchors[block], offset)
        for block, offset in zip(plan.response_block, plan.response_offset, strict=True)
    ]


def rejected(plan: BlockPlan) -> list[tuple[int, int, int]]:
    entries = zip(plan.rejected_block, plan.rejected_offset, plan.rejected_token, strict=True)
    return [(plan.anchors[block], offset, token) for block, offset, token in entries]


WORKED_REJECTED = [(0, 2, 902), (0, 3, 903), (6, 1, 931), (6, 2, 932), (6, 3, 933)]


def test_exact_plan_of_the_worked_example():
    plan = planned(worked_sample(), block_size=4)
    assert plan.anchors == (0, 2, 6)
    # step 1: one accepted and the correction; step 2: three accepted, the bonus at offset 4 has no
    # slot; step 3: the correction
    assert supervised(plan) == [(0, 1), (0, 2), (2, 1), (2, 2), (2, 3), (6, 1)]
    assert plan.response_label == (11, 12, 13, 14, 15, 17)
    assert rejected(plan) == WORKED_REJECTED
    assert plan.rejected_logprob == (-2.5, -3.5, -4.0, -5.0, -6.0)


def test_draft_opd_plan_of_the_worked_example():
    plan = planned(worked_sample(), block_size=4, convention="draft_opd")
    # pairs (-1 -> 2), (2 -> 6), (6 -> 7), plus anchor 0 for the rejections alone
    assert plan.anchors == (-1, 0, 2, 6)
    assert supervised(plan) == [(-1, 1), (-1, 2), (-1, 3), (2, 1), (2, 2), (2, 3), (6, 1)]
    assert plan.response_label == (10, 11, 12, 13, 14, 15, 17)
    assert rejected(plan) == WORKED_REJECTED


def test_block_span_reaches_to_the_end_of_block_or_response():
    plan = planned(worked_sample(), block_size=4, response_span="block")
    assert supervised(plan) == [(0, 1), (0, 2), (0, 3), (2, 1), (2, 2), (2, 3), (6, 1)]
    assert plan.response_label == (11, 12, 13, 13, 14, 15, 17)


def test_offsets_beyond_a_smaller_block_are_dropped():
    plan = planned(worked_sample(), block_size=3)
    assert supervised(plan) == [(0, 1), (0, 2), (2, 1), (2, 2), (6, 1)]
    assert rejected(plan) == [(0, 2, 902), (6, 1, 931), (6, 2, 932)]


def test_a_larger_block_has_a_slot_for_the_bonus_token():
    assert (2, 4) in supervised(planned(worked_sample(), block_size=5))


def test_draft_opd_boundary_vectors():
    # one boundary at 2 in R = 20, B = 16: two pairs, the second one capped to 15
    sample = make_sample([(1, [101, 902, 903], [-1.0, -1.0]), *[(0, [], [])] * 17], range(100, 120))
    assert boundaries(sample.trace) == [2]
    plan = planned(sample, block_size=16, convention="draft_opd")
    assert [anchor for anchor, _ in supervised(plan)] == [-1] * 3 + [2] * 15
    # no boundary at all: nothing to supervise
    plain = make_sample([(0, [], [])] * 19, range(100, 120))
    assert planned(plain, block_size=16, convention="draft_opd").anchors == ()


def one_token_steps(count: int):
    """`count` steps that accept nothing: anchors 0..count-1."""
    return make_sample([(0, [900 + i], [-1.0]) for i in range(count)], range(100, 101 + count))


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (0, list(range(10))),
        (1, [9]),
        (2, [0, 9]),
        (4, [0, 3, 6, 9]),
        (5, [0, 2, 4, 6, 9]),
        (10, list(range(10))),
        (99, list(range(10))),
    ],
)
def test_anchor_cap_is_even_and_keeps_the_last(limit, kept):
    plan = planned(one_token_steps(10), block_size=2, max_response_anchors=limit)
    assert [anchor for anchor, _ in supervised(plan)] == kept
    # rejections keep their blocks whatever the cap
    assert plan.anchors == tuple(range(10))
    assert [anchor for anchor, _, _ in rejected(plan)] == list(range(10))


def test_capped_anchors_without_rejections_leave_no_block_behind():
    sample = make_sample([(2, [101 + 3 * i, 102 + 3 * i], []) for i in range(4)], range(100, 113))
    plan = planned(sample, block_size=3, max_response_anchors=2)
    assert plan.anchors == (0, 9)


def test_unknown_choices_are_an_error():
    with pytest.raises(ValueError, match="convention='upstream'"):
        planned(worked_sample(), block_size=4, convention="upstream")
    with pytest.raises(ValueError, match="response_span='line'"):
        planned(worked_sample(), block_size=4, response_span="line")


@given(rollouts(), st.integers(2, 7))
@UNHURRIED
def test_exact_segments_supervise_each_token_with_a_slot_once(rollout: Rollout, block_size: int):
    plan = planned(rollout.sample, block_size=block_size)
    with_slot = {
        anchor + offset
        for anchor, _, end in rollout.spans
        for offset in range(1, min(end - anchor, block_size - 1) + 1)
        if anchor + offset < rollout.length
    }
    positions = Counter(anchor + offset for anchor, offset in supervised(plan))
    assert positions == Counter(dict.fromkeys(with_slot, 1))
    if (
        block_size == rollout.num_drafts + 1
    ):  # then only bonus tokens and draft-free tokens have none
        bonus = {end for anchor, hits, end in rollout.spans if hits == rollout.num_drafts}
        assert with_slot == set(range(1, rollout.length)) - bonus - rollout.draft_free
    assert plan.response_label == tuple(
        rollout.sample.response_ids[anchor + offset] for anchor, offset in supervised(plan)
    )
    assert set(plan.anchors) == {anchor for anchor, _ in supervised(plan)} | {
        anchor for anchor, _, _ in rejected(plan)
    }
    assert list(plan.anchors) == sorted(set(plan.anchors))


@given(
    rollouts(),
    st.integers(2, 7),
    st.sampled_from(["exact", "draft_opd"]),
    st.sampled_from(["segment", "block"]),
    st.integers(0, 4),
)
@UNHURRIED
def test_rejections_are_the_same_under_every_convention(
    rollout: Rollout, block_size: int, convention: str, span: str, cap: int
):
    plan = planned(
        rollout.sample,
        block_size=block_size,
        convention=convention,
        response_span=span,
        max_response_anchors=cap,
    )
    expected = [
        (anchor, offset, 900 + anchor + offset)
        for anchor, hits, _ in rollout.spans
        if anchor + hits + 1 < rollout.length
        for offset in range(hits + 1, min(rollout.num_drafts, block_size - 1) + 1)
    ]
    assert rejected(plan) == expected
    assert all(-1 <= anchor <= rollout.length - 2 for anchor in plan.anchors)
    if cap:
        assert len({anchor for anchor, _ in supervised(plan)}) <= cap
    if span == "segment":
        positions = [anchor + offset for anchor, offset in supervised(plan)]
        assert len(positions) == len(set(positions))


@given(rollouts(), st.integers(2, 6))
@UNHURRIED
def test_exact_block_span_fills_every_block(rollout: Rollout, block_size: int):
    plan = planned(rollout.sample, block_size=block_size, response_span="block")
    anchors = [anchor for anchor, _, _ in rollout.spans if anchor < rollout.length - 1]
    assert supervised(plan) == [
        (a, j) for a in anchors for j in range(1, min(block_size - 1, rollout.length - 1 - a) + 1)
    ]


def test_sft_blocks_reach_to_the_end_of_block_or_response():
    plan = plan_sft(
        make_sample([], range(100, 106)),
        block_size=4,
        anchors_per_sample=99,
        rng=item_rng(1, 0, "a"),
    )
    assert plan.anchors == (0, 1, 2, 3, 4)
    assert supervised(plan) == [
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 1),
        (1, 2),
        (1, 3),
        (2, 1),
        (2, 2),
        (2, 3),
        (3, 1),
        (3, 2),
        (4, 1),
    ]
    assert plan.response_label == (101, 102, 103, 102, 103, 104, 103, 104, 105, 104, 105, 105)
    assert plan.rejected_block == ()


def test_sft_anchors_are_distinct_uniform_and_depend_on_the_rng_alone():
    sample = make_sample([], range(100, 111))
    counts: Counter[int] = Counter()
    for step in range(2000):
        plan = plan_sft(sample, block_size=4, anchors_per_sample=3, rng=item_rng(7, step, "0-3"))
        assert len(plan.anchors) == 3
        counts.update(plan.anchors)
    assert set(counts) == set(range(10))  # 0..R-2, the prefill token included
    assert max(abs(count - 600) for count in counts.values()) < 5 * np.sqrt(2000 * 0.3 * 0.7)
    again = plan_sft(sample, block_size=4, anchors_per_sample=3, rng=item_rng(7, 5, "0-3"))
    assert again == plan_sft(sample, block_size=4, anchors_per_sample=3, rng=item_rng(7, 5, "0-3"))
    draws = {
        tuple(item_rng(*key).integers(0, 10**9, 4))
        for key in [(7, 5, "0-3"), (8, 5, "0-3"), (7, 6, "0-3"), (7, 5, "0-4")]
    }
    assert len(draws) == 4


@pytest.mark.parametrize("length", [0, 1])
def test_sft_of_a_response_with_nothing_to_predict_is_empty(length):
    plan = plan_sft(
        make_sample([], range(length)), block_size=4, anchors_per_sample=3, rng=item_rng(1, 0, "a")
    )
    assert plan.anchors == plan.response_block == ()


PREFIX = "actor/distillation/opd_"


def test_counts_of_the_worked_example():
    sample = worked_sample()
    counts = plan_counts(planned(sample, block_size=4), sample).finish()
    assert {
        name.removeprefix(PREFIX): value
        for name, value in counts.items()
        if name.startswith(PREFIX)
    } == {
        "sample_count": 1,
        "skipped_sample_count": 0,
        "skipped_sample_ratio": 0,
        "valid_anchor_count": 3,
        "effective_token_count": 6,
        "target_token_count": 8,
        "effective_token_ratio": 6 / 8,
        "rejected_draft_token_count": 5,
        "total_reject_count": 3,
    }
    assert counts["data/supervised_share"] == 6 / 8
    assert counts["perf/total_num_tokens"] == 13


def test_anchors_for_rejections_alone_are_not_counted_as_response_anchors():
    sample = worked_sample()
    counts = plan_counts(planned(sample, block_size=4, convention="draft_opd"), sample).finish()
    assert counts[PREFIX + "valid_anchor_count"] == 3


def test_a_token_in_several_blocks_is_one_supervised_token():
    sample = make_sample([], range(100, 106))
    plan = plan_sft(sample, block_size=4, anchors_per_sample=99, rng=item_rng(1, 0, "a"))
    counts = plan_counts(plan, sample).finish()
    assert counts[PREFIX + "effective_token_count"] == 5
    assert counts["data/supervised_share"] == 5 / 6


def test_a_sample_without_verify_steps_is_skipped_and_counted_as_empty():
    sample = make_sample([], [100])
    counts = plan_counts(planned(sample, block_size=4), sample).finish()
    assert (
        counts[PREFIX + "skipped_sample_count"] == counts[PREFIX + "empty_reject_sample_count"] == 1
    )
    plain = make_sample(
        [(0, [], [])], [100, 101]
    )  # rolled out without drafting: no statement about rejections
    assert (
        PREFIX + "empty_reject_sample_count"
        not in plan_counts(planned(plain, block_size=4), plain).finish()
    )


# -- fewer, or other, anchors ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stride", "kept"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3, 4]), (9, [0, 4])]
)
def test_a_stride_keeps_the_last_anchor(stride: int, kept: list[int]):
    plan = planned(one_token_steps(5), block_size=2, response_anchor_stride=stride)
    assert [anchor for anchor, _ in supervised(plan)] == kept
    assert len(rejected(plan)) == 5


def test_upstream_stride_vector():
    """P = 2, R = 10, boundaries 1 2 3 4, B = 4, stride 2: of the pairs at -1 1 2 3 4 those with
    index 0, 2, 4 remain.
    """
    shifted = make_sample(
        [(0, [900 + i], [-1.0]) for i in range(4)] + [(0, [], [])] * 5,
        range(100, 110),
        prompt=(1, 2),
    )
    assert boundaries(shifted.trace) == [1, 2, 3, 4]
    plan = planned(shifted, block_size=4, convention="draft_opd", response_anchor_stride=2)
    assert sorted({anchor for anchor, _ in supervised(plan)}) == [-1, 2, 4]


def test_the_cap_applies_to_what_the_stride_left():
    plan = planned(
        one_token_steps(10), block_size=2, response_anchor_stride=3, max_response_anchors=2
    )
    assert [anchor for anchor, _ in supervised(plan)] == [0, 9]


def test_only_the_first_rejected_token_of_each_block():
    plan = planned(worked_sample(), block_size=4, rejected_first_only=True)
    assert rejected(plan) == [(0, 2, 902), (6, 1, 931)]
    assert plan.rejected_logprob == (-2.5, -4.0)


@pytest.mark.parametrize(("limit", "kept"), [(1, 1), (2, 2), (4, 4), (5, 5), (9, 5), (0, 5)])
def test_rejected_tokens_per_sample_are_the_first_in_order(limit: int, kept: int):
    plan = planned(worked_sample(), block_size=4, max_rejected_tokens=limit)
    assert rejected(plan) == WORKED_REJECTED[:kept]


def test_a_limit_drops_the_blocks_it_empties_but_no_response_block():
    plan = planned(worked_sample(), block_size=4, convention="draft_opd", max_rejected_tokens=3)
    assert plan.anchors == (-1, 0, 2, 6)
    assert rejected(plan) == WORKED_REJECTED[:3]


@given(rollouts(), st.integers(2, 7), st.sampled_from(["exact", "draft_opd"]), st.integers(0, 99))
@UNHURRIED
def test_random_anchors_keep_lengths_and_stay_apart(
    rollout: Rollout, block_size: int, convention: str, seed: int
):
    choices = {"block_size": block_size, "convention": convention}
    true, moved = (
        planned(rollout.sample, **choices),
        planned(rollout.sample, **choices, random_anchors=True, seed=seed),
    )
    assert moved == planned(rollout.sample, **choices, random_anchors=True, seed=seed)

    def lengths(plan: BlockPlan) -> list[int]:
        return sorted(Counter(anchor for anchor, _ in supervised(plan)).values())

    assert lengths(moved) == lengths(true)
    positions = [anchor + offset for anchor, offset in supervised(moved)]
    assert len(positions) == len(set(positions))
    assert all(
        (1 if convention == "exact" else 0) <= position < rollout.length for position in positions
    )
    assert moved.response_label == tuple(
        rollout.sample.response_ids[position] for position in positions
    )
    assert rejected(moved) == rejected(true)


def test_random_anchors_depend_on_seed_and_content():
    sample = one_token_steps(3)
    long = make_sample(
        [(0, [900 + i], [-1.0]) for i in range(3)] + [(0, [], [])] * 40, range(100, 144)
    )
    plans = {
        planned(long, block_size=2, random_anchors=True, seed=seed).anchors for seed in range(8)
    }
    assert len(plans) > 4
    assert (
        planned(sample, block_size=2, random_anchors=True, seed=1).anchors
        == planned(sample, block_size=2, random_anchors=True, seed=2).anchors
    ), "full"


@given(rollouts(), st.integers(2, 7), st.sampled_from(["exact", "draft_opd"]))
@UNHURRIED
def test_both_ways_of_counting_agree(rollout: Rollout, block_size: int, convention: str):
    """The dashboard's effective tokens are distinct positions; in disjoint segments that is the
    number of supervised slots.
    """
    plan = planned(rollout.sample, block_size=block_size, convention=convention)
    counts = plan_counts(plan, rollout.sample)
    assert counts.sums["actor/distillation/opd_effective_token_count"] == len(plan.response_label)
    assert counts.sums["actor/distillation/opd_rejected_draft_token_count"] == len(
        plan.rejected_token
    )
    assert counts.means["data/supervised_share"] == (len(plan.response_label), rollout.length)
