"""Counting replayed slots that do not choose what the engine proposed, and saying so."""

from __future__ import annotations

import math

import pytest
import torch

from tests.options import planned
from tests.rollouts import worked_sample
from verl_opd.opd.layout import build_layout
from verl_opd.opd.metrics import reduce_metrics
from verl_opd.opd.plan import TrainItem
from verl_opd.opd.replay_check import diagnose, replay_metrics
from verl_opd.training.lm_head import label_gaps


def test_every_proposal_has_the_slot_it_was_drafted_in():
    sample = (
        worked_sample()
    )  # prompt of 5; blocks at 0, 2, 6 with proposals (11 902 903), (13 14 15), (931 932 933)
    layout = build_layout(
        [
            TrainItem(
                sample_id="x",
                prompt_ids=sample.prompt_ids,
                response_ids=sample.response_ids,
                plan=planned(sample, block_size=4),
            )
        ]
    )
    assert layout.anchors[0].tolist() == [5, 7, 11]
    assert layout.drafted.token.tolist() == [11, 902, 903, 13, 14, 15, 931, 932, 933]
    assert layout.drafted.slot.tolist() == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    assert layout.drafted.offset.tolist() == [1, 2, 3] * 3


def test_a_block_that_no_engine_drafted_is_not_checked():
    plan = planned(worked_sample(), block_size=4, convention="draft_opd")
    assert plan.anchors == (-1, 0, 2, 6)
    assert plan.drafted == ((), (11, 902, 903), (13, 14, 15), (931, 932, 933))


def test_gaps_are_nats_below_the_best_token():
    rows, weight = (
        torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
        torch.tensor([[3.0, 0.0], [2.0, 1.0], [0.0, 4.0]]),
    )
    assert label_gaps(rows, weight, torch.tensor([0, 1]), 1).tolist() == [
        0.0,
        6.0,
    ]  # logits (3 2 0) and (0 2 8)


def test_near_ties_count_only_as_raw_mismatches():
    gaps = torch.tensor([0.0, 0.0, 0.5, 0.51, math.nan, 0.0])
    metrics = reduce_metrics([replay_metrics(gaps, torch.tensor([1, 2, 1, 2, 1, 2]))])
    assert metrics == pytest.approx(
        {
            "opd/replay_mismatch": 2 / 6,
            "opd/replay_mismatch_raw": 3 / 6,
            "opd/replay_slots": 6,
            "opd/replay_mismatch_raw_pos_1": 2 / 3,
            "opd/replay_mismatch_raw_pos_2": 1 / 3,
        }
    )


def test_nothing_drafted_measures_nothing():
    assert reduce_metrics([replay_metrics(torch.zeros(0), torch.zeros(0, dtype=torch.long))]) == {
        "opd/replay_slots": 0
    }


@pytest.mark.parametrize(
    ("far", "raw", "limits", "fails"),
    [
        (0.03, 0.04, (0.02, 0.1), True),
        (0.02, 0.1, (0.02, 0.1), False),
        (0.0, 0.11, (0.02, 0.1), True),
        (0.5, 0.5, (None, None), False),
        (0.5, 0.05, (None, 0.1), False),
    ],
)
def test_either_limit_stops_and_null_only_reports(
    far: float, raw: float, limits: tuple[float | None, float | None], fails: bool
):
    metrics = {
        "opd/replay_mismatch": far,
        "opd/replay_mismatch_raw": raw,
        "opd/replay_slots": 700.0,
        **{f"opd/replay_mismatch_raw_pos_{k}": 0.01 * k for k in (1, 2, 10)},
    }
    problem = diagnose(metrics, *limits, {"mask_token_id": 7})
    assert (problem is not None) == fails
    if problem:
        assert "of 700 slots" in problem
        assert "mask_token_id 7" in problem
        assert "1 1.0%, 2 2.0%, 10 10.0%" in problem


def test_a_step_without_a_check_passes():
    assert diagnose({"actor/distillation/loss": 1.0}, 0.0, 0.0, {}) is None
