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
from verl_opd.opd.names import BLOCK_LOSSES
from verl_opd.opd.options import LossOptions, check_options
from verl_opd.opd.plan import BlockPlan, verified_proposals


@dataclass(frozen=True)
class LossSettings:
    """How one optimiser step is scored. ValueError for an option that breaks its rule."""

    options: LossOptions
    # divides the target's logits of the response stream, as the engine did when it sampled and
    # scored the rejected stream; the draft, which proposes greedily, stays at 1
    teacher_temperature: float = 1.0

    def __post_init__(self) -> None:
        check_options(self.options)


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
    """s - t [M]. Its gradient does not depend on the target, so it is for the policy-gradient form
    only.
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
    """w KL(p || q) + (1 - w)(1 - alpha) [M] with w = exp(-3 alpha), held constant: mostly the
    divergence while proposals are rejected, mostly acceptance once they are accepted.

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
    """Normalisers over the whole mini-batch and all ranks."""

    # weighted number of supervised tokens; of blocks under a loss of whole blocks
    response: float
    # weighted number of rejected tokens
    rejected: float
    # number of verified proposals, which normalises the confidence stream
    verified: float = 0.0

    def denominator(self, options: LossOptions) -> float:
        return (
            options.response_stream_weight * self.response
            + options.rejected_stream_weight * self.rejected
        )


def stream_totals(
    plans: Sequence[BlockPlan], response_lens: Sequence[int], options: LossOptions
) -> StreamTotals:
    """Count what a mini-batch supervises before it is split over ranks and micro-batches.

    exact: supervised slots, each with its position weight. draft_opd: every response token,
    supervised or not, unless the response stream has a position decay. A loss of whole blocks
    counts blocks under both conventions.
    """
    decided = (
        float(sum(len(verified_proposals(plan)) for plan in plans))
        if options.confidence_weight
        else 0.0
    )
    if options.response_loss in BLOCK_LOSSES:
        return StreamTotals(float(sum(count_chains(plan) for plan in plans)), 0.0, decided)
    if options.convention == "draft_opd" and options.response_position_decay == 1.0:
        response = float(sum(response_lens))
    else:
        response = sum(
            options.response_position_decay ** (offset - 1)
            for plan in plans
            for offset in plan.response_offset
        )
    rejected = sum(
        options.rejected_position_decay ** (offset - 1)
        for plan in plans
        for offset in plan.rejected_offset
    )
    return StreamTotals(float(response), float(rejected), decided)


def clamp_values(values: Tensor, limit: float | None) -> Tensor:
    """Clamp per-token losses to [-limit, limit]; clamped tokens have no gradient."""
    return values if limit is None else values.clamp(-limit, limit)


def combine(
    response_values: Tensor,
    response_offsets: Tensor,
    rejected_values: Tensor,
    rejected_offsets: Tensor,
    totals: StreamTotals,
    options: LossOptions,
) -> Tensor:
    """This micro-batch's part of the loss, a float32 scalar: weighted sums of both streams over the
    global denominator.

    Parts add up over micro-batches and ranks to the loss of the whole mini-batch. A denominator of
    0 gives 0, still attached to the graph.
    """
    denominator = totals.denominator(options)
    # the policy-gradient form clamps its advantages instead
    limit = None if options.policy_gradient else options.loss_max_clamp
    response = (
        clamp_values(response_values, limit)
        * position_weights(response_offsets, options.response_position_decay)
    ).sum()
    rejected = (
        clamp_values(rejected_values, options.loss_max_clamp)
        * position_weights(rejected_offsets, options.rejected_position_decay)
    ).sum()
    numerator = (
        options.response_stream_weight * response + options.rejected_stream_weight * rejected
    )
    return numerator / denominator if denominator > 0 else numerator * 0.0


def confidence_loss(
    logits: Tensor, accepted: Tensor, totals: StreamTotals, options: LossOptions
) -> Tensor:
    """This micro-batch's part of the confidence stream: binary cross-entropy between acceptance
    logits [M] and what the target decided [M] (1 or 0), over all verified proposals of the
    mini-batch. Fully accepted blocks count as well: they are where confidence should be high.
    """
    values = torch.nn.functional.binary_cross_entropy_with_logits(
        logits.float(), accepted.float(), reduction="sum"
    )
    return values * (options.confidence_weight / totals.verified if totals.verified else 0.0)
