import json

import pytest
from hypothesis import given

from tests.rollouts import UNHURRIED, WORKED_RESPONSE, Rollout, rollouts, worked_sample
from verl_opd.opd.trace import (
    Rejection,
    VerifyStep,
    VerifyTrace,
    accept_length,
    accepted_by_position,
    boundaries,
    check_trace,
    rejections,
    trace_from_events,
)
from verl_opd.opd.wire import from_extra_fields, to_extra_fields

WORKED_FIELDS = {
    "dflash_reject_token_indices": [2, 6, 7],
    "dflash_rejected_draft_anchor_indices": [0, 0, 6, 6, 6],
    "dflash_rejected_draft_token_indices": [2, 3, 7, 8, 9],
    "dflash_rejected_draft_offsets": [2, 3, 1, 2, 3],
    "dflash_rejected_draft_token_ids": [902, 903, 931, 932, 933],
    "dflash_rejected_draft_teacher_logprobs": [-2.5, -3.5, -4.0, -5.0, -6.0],
    "dflash_replay_block_anchor_indices": [0, 2, 6],
    "dflash_replay_block_accepted_lengths": [1, 3, 0],
    "dflash_replay_block_drafted_lengths": [3, 3, 3],
    "dflash_replay_block_drafted_token_ids": [11, 902, 903, 13, 14, 15, 931, 932, 933],
    "dflash_replay_block_refused_logprobs": [-2.5, -3.5, -4.0, -5.0, -6.0],
    "dflash_draft_free_token_indices": [],
    "dflash_reject_token_count": 3,
    "dflash_non_reject_token_count": 5,
    "dflash_empty_reject_token_indices": 0,
    "dflash_num_verify_steps": 3,
    "dflash_accept_length": 7 / 3,
}


def test_worked_example_steps_and_derived_values():
    trace = worked_sample().trace
    assert [(step.anchor, step.accepted, step.committed) for step in trace.steps] == [
        (0, 1, 2),
        (2, 3, 4),
        (6, 0, 1),
    ]
    assert boundaries(trace) == [2, 6, 7]
    assert rejections(trace) == [
        Rejection(0, 2, 902, -2.5),
        Rejection(0, 3, 903, -3.5),
        Rejection(6, 1, 931, -4.0),
        Rejection(6, 2, 932, -5.0),
        Rejection(6, 3, 933, -6.0),
    ]
    assert accept_length(trace) == pytest.approx(7 / 3)
    assert accepted_by_position(trace.steps) == (2, 1, 1)


def test_worked_example_on_the_wire_both_ways():
    assert to_extra_fields(worked_sample().trace) == WORKED_FIELDS
    assert from_extra_fields(WORKED_FIELDS, 8) == worked_sample().trace


def test_four_drafts_example_keeps_block_anchors_apart_from_reject_positions():
    # 2 of 4 accepted, then 4 of 4, then none: first rejections stand at 3 and 9, their blocks are
    # anchored at 0 and 8
    events = [
        (2, [1, 2, 93, 94], [-1.0, -2.0]),
        (4, [4, 5, 6, 7], []),
        (0, [99, 95, 96, 97], [-3.0, -4.0, -5.0, -6.0]),
    ]
    trace = trace_from_events(events, 10)
    check_trace(trace, range(10))
    fields = to_extra_fields(trace)
    assert fields["dflash_reject_token_indices"] == [3, 8, 9]
    assert fields["dflash_rejected_draft_anchor_indices"] == [0, 0, 8, 8, 8, 8]
    assert fields["dflash_rejected_draft_offsets"] == [3, 4, 1, 2, 3, 4]
    assert fields["dflash_rejected_draft_token_indices"] == [3, 4, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("length", "committed", "rejected"),
    [
        (5, [4], [5]),  # everything up to the correction fits
        (4, [3], []),  # ends on the last accepted proposal: the rejection point was never reached
        (2, [1], []),  # ends on the first accepted proposal
        (1, [], []),  # ended right after prefill
        (0, [], []),
    ],
)
def test_steps_are_clipped_where_the_response_ends(length, committed, rejected):
    trace = trace_from_events(
        [(3, [1, 2, 3, 94, 95], [-1.0, -2.0]), (0, [9] * 5, [-1.0] * 5)], length
    )
    assert [step.committed for step in trace.steps] == committed
    assert [item.offset for item in rejections(trace)] == ([4, 5] if rejected else [])
    assert from_extra_fields(to_extra_fields(trace), length) == trace


def test_draft_free_steps_move_later_blocks_by_one():
    trace = trace_from_events([(0, [], []), (1, [102, 909], [-1.0]), (0, [], []), (0, [], [])], 5)
    assert trace.draft_free == (1, 4)
    assert [step.anchor for step in trace.steps] == [1]
    assert boundaries(trace) == [3]
    check_trace(trace, [100, 101, 102, 103, 104])
    assert accept_length(trace) == 2.0
    assert from_extra_fields(to_extra_fields(trace), 5) == trace


def test_a_response_without_verify_steps_has_all_keys_and_no_accept_length():
    trace = trace_from_events([], 1)
    fields = to_extra_fields(trace)
    assert fields.keys() == WORKED_FIELDS.keys()
    assert all(value == [] for value in fields.values() if isinstance(value, list))
    assert (
        fields["dflash_non_reject_token_count"],
        fields["dflash_empty_reject_token_indices"],
        fields["dflash_accept_length"],
    ) == (
        1,
        1,
        0,
    )
    assert to_extra_fields(trace_from_events([], 0))["dflash_empty_reject_token_indices"] == 0
    assert accept_length(trace) is None
    assert accepted_by_position(trace.steps) == ()
    check_trace(trace, [7])


@pytest.mark.parametrize(
    ("accepted", "drafted", "logprobs"),
    [
        (3, [1, 2], []),
        (1, [1, 2, 3], [-1.0]),
        (0, [1, 2], []),
        (2, [1, 2], [-1.0]),
        (-1, [1], [-1.0, -1.0]),
    ],
)
def test_an_event_that_contradicts_itself_is_an_error(accepted, drafted, logprobs):
    with pytest.raises(
        ValueError,
        match=f"impossible verify step at anchor 0: {len(drafted)} drafted, {accepted} accepted",
    ):
        trace_from_events([(accepted, drafted, logprobs)], 20)


@pytest.mark.parametrize("committed", [0, 3])
def test_a_step_commits_between_one_token_and_accepted_plus_one(committed):
    with pytest.raises(ValueError, match=f"{committed} committed"):
        VerifyStep(0, (5, 6), 1, committed, (-1.0,))


def test_check_names_the_accepted_proposal_that_differs():
    wrong = (*WORKED_RESPONSE[:4], 77, *WORKED_RESPONSE[5:])
    with pytest.raises(
        ValueError,
        match=r"proposal 2 of the block anchored at 2 is token 14, but the response holds 77 at "
        r"position 4",
    ):
        check_trace(worked_sample().trace, wrong)


def test_check_does_not_compare_rejected_proposals_or_those_past_the_end():
    trace = trace_from_events([(2, [11, 12, 903], [-1.0])], 2)
    check_trace(trace, [10, 11])


@pytest.mark.parametrize(
    ("steps", "draft_free", "message"),
    [
        ([(0, 1, 2)], (), "trace ends where position 3 of 5"),
        ([(0, 1, 2), (3, 0, 1)], (), "commits response position 4 where position 3"),
        ([(0, 1, 2), (1, 1, 2)], (4,), "commits response position 2 where position 3"),
        ([(0, 1, 2), (2, 1, 2)], (5,), "commits response position 5 where position None"),
    ],
)
def test_check_names_the_position_where_committed_tokens_do_not_add_up(steps, draft_free, message):
    trace = VerifyTrace(
        5,
        tuple(
            VerifyStep(anchor, (101, 909), hits, done, (-1.0,) * (2 - hits))
            for anchor, hits, done in steps
        ),
        draft_free,
    )
    with pytest.raises(ValueError, match=message):
        check_trace(trace, [100, 101, 102, 103, 104])


def test_check_rejects_another_response_length():
    with pytest.raises(ValueError, match=r"trace covers 8 tokens and the response has 7"):
        check_trace(worked_sample().trace, WORKED_RESPONSE[:7])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dflash_rejected_draft_offsets", [2, 3], "'dflash_rejected_draft_offsets': 2"),
        (
            "dflash_replay_block_accepted_lengths",
            [1, 3],
            "'dflash_replay_block_accepted_lengths': 2",
        ),
        (
            "dflash_replay_block_drafted_token_ids",
            [1] * 8,
            "drafted_token_ids has 8 .* blocks have 9 proposals, 4 of them accepted",
        ),
        ("dflash_replay_block_refused_logprobs", [-1.0] * 4, "refused_logprobs 4 entries"),
        ("dflash_replay_block_accepted_lengths", [4, 3, -3], "impossible verify step at anchor 0"),
        (
            "dflash_replay_block_anchor_indices",
            [0, 2, 7],
            "impossible verify step at anchor 7: 3 drafted, 0 accepted, 0 committed",
        ),
    ],
)
def test_wire_lists_that_disagree_are_an_error(key, value, message):
    with pytest.raises(ValueError, match=message):
        from_extra_fields({**WORKED_FIELDS, key: value}, 8)


@pytest.mark.parametrize("key", sorted(WORKED_FIELDS))
def test_a_missing_wire_key_is_named(key):
    with pytest.raises(ValueError, match=f"lack {key}$"):
        from_extra_fields({name: value for name, value in WORKED_FIELDS.items() if name != key}, 8)


def test_a_rejected_proposal_that_replaces_itself_is_not_exact_verification():
    """D6: lossy acceptance, or a broken sampler, puts rollouts off the target's distribution
    without an error.
    """
    trace = trace_from_events([(1, [11, 12, 13], [-0.5, -1.0])], 3)
    check_trace(trace, (10, 11, 19))
    with pytest.raises(
        ValueError,
        match="proposal 2 of the block anchored at 0 was rejected and replaced by itself \\(token "
        "12\\)",
    ):
        check_trace(trace, (10, 11, 12))


@given(rollouts())
@UNHURRIED
def test_random_rollouts_are_explained_and_survive_the_wire(rollout: Rollout):
    trace, length = rollout.sample.trace, rollout.length
    check_trace(trace, rollout.sample.response_ids)
    assert set(trace.draft_free) == rollout.draft_free
    ran = [(anchor, hits, end) for anchor, hits, end in rollout.spans if anchor < length - 1]
    assert boundaries(trace) == [min(end, length - 1) for _, _, end in ran]
    expected = [
        (anchor, offset, 900 + anchor + offset)
        for anchor, hits, _ in ran
        if anchor + hits + 1 < length
        for offset in range(hits + 1, rollout.num_drafts + 1)
    ]
    assert [(item.anchor, item.offset, item.token) for item in rejections(trace)] == expected
    fields = json.loads(json.dumps(to_extra_fields(trace)))
    assert from_extra_fields(fields, length) == trace
    assert fields["dflash_reject_token_count"] + fields["dflash_non_reject_token_count"] == length
