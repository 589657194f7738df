"""Divergences per supervised token, and how the two streams add up to one loss. All arithmetic in
float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_opd.opd.chains import count_chains
from verl_opd.opd.metrics import StepMetrics
from verl_opd.opd.names import (
    BLOCK_LOSSES,
    CONVENTIONS,
    ESTIMATORS,
    REJECTED_LOSSES,
    RESPONSE_LOSSES,
    TOP_K_LOSS,
)
from verl_opd.opd.plan import BlockPlan, verified_proposals


@dataclass(frozen=True)
class LossSpec:
    """How the streams are scored and weighed; field meanings as in the `opd` section of the
    configuration.

    log_prob_min_clamp bounds the single-token log-probs of both streams from below (forward_kl,
    k3), of draft and target alike; below it a token carries no gradient. loss_max_clamp bounds
    every per-token value afterwards. teacher_temperature divides the target's logits of the
    response stream, as the engine did when it sampled and scored the rejected stream; the draft,
    which proposes greedily, stays at 1. confidence_weight: of the confidence stream, for drafts
    that have such a head. ValueError for a name that does not exist.
    """

    response_loss: str = "forward_kl"
    rejected_loss: str = "k3"
    response_stream_weight: float = 1.0
    rejected_stream_weight: float = 1.0
    response_position_decay: float = 1.0
    rejected_position_decay: float = 0.8
    loss_max_clamp: float | None = 10.0
    log_prob_min_clamp: float | None = -10.0
    convention: str = "exact"
    teacher_temperature: float = 1.0
    policy_gradient: bool = False
    clip_ratio: float = 0.2
    confidence_weight: float = 0.0

    def __post_init__(self) -> None:
        known = {
            "response_loss": RESPONSE_LOSSES,
            "rejected_loss": REJECTED_LOSSES,
            "convention": CONVENTIONS,
        }
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {', '.join(choices)}")


SingleToken = Callable[[Tensor, Tensor, float | None], Tensor]
FullVocabulary = Callable[[Tensor, Tensor], Tensor]


def _bounded(student: Tensor, teacher: Tensor, min_clamp: float | None) -> tuple[Tensor, Tensor]:
    s, t = student.float(), teacher.float()
    return (s, t) if min_clamp is None else (s.clamp(min=min_clamp), t.clamp(min=min_clamp))


def bernoulli_forward_kl(
    student: Tensor, teacher: Tensor, min_clamp: float | None = None
) -> Tensor:
    """KL between the two-outcome distributions {this token, anything else} of teacher and student,
    from log-probs [M].

    The "local" forward KL of Draft-OPD, p_t (t - s) + (1 - p_t)(log(1 - p_t) - log(1 - p_s)), on
    log-probs clamped to [min_clamp, log(1 - eps)]; min_clamp None means -80.
    """
    low, high = (
        -80.0 if min_clamp is None else min_clamp,
        math.log1p(-torch.finfo(torch.float32).eps),
    )
    s, t = student.float().clamp(low, high), teacher.float().clamp(low, high)
    miss_s, miss_t = -torch.expm1(s), -torch.expm1(t)  # 1 - p, exact also where p is near 1
    return t.exp() * (t - s) + miss_t * (miss_t.log() - miss_s.log())


def k1(student: Tensor, teacher: Tensor, min_clamp: float | None = None) -> Tensor:
    """s - t [M]. Its gradient does not know the target, so it is for the
    policy-gradient form only.
    """
    s, t = _bounded(student, teacher, min_clamp)
    return s - t


def k2(student: Tensor, teacher: Tensor, min_clamp: float | None = None) -> Tensor:
    """(s - t)^2 / 2 [M]."""
    s, t = _bounded(student, teacher, min_clamp)
    return 0.5 * (s - t).square()


def k3(student: Tensor, teacher: Tensor, min_clamp: float | None = None) -> Tensor:
    """Estimator of the reverse KL on one token, from log-probs [M]: exp(d) - d - 1 with d = clamp(t
    - s, -20, 20), clamped to [-10, 10].
    """
    s, t = _bounded(student, teacher, min_clamp)
    d = (t - s).clamp(-20.0, 20.0)
    return (torch.expm1(d) - d).clamp(-10.0, 10.0)


def absolute(student: Tensor, teacher: Tensor, min_clamp: float | None = None) -> Tensor:
    """|s - t| [M]."""
    s, t = _bounded(student, teacher, min_clamp)
    return (s - t).abs()


SINGLE_TOKEN: dict[str, SingleToken] = {
    "forward_kl": bernoulli_forward_kl,
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
}


def policy_loss(student: Tensor, old: Tensor, advantage: Tensor, clip_ratio: float) -> Tensor:
    """PPO's clipped objective per token [M]: -min(r A, clip(r, 1 - c, 1 + c) A) with r = exp(s -
    s_old); gradient into `student` only.
    """
    ratio = (student.float() - old.float()).clamp(-20.0, 20.0).exp()
    a = advantage.detach()
    return -torch.minimum(ratio * a, ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * a)


def _log_probs(student_logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.log_softmax(student_logits.float(), dim=-1), torch.log_softmax(
        teacher_logits.float(), dim=-1
    )


def full_forward_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(target || draft) over the whole vocabulary, from finite logits [M, V] -> [M]; callers may
    chunk M.
    """
    log_q, log_p = _log_probs(student_logits, teacher_logits)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def topk_forward_kl(
    student_logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, min_clamp: float | None = None
) -> tuple[Tensor, Tensor]:
    """sum over the teacher's k likeliest tokens of p (log p - log q), at least 0 [M]; and the
    student's mass on them [M], without gradient.

    student_logits [M, V], top_ids [M, k] (-1: a token that the draft cannot propose, left out),
    top_logprobs [M, k]. Both log-probs are clamped to min_clamp first.
    """
    known = top_ids >= 0
    log_q = torch.log_softmax(student_logits.float(), dim=-1).gather(1, top_ids.clamp(min=0))
    s, t = _bounded(log_q, top_logprobs, min_clamp)
    counts = known & (t > -math.inf)  # an impossible token costs nothing
    values = torch.where(counts, t.exp() * (torch.where(counts, t, 0.0) - s), 0.0)
    return values.sum(-1).clamp(min=0.0), (known * log_q.detach().exp()).sum(-1)


def total_variation(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """1/2 sum |p - q| [M]: the probability that a sampled proposal is rejected (lossless acceptance
    is 1 - TV).
    """
    log_q, log_p = _log_probs(student_logits, teacher_logits)
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def acceptance(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """sum min(p, q) [M], the acceptance probability alpha of LK losses (arXiv 2602.23881)."""
    log_q, log_p = _log_probs(student_logits, teacher_logits)
    return torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


def lk_alpha(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """-log alpha [M]; 0, without gradient, where alpha is 0."""
    alpha = acceptance(student_logits, teacher_logits)
    return torch.where(alpha > 0, -alpha.clamp(min=torch.finfo(torch.float32).tiny).log(), 0.0)


def lk_lambda(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """w KL(p || q) + (1 - w)(1 - alpha) [M] with w = exp(-3 alpha), held constant: divergence while
    proposals fail, acceptance once they hold.

    w follows each token's own alpha. The paper takes the mean alpha of a batch, which would make
    the result depend on how a batch is split.
    """
    alpha = acceptance(student_logits, teacher_logits)
    weight = torch.exp(-3.0 * alpha.detach())
    return weight * full_forward_kl(student_logits, teacher_logits) + (1 - weight) * (1 - alpha)


FULL_VOCABULARY: dict[str, FullVocabulary] = {
    "full_forward_kl": full_forward_kl,
    "tv": total_variation,
    "lk_alpha": lk_alpha,
    "lk_lambda": lk_lambda,
}


def position_weights(offsets: Tensor, decay: float) -> Tensor:
    """decay^(offset - 1), float32."""
    return torch.pow(decay, (offsets - 1).float())


@dataclass(frozen=True)
class StreamTotals:
    """Normalisers over the whole mini-batch and all ranks: weighted token counts of the two
    streams, and of verified proposals.
    """

    response: float
    rejected: float
    verified: float = 0.0

    def denominator(self, spec: LossSpec) -> float:
        return (
            spec.response_stream_weight * self.response
            + spec.rejected_stream_weight * self.rejected
        )


def stream_totals(
    plans: Sequence[BlockPlan], response_lens: Sequence[int], spec: LossSpec
) -> StreamTotals:
    """Count what a mini-batch supervises before it is split over ranks and micro-batches.

    exact: supervised slots, each with its position weight. draft_opd: every response token,
    supervised or not, unless the response stream has a position decay. A loss of whole blocks
    counts blocks, under either.
    """
    decided = (
        float(sum(len(verified_proposals(plan)) for plan in plans))
        if spec.confidence_weight
        else 0.0
    )
    if spec.response_loss in BLOCK_LOSSES:
        return StreamTotals(float(sum(count_chains(plan) for plan in plans)), 0.0, decided)
    if spec.convention == "draft_opd" and spec.response_position_decay == 1.0:
        response = float(sum(response_lens))
    else:
        response = sum(
            spec.response_position_decay ** (offset - 1)
            for plan in plans
            for offset in plan.response_offset
        )
    rejected = sum(
        spec.rejected_position_decay ** (offset - 1)
        for plan in plans
        for offset in plan.rejected_offset
    )
    return StreamTotals(float(response), float(rejected), decided)


def clamp_values(values: Tensor, limit: float | None) -> Tensor:
    """Clamp per-token losses to [-limit, limit]; clamped tokens carry no gradient."""
    return values if limit is None else values.clamp(-limit, limit)


def combine(
    response_values: Tensor,
    response_offsets: Tensor,
    rejected_values: Tensor,
    rejected_offsets: Tensor,
    totals: StreamTotals,
    spec: LossSpec,
) -> Tensor:
    """This micro-batch's part of the loss, a float32 scalar: weighted sums of both streams over the
    global denominator.

    Parts add up over micro-batches and ranks to the loss of the whole mini-batch. A denominator of
    0 gives 0, still attached to the graph.
    """
    denominator = totals.denominator(spec)
    limit = (
        None if spec.policy_gradient else spec.loss_max_clamp
    )  # there it bounds the advantages already
    response = (
        clamp_values(response_values, limit)
        * position_weights(response_offsets, spec.response_position_decay)
    ).sum()
    rejected = (
        clamp_values(rejected_values, spec.loss_max_clamp)
        * position_weights(rejected_offsets, spec.rejected_position_decay)
    ).sum()
    numerator = spec.response_stream_weight * response + spec.rejected_stream_weight * rejected
    return numerator / denominator if denominator > 0 else numerator * 0.0


def loss_metrics(
    response_values: Tensor, rejected_values: Tensor, part: Tensor, spec: LossSpec
) -> StepMetrics:
    """Measurements of one micro-batch; `part` is what `combine` returned, so distillation/loss sums
    to the global loss.
    """
    metrics, prefix = StepMetrics(), "actor/distillation/"
    metrics.add_sum(prefix + "loss", float(part.detach()))
    response, rejected = response_values.detach(), rejected_values.detach()
    if response.numel():
        metrics.add_min(prefix + "loss_min", float(response.min()))
        metrics.add_max(prefix + "loss_max", float(response.max()))
        metrics.add_mean(prefix + "abs_loss", float(response.abs().sum()), response.numel())
        clamped = clamp_values(response, spec.loss_max_clamp)
        metrics.add_mean(prefix + "non_rejected_token_loss", float(clamped.sum()), response.numel())
        if spec.response_loss in ("forward_kl", "full_forward_kl", TOP_K_LOSS):
            metrics.add_mean(prefix + "forward_kl_loss", float(response.sum()), response.numel())
        if spec.response_loss in ESTIMATORS:
            metrics.add_mean(prefix + "reverse_kl_loss", float(response.sum()), response.numel())
        if spec.loss_max_clamp is not None:
            metrics.add_mean(
                prefix + "loss_clamp_fraction",
                float((response.abs() >= spec.loss_max_clamp).sum()),
                response.numel(),
            )
    if rejected.numel():
        clamped = clamp_values(rejected, spec.loss_max_clamp)
        metrics.add_mean(prefix + "rejected_draft_loss", float(clamped.sum()), rejected.numel())
        direction = "reverse" if spec.rejected_loss in ESTIMATORS else "forward"
        metrics.add_mean(
            f"{prefix}rejected_draft_{direction}_kl_loss", float(rejected.sum()), rejected.numel()
        )
        metrics.add_sum(prefix + "rejected_draft_token_count", rejected.numel())
        if spec.loss_max_clamp is not None:
            share = float((rejected.abs() >= spec.loss_max_clamp).sum())
            metrics.add_mean(prefix + "rejected_draft_loss_clamp_fraction", share, rejected.numel())
    metrics.add_sum(prefix + "combined_token_count", response.numel() + rejected.numel())
    return metrics


def mass_metrics(student_mass: Tensor, top_logprobs: Tensor) -> StepMetrics:
    """How much probability draft and teacher put on the teacher's top tokens; nothing without
    forward_kl_topk.
    """
    metrics, prefix = StepMetrics(), "actor/distillation/"
    for name, mass in (
        ("student_mass", student_mass),
        ("teacher_mass", top_logprobs.exp().sum(-1)),
    ):
        if student_mass.numel():
            metrics.add_mean(prefix + name, float(mass.sum()), mass.numel())
            metrics.add_min(f"{prefix}{name}_min", float(mass.min()))
            metrics.add_max(f"{prefix}{name}_max", float(mass.max()))
    return metrics


def confidence_loss(
    logits: Tensor, accepted: Tensor, totals: StreamTotals, spec: LossSpec
) -> Tensor:
    """This micro-batch's part of the confidence stream: binary cross-entropy between acceptance
    logits [M] and what the target decided [M] (1 or 0), over all verified proposals of the
    mini-batch. Fully accepted blocks count as well: they are where confidence should be high.
    """
    values = torch.nn.functional.binary_cross_entropy_with_logits(
        logits.float(), accepted.float(), reduction="sum"
    )
    return values * (spec.confidence_weight / totals.verified if totals.verified else 0.0)


def confidence_metrics(logits: Tensor, accepted: Tensor) -> StepMetrics:
    metrics, prefix, count = StepMetrics(), "actor/distillation/dspark_", logits.numel()
    bce = torch.nn.functional.binary_cross_entropy_with_logits(
        logits.float(), accepted.float(), reduction="sum"
    )
    metrics.add_mean(prefix + "confidence_bce_loss", float(bce), count)
    metrics.add_mean(prefix + "accept_label_mean", float(accepted.sum()), count)
    metrics.add_mean(prefix + "confidence_pred_mean", float(logits.float().sigmoid().sum()), count)
    metrics.add_sum(prefix + "confidence_token_count", count)
    return metrics
