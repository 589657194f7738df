"""Measurements of one micro-batch, under the names of docs/metrics.md."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from verl_opd.opd.losses import clamp_values
from verl_opd.opd.metrics import StepMetrics
from verl_opd.opd.names import ESTIMATORS, TOP_K_LOSS
from verl_opd.opd.options import LossOptions

_PREFIX = "actor/distillation/"


def loss_metrics(
    response_values: Tensor, rejected_values: Tensor, part: Tensor, options: LossOptions
) -> StepMetrics:
    """Measurements of both streams' per-token values [M]; `part` is what `combine` returned, so
    distillation/loss sums to the global loss.
    """
    metrics, limit = StepMetrics(), options.loss_max_clamp
    metrics.add_sum(_PREFIX + "loss", float(part.detach()))
    response, rejected = response_values.detach(), rejected_values.detach()
    if count := response.numel():
        metrics.add_min(_PREFIX + "loss_min", float(response.min()))
        metrics.add_max(_PREFIX + "loss_max", float(response.max()))
        metrics.add_mean(_PREFIX + "abs_loss", float(response.abs().sum()), count)
        clamped = float(clamp_values(response, limit).sum())
        metrics.add_mean(_PREFIX + "non_rejected_token_loss", clamped, count)
        if options.response_loss in ("forward_kl", "full_forward_kl", TOP_K_LOSS):
            metrics.add_mean(_PREFIX + "forward_kl_loss", float(response.sum()), count)
        if options.response_loss in ESTIMATORS:
            metrics.add_mean(_PREFIX + "reverse_kl_loss", float(response.sum()), count)
        _add_clamped_share(metrics, "loss_clamp_fraction", response, limit)
    if count := rejected.numel():
        clamped = float(clamp_values(rejected, limit).sum())
        metrics.add_mean(_PREFIX + "rejected_draft_loss", clamped, count)
        direction = "reverse" if options.rejected_loss in ESTIMATORS else "forward"
        name = f"rejected_draft_{direction}_kl_loss"
        metrics.add_mean(_PREFIX + name, float(rejected.sum()), count)
        metrics.add_sum(_PREFIX + "rejected_draft_token_count", count)
        _add_clamped_share(metrics, "rejected_draft_loss_clamp_fraction", rejected, limit)
    metrics.add_sum(_PREFIX + "combined_token_count", response.numel() + rejected.numel())
    return metrics


def _add_clamped_share(
    metrics: StepMetrics, name: str, values: Tensor, limit: float | None
) -> None:
    if limit is not None:
        metrics.add_mean(_PREFIX + name, float((values.abs() >= limit).sum()), values.numel())


def mass_metrics(student_mass: Tensor, top_logprobs: Tensor) -> StepMetrics:
    """How much probability draft [M] and teacher (from log-probs [M, k]) put on the teacher's top
    tokens; nothing without forward_kl_topk.
    """
    metrics = StepMetrics()
    if not student_mass.numel():
        return metrics
    masses = {"student_mass": student_mass, "teacher_mass": top_logprobs.exp().sum(-1)}
    for name, mass in masses.items():
        metrics.add_mean(_PREFIX + name, float(mass.sum()), mass.numel())
        metrics.add_min(f"{_PREFIX}{name}_min", float(mass.min()))
        metrics.add_max(f"{_PREFIX}{name}_max", float(mass.max()))
    return metrics


def block_metrics(expected: Tensor, tv: Tensor, branch_rows: int) -> StepMetrics:
    """Measurements of the loss of whole blocks. expected: accepted proposals [count] expected in
    every block; tv: total variations [M] of their positions; branch_rows: how many of these
    positions the target read in a branch.
    """
    metrics = StepMetrics()
    accepted = float(expected.detach().sum())
    metrics.add_mean(_PREFIX + "e2e_expected_accept_length", accepted, len(expected))
    metrics.add_mean(_PREFIX + "tv_distance", float(tv.detach().sum()), len(tv))
    metrics.add_sum(_PREFIX + "tv_block_count", len(expected))
    metrics.add_sum(_PREFIX + "tv_position_count", len(tv))
    metrics.add_sum(_PREFIX + "tv_teacher_branch_position_count", float(branch_rows))
    return metrics


def confidence_metrics(logits: Tensor, accepted: Tensor, family_prefix: str) -> StepMetrics:
    """Acceptance logits [M] against what the target decided [M] (1 or 0).

    family_prefix: what the names of this family's own measurements start with.
    """
    metrics, prefix, count = StepMetrics(), _PREFIX + family_prefix, logits.numel()
    bce = binary_cross_entropy_with_logits(logits.float(), accepted.float(), reduction="sum")
    metrics.add_mean(prefix + "confidence_bce_loss", float(bce), count)
    metrics.add_mean(prefix + "accept_label_mean", float(accepted.sum()), count)
    metrics.add_mean(prefix + "confidence_pred_mean", float(logits.float().sigmoid().sum()), count)
    metrics.add_sum(prefix + "confidence_token_count", count)
    return metrics
