import pytest

from verl_opd.opd.metrics import StepMetrics, reduce_metrics
from verl_opd.opd.trace import RolloutSample, VerifyStep, VerifyTrace
from verl_opd.report.acceptance import Acceptance, BenchmarkResult, rollout_metrics


def sample(
    name: str,
    steps: list[tuple[int, int, int]],
    length: int,
    finish: str = "stop",
    draft_free: tuple[int, ...] = (),
) -> RolloutSample:
    """steps: (anchor, accepted, committed) of blocks with three proposals."""
    trace = VerifyTrace(
        length,
        tuple(VerifyStep(a, (7, 7, 7), acc, com, (-1.0,) * (3 - acc)) for a, acc, com in steps),
        draft_free,
    )
    return RolloutSample(
        sample_id=name,
        data_source="x",
        prompt_ids=(1, 2, 3),
        response_ids=tuple(range(length)),
        trace=trace,
        draft_version=0,
        finish_reason=finish,
    )


def test_tau_counts_the_bonus_and_neither_prefill_token_nor_draft_free_steps():
    # 8 tokens: prefill 0, then 2 + 4 + 1 committed in three verify steps
    worked = sample("a", [(0, 1, 2), (2, 3, 4), (6, 0, 1)], 8)
    assert Acceptance.of([worked.trace]).tau == pytest.approx(7 / 3)
    assert Acceptance.of([worked.trace]).by_position == (2, 1, 1)
    plain = sample("b", [], 5, draft_free=(1, 2, 3, 4))
    assert Acceptance.of([worked.trace, plain.trace]).tau == pytest.approx(7 / 3)
    assert Acceptance.of([plain.trace]).tau is None


def test_tau_is_token_weighted_over_samples_not_a_mean_of_means():
    long = sample("a", [(0, 0, 1), (1, 0, 1), (2, 0, 1)], 4)
    short = sample("b", [(0, 3, 4)], 5)
    assert Acceptance.of([long.trace, short.trace]).tau == pytest.approx(7 / 4)
    metrics = rollout_metrics([long, short], 100).finish()
    assert metrics["opd/rollout/accept_length/mean"] == pytest.approx(7 / 4)
    assert metrics["rollout/accept_rate_pos_1"] == pytest.approx(1 / 4)
    assert metrics["rollout/spec_accept_rate"] == pytest.approx(3 / 12)


def test_empty_reject_ratio_marks_samples_without_any_verify_step():
    broken = sample("a", [], 6)
    fine = sample("b", [(0, 0, 1)], 2, finish="length")
    metrics = rollout_metrics([broken, fine], 2).finish()
    assert metrics["opd/rollout/empty_reject_ratio"] == pytest.approx(0.5)
    assert metrics["data/truncated_share"] == pytest.approx(0.5)
    assert metrics["response_length/max"] == 6


def test_nothing_drafted_reports_no_accept_length_at_all():
    metrics = rollout_metrics([sample("a", [], 4, draft_free=(1, 2, 3))], 10).finish()
    assert not [name for name in metrics if "accept" in name or "reject" in name]
    result = BenchmarkResult.of("bench", [sample("a", [], 4, draft_free=(1, 2, 3))])
    assert "test_rollout/bench/vllm_spec_accept_length" not in result.metrics()


def test_means_are_divided_once_after_reduction():
    parts = []
    for total, count in ((1.0, 1), (9.0, 3)):
        part = StepMetrics()
        part.add_mean("m", total, count)
        part.add_sum("s", count)
        part.add_max("hi", total)
        part.add_min("lo", total)
        parts.append(part)
    assert reduce_metrics(parts, {"x": 5.0}) == {"m": 2.5, "s": 4.0, "hi": 9.0, "lo": 1.0, "x": 5.0}


def test_one_name_cannot_be_two_kinds():
    metrics = StepMetrics()
    metrics.add_mean("m", 1, 1)
    metrics.add_sum("m", 1)
    with pytest.raises(ValueError, match=r"two kinds.*'m'"):
        metrics.finish()


def test_an_unmeasured_mean_is_absent():
    metrics = StepMetrics()
    metrics.add_mean("m", 0, 0)
    assert metrics.finish() == {}
