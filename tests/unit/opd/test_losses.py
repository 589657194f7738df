import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.options import loss_options, loss_settings, planned
from tests.rollouts import UNHURRIED, Rollout, rollouts, worked_sample
from verl_opd.opd.layout import Layout, build_layout, split_micro_batches
from verl_opd.opd.losses import (
    FULL_VOCABULARY,
    SINGLE_TOKEN,
    StreamTotals,
    bernoulli_forward_kl,
    clamp_values,
    combine,
    full_forward_kl,
    k3,
    position_weights,
    stream_totals,
)
from verl_opd.opd.measures import loss_metrics
from verl_opd.opd.metrics import StepMetrics, reduce_metrics
from verl_opd.opd.options import LossOptions
from verl_opd.opd.plan import TrainItem
from verl_opd.training.lm_head import against_target, row_loss

# -- divergences -----------------------------------------------------------------------------------


def value_and_slope(function, student, teacher, **kwargs):
    s = torch.tensor(student, dtype=torch.float32, requires_grad=True)
    values = function(s, torch.tensor(teacher, dtype=torch.float32), **kwargs)
    assert values.dtype == torch.float32
    values.sum().backward()
    return values.detach().double().numpy(), s.grad.double().numpy()


def reference_bernoulli(s, t):
    """KL of (p, 1-p) against (q, 1-q) in float64, from the definition."""
    p, q = np.exp(t), np.exp(s)
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def reference_k3(s, t):
    ratio = np.exp(t) / np.exp(s)
    return ratio - np.log(ratio) - 1


def central_difference(function, s, t):
    step = 1e-6 * np.maximum(np.abs(s), 1e-3)
    return (function(s + step, t) - function(s - step, t)) / (2 * step)


PROBS = (1e-4, 0.01, 0.25, 0.5, 0.9, 0.999, 0.99999)
FAR = [(q, p) for p in PROBS for q in PROBS if p != q]
NEAR = [(p * (1 + d), p) for p in PROBS for d in (1e-3, -1e-3) if p * (1 + d) < 1]


def test_bernoulli_forward_kl_by_hand():
    # teacher 1/2, student 1/4: 1/2 ln 2 + 1/2 ln((1/2) / (3/4)) = 0.143841
    values, slopes = value_and_slope(bernoulli_forward_kl, [math.log(0.25)], [math.log(0.5)])
    assert values[0] == pytest.approx(0.1438410, abs=1e-6)
    # d/ds = (q - p) / (1 - q) = -1/3
    assert slopes[0] == pytest.approx(-1 / 3, abs=1e-6)


def test_k3_by_hand():
    # t - s = ln 2: 2 - ln 2 - 1; d/ds = 1 - exp(t - s) = -1
    values, slopes = value_and_slope(k3, [math.log(0.25)], [math.log(0.5)])
    assert values[0] == pytest.approx(0.3068528, abs=1e-6)
    assert slopes[0] == pytest.approx(-1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("function", "reference"), [(bernoulli_forward_kl, reference_bernoulli), (k3, reference_k3)]
)
@pytest.mark.parametrize(("pairs", "absolute"), [(FAR, 0.0), (NEAR, 3e-7)])
def test_divergences_and_gradients_against_float64(function, reference, pairs, absolute):
    # round the inputs first, so that only the arithmetic is compared
    q, p = np.array(pairs).T
    s, t = (np.log(x).astype(np.float32).astype(np.float64) for x in (q, p))
    expected = reference(s, t)
    inside = expected < (10 if function is k3 else np.inf)
    values, slopes = value_and_slope(function, s, t)
    np.testing.assert_allclose(values[inside], expected[inside], rtol=2e-4, atol=absolute)
    np.testing.assert_allclose(
        slopes[inside], central_difference(reference, s, t)[inside], rtol=2e-3, atol=1e-5
    )
    np.testing.assert_array_equal(values[~inside], 10.0)
    np.testing.assert_array_equal(slopes[~inside], 0.0)


@pytest.mark.parametrize("function", [bernoulli_forward_kl, k3])
def test_equal_log_probs_cost_nothing(function):
    values, slopes = value_and_slope(function, [-7.0, -1.0, -1e-4], [-7.0, -1.0, -1e-4])
    np.testing.assert_array_equal(values, 0.0)
    np.testing.assert_allclose(slopes, 0.0, atol=1e-6)


def test_a_nearly_certain_token_keeps_its_relative_precision():
    # 1 - p = 1e-5 and 2e-5: computing 1 - exp(t) in float32 would be off by up to 1%
    s, t = math.log1p(-2e-5), math.log1p(-1e-5)
    s32, t32 = float(np.float32(s)), float(np.float32(t))
    values, _ = value_and_slope(bernoulli_forward_kl, [s], [t])
    p, miss_p, miss_q = math.exp(t32), -math.expm1(t32), -math.expm1(s32)
    assert values[0] == pytest.approx(
        p * (t32 - s32) + miss_p * math.log(miss_p / miss_q), rel=1e-3
    )


def test_certain_and_impossible_log_probs_stay_finite():
    values, slopes = value_and_slope(
        bernoulli_forward_kl, [0.0, -200.0, 0.0, -math.inf], [-200.0, 0.0, 0.0, -1.0]
    )
    assert np.isfinite(values).all()
    assert np.isfinite(slopes).all()
    # student at the default floor of -80, teacher at log(1 - eps)
    assert values[1] == pytest.approx(80.0, rel=1e-3)


def test_min_clamp_of_the_forward_kl():
    expected = reference_bernoulli(-10.0, math.log(0.5))
    values, slopes = value_and_slope(
        bernoulli_forward_kl, [-30.0, -10.5, -9.5], [math.log(0.5)] * 3, min_clamp=-10.0
    )
    np.testing.assert_allclose(values[:2], expected, rtol=1e-5)
    np.testing.assert_array_equal(slopes[:2], 0.0)
    assert slopes[2] < -0.4


def test_k3_saturates_and_the_min_clamp_keeps_it_alive():
    # a rejected token that the target finds e^-30 likely: -d - 1 = 28.5, clamped to 10 without
    # gradient
    values, slopes = value_and_slope(k3, [-0.5], [-30.0])
    assert (values[0], slopes[0]) == (10.0, 0.0)
    # with the target's log-prob clamped to -10: d = -9.5, e^d + 8.5
    values, slopes = value_and_slope(k3, [-0.5], [-30.0], min_clamp=-10.0)
    assert values[0] == pytest.approx(math.exp(-9.5) + 8.5)
    assert slopes[0] == pytest.approx(1 - math.exp(-9.5))
    # the ratio itself is bounded, so a token the draft finds impossible cannot overflow
    values, slopes = value_and_slope(k3, [-200.0], [0.0])
    assert (values[0], slopes[0]) == (10.0, 0.0)


def test_full_forward_kl_by_hand():
    # p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): 1/2 ln 2 - 1/4 ln 2
    p, q = (
        torch.tensor([[0.5, 0.25, 0.25]]).log() + 3.0,
        torch.tensor([[0.25, 0.5, 0.25]]).log() - 1.0,
    )
    assert float(full_forward_kl(q, p)) == pytest.approx(0.25 * math.log(2), abs=1e-6)


@pytest.mark.parametrize("distance", [1.0, 1e-3])
def test_full_forward_kl_and_gradient_against_float64(distance):
    generator = np.random.default_rng(0)
    teacher = generator.normal(size=(5, 37)).astype(np.float32)
    student = teacher + distance * generator.normal(size=(5, 37)).astype(np.float32)
    p, q = (
        np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(1, keepdims=True)
        for x in (teacher, student)
    )
    logits = torch.tensor(student, requires_grad=True)
    values = full_forward_kl(logits, torch.tensor(teacher))
    values.sum().backward()
    np.testing.assert_allclose(
        values.detach().numpy(), (p * np.log(p / q)).sum(1), rtol=1e-4, atol=5e-7
    )
    np.testing.assert_allclose(logits.grad.numpy(), q - p, rtol=1e-3, atol=1e-7)


def test_the_chunked_head_computes_the_same_full_forward_kl():
    torch.manual_seed(0)
    rows, teacher, head = torch.randn(7, 8), torch.randn(7, 8), torch.randn(30, 8)
    plain, chunked = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    expected = full_forward_kl(plain @ head.T, teacher @ head.T)
    values = row_loss(chunked, head, against_target(full_forward_kl, head), 3, teacher)[:, 0]
    (expected.sum() + values.sum()).backward()
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(chunked.grad, plain.grad, atol=1e-5, rtol=1e-5)


def test_losses_compute_in_float32_whatever_comes_in():
    s, t = torch.tensor([-1.25, -3.5]).bfloat16(), torch.tensor([-0.75, -6.0]).bfloat16()
    for function in (bernoulli_forward_kl, k3):
        torch.testing.assert_close(function(s, t), function(s.float(), t.float()), atol=0, rtol=0)
    assert full_forward_kl(s.unsqueeze(0), t.unsqueeze(0)).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "value", "slope"),
    [
        ("k1", -math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, -math.log(2)),
        ("abs", math.log(2), -1.0),
    ],
)
def test_estimators_by_hand(name, value, slope):
    values, slopes = value_and_slope(
        SINGLE_TOKEN[name], [math.log(0.25)], [math.log(0.5)], min_clamp=None
    )
    assert values[0] == pytest.approx(value, abs=1e-6)
    assert slopes[0] == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_the_min_clamp_bounds_both_sides_of_every_estimator(name):
    values, slopes = value_and_slope(
        SINGLE_TOKEN[name], [-30.0, -5.0], [-1.0, -30.0], min_clamp=-10.0
    )
    expected, _ = value_and_slope(SINGLE_TOKEN[name], [-10.0, -5.0], [-1.0, -10.0], min_clamp=None)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    assert slopes[0] == 0.0


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("k1", lambda s, t: s - t),
        ("k2", lambda s, t: (s - t) ** 2 / 2),
        ("abs", lambda s, t: abs(s - t)),
    ],
)
def test_estimators_and_gradients_against_float64(name, reference):
    q, p = np.array(FAR + NEAR).T
    s, t = (np.log(x).astype(np.float32).astype(np.float64) for x in (q, p))
    values, slopes = value_and_slope(SINGLE_TOKEN[name], s, t, min_clamp=None)
    np.testing.assert_allclose(values, reference(s, t), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(slopes, central_difference(reference, s, t), rtol=1e-3, atol=1e-6)


def test_full_vocabulary_losses_by_hand():
    # p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): TV 1/4, alpha 3/4, KL ln 2 / 4
    p, q = (
        torch.tensor([[0.5, 0.25, 0.25]]).log() + 3.0,
        torch.tensor([[0.25, 0.5, 0.25]]).log() - 1.0,
    )
    kl, w = math.log(2) / 4, math.exp(-2.25)
    expected = {
        "full_forward_kl": kl,
        "tv": 0.25,
        "lk_alpha": -math.log(0.75),
        "lk_lambda": w * kl + (1 - w) * 0.25,
    }
    assert {
        name: float(function(q, p)) for name, function in FULL_VOCABULARY.items()
    } == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", FULL_VOCABULARY)
def test_disjoint_and_equal_distributions_stay_finite(name):
    certain, other = torch.tensor([[200.0, 0.0, 0.0]]), torch.tensor([[0.0, 200.0, 0.0]])
    for teacher in (other, certain):
        logits = certain.clone().requires_grad_()
        value = FULL_VOCABULARY[name](logits, teacher)
        value.sum().backward()
        assert torch.isfinite(value).all()
        assert torch.isfinite(logits.grad).all()
    assert value.item() == pytest.approx(0.0, abs=1e-6)


# -- weights and normalisation ---------------------------------------------------------------------


def test_position_weights():
    assert position_weights(torch.tensor([1, 2, 4]), 0.5).tolist() == [1.0, 0.5, 0.125]
    assert position_weights(torch.tensor([1, 7]), 1.0).tolist() == [1.0, 1.0]


def test_clamped_values_carry_no_gradient():
    values = torch.tensor([-12.0, -3.0, 4.0, 11.0], requires_grad=True)
    clamped = clamp_values(values, 10.0)
    assert clamped.tolist() == [-10.0, -3.0, 4.0, 10.0]
    clamped.sum().backward()
    assert values.grad.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert clamp_values(values, None) is values


def test_combination_by_hand():
    # two response tokens; rejected tokens at offsets 1 and 2, gamma 1/2, weight 2: (f1 + f2 + 2 (r1
    # + r2/2)) / (2 + 2 * 1.5)
    spec = loss_options(rejected_stream_weight=2.0, rejected_position_decay=0.5)
    f = bernoulli_forward_kl(torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -0.25]))
    r = k3(torch.tensor([-0.7, -0.1]), torch.tensor([-3.0, -2.0]))
    loss = combine(f, torch.tensor([1, 2]), r, torch.tensor([1, 2]), StreamTotals(2.0, 1.5), spec)
    expected = (float(f[0]) + float(f[1]) + 2 * (float(r[0]) + 0.5 * float(r[1]))) / (2 + 2 * 1.5)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    # and the values behind f and r, from their definitions
    by_hand = reference_bernoulli(-1.0, -0.5) + reference_bernoulli(-2.0, -0.25)
    by_hand += 2 * (reference_k3(-0.7, -3.0) + 0.5 * reference_k3(-0.1, -2.0))
    assert float(loss) == pytest.approx(by_hand / 5, rel=1e-5)


def test_totals_of_the_worked_example():
    sample = worked_sample()
    plan = planned(sample, block_size=4)
    # six supervised tokens at offsets 1 2 | 1 2 3 | 1, five rejected ones at offsets 2 3 | 1 2 3
    spec = loss_options(response_position_decay=1.0, rejected_position_decay=0.5)
    rejected = 0.5 + 0.25 + 1 + 0.5 + 0.25
    assert stream_totals([plan], [8], spec) == StreamTotals(6.0, rejected)
    assert stream_totals([plan], [8], replace(spec, response_position_decay=0.5)) == StreamTotals(
        3 + 2 * 0.5 + 0.25, rejected
    )
    upstream = replace(spec, convention="draft_opd")
    assert stream_totals([plan, plan], [8, 8], upstream) == StreamTotals(16.0, 2 * rejected)
    assert stream_totals(
        [plan], [8], replace(upstream, response_position_decay=0.5)
    ) == StreamTotals(4.25, rejected)
    assert (
        StreamTotals(6.0, 2.0).denominator(
            loss_options(response_stream_weight=0.5, rejected_stream_weight=3.0)
        )
        == 9.0
    )


@pytest.mark.parametrize("name", ["response_loss", "rejected_loss", "convention"])
def test_an_unknown_name_is_an_error(name):
    with pytest.raises(ValueError, match=f"{name}='mse' is not one of"):
        loss_settings(**{name: "mse"})


@pytest.mark.parametrize("totals", [StreamTotals(0.0, 0.0), StreamTotals(3.0, 2.0)])
def test_nothing_supervised_gives_a_zero_that_can_be_differentiated(totals):
    source = torch.ones(2, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    loss = combine(source[:0], none, source[:0], none, totals, loss_options())
    loss.backward()
    assert loss.item() == 0.0
    assert source.grad.tolist() == [0.0, 0.0]


def test_a_stream_without_weight_has_no_part_in_value_gradient_or_denominator():
    spec = loss_options(rejected_stream_weight=0.0)
    rejected = torch.tensor([5.0], requires_grad=True)
    loss = combine(
        torch.tensor([2.0]),
        torch.tensor([1]),
        rejected,
        torch.tensor([1]),
        StreamTotals(4.0, 9.0),
        spec,
    )
    loss.backward()
    assert loss.item() == 0.5
    assert rejected.grad.tolist() == [0.0]


# -- independence of how a mini-batch is split -----------------------------------------------------


def values_of(
    layout: Layout, draft: torch.Tensor, spec: LossOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token values with a stand-in draft: a table of log-probs by token id and offset."""
    student = -torch.nn.functional.softplus(draft)
    teacher = -0.1 - (layout.response.token % 7) * 0.3
    response = bernoulli_forward_kl(
        student[layout.response.token, layout.response.offset], teacher, spec.log_prob_min_clamp
    )
    rejected = k3(
        student[layout.rejected.token, layout.rejected.offset],
        layout.rejected.teacher_logprob,
        spec.log_prob_min_clamp,
    )
    return response, rejected


def run(items, totals, spec, budget, ranks):
    """Loss, gradient and metrics as ranks with micro-batches of `budget` tokens produce them: each
    rank scales its parts by the number of ranks, and gradients are averaged over ranks.
    """
    loss, gradients, metrics = 0.0, [], []
    for rank in range(ranks):
        draft = torch.linspace(-2, 12, 1000 * 8).reshape(1000, 8).sin().mul(3).requires_grad_()
        (draft.sum() * 0).backward()
        for batch in split_micro_batches(items[rank::ranks], budget):
            layout = build_layout(batch)
            response, rejected = values_of(layout, draft, spec)
            part = combine(
                response, layout.response.offset, rejected, layout.rejected.offset, totals, spec
            )
            (part * ranks).backward()
            loss += part.item()
            metrics.append(loss_metrics(response, rejected, part.detach(), spec))
        gradients.append(draft.grad)
    return loss, torch.stack(gradients).mean(0), reduce_metrics(metrics)


@given(
    batch=st.lists(rollouts(), min_size=1, max_size=5),
    budget=st.integers(1, 120),
    ranks=st.integers(1, 3),
    convention=st.sampled_from(["exact", "draft_opd"]),
    cap=st.integers(0, 2),
)
@settings(UNHURRIED, max_examples=30)
def test_loss_gradient_and_metrics_do_not_depend_on_the_split(
    batch: list[Rollout], budget: int, ranks: int, convention: str, cap: int
):
    spec = loss_options(
        convention=convention,
        response_stream_weight=0.7,
        rejected_stream_weight=1.5,
        response_position_decay=1.0 if convention == "draft_opd" else 0.9,
    )
    samples = [replace(rollout.sample, sample_id=f"0-{i}") for i, rollout in enumerate(batch)]
    plans = [
        planned(sample, block_size=4, convention=convention, max_response_anchors=cap)
        for sample in samples
    ]
    totals = stream_totals(plans, [len(sample.response_ids) for sample in samples], spec)
    items = [
        TrainItem(
            sample_id=s.sample_id, prompt_ids=s.prompt_ids, response_ids=s.response_ids, plan=plan
        )
        for s, plan in zip(samples, plans, strict=True)
    ]
    whole = run(items, totals, spec, 10**9, 1)
    parts = run(items, totals, spec, budget, ranks)
    assert parts[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-7)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-5, atol=1e-7)
    assert parts[2] == pytest.approx(whole[2], rel=1e-5, abs=1e-6)


def test_two_micro_batches_of_equal_counts_share_one_denominator():
    # N_resp = N_rej = 4 over the mini-batch: every part is its own sum / 8
    spec, totals, ones = (
        loss_options(rejected_position_decay=1.0),
        StreamTotals(4.0, 4.0),
        torch.ones(2, dtype=torch.long),
    )
    first = combine(torch.tensor([1.0, 2.0]), ones, torch.tensor([3.0, 4.0]), ones, totals, spec)
    second = combine(torch.tensor([5.0, 6.0]), ones, torch.tensor([7.0, 8.0]), ones, totals, spec)
    assert (float(first), float(second)) == (10 / 8, 26 / 8)


# -- metrics ---------------------------------------------------------------------------------------


def finished(metrics: StepMetrics) -> dict[str, float]:
    return {
        name.removeprefix("actor/distillation/"): value for name, value in metrics.finish().items()
    }


def test_metrics_by_hand():
    response, rejected = torch.tensor([0.5, 12.0]), torch.tensor([10.0, 2.0, 3.0])
    assert finished(
        loss_metrics(response, rejected, torch.tensor(0.25), loss_options(loss_max_clamp=10.0))
    ) == {
        "loss": 0.25,
        "loss_min": 0.5,
        "loss_max": 12.0,
        "abs_loss": 6.25,
        "forward_kl_loss": 6.25,
        "non_rejected_token_loss": 5.25,
        "loss_clamp_fraction": 0.5,
        "rejected_draft_loss": 5.0,
        "rejected_draft_reverse_kl_loss": 5.0,
        "rejected_draft_loss_clamp_fraction": pytest.approx(1 / 3),
        "rejected_draft_token_count": 3,
        "combined_token_count": 5,
    }


def test_what_was_not_measured_is_absent():
    none = torch.zeros(0)
    assert finished(loss_metrics(none, none, torch.tensor(0.0), loss_options())) == {
        "loss": 0.0,
        "combined_token_count": 0,
    }
    names = finished(
        loss_metrics(
            torch.ones(2),
            none,
            torch.tensor(0.1),
            loss_options(response_loss="cross_entropy", loss_max_clamp=None),
        )
    )
    assert "forward_kl_loss" not in names
    assert not [name for name in names if "clamp" in name or "rejected_draft" in name]


def test_metrics_hold_no_graph():
    values = torch.ones(2, requires_grad=True) * 2
    metrics = loss_metrics(values, values, values.sum(), loss_options())
    held = [
        *metrics.sums.values(),
        *metrics.mins.values(),
        *(x for pair in metrics.means.values() for x in pair),
    ]
    assert all(isinstance(value, (int, float)) for value in held)
