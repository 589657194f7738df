"""What optimiser steps are made of: loss settings of the two phases, mini-batches, and the terms of
the policy-gradient form. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from verl_opd.config.schema import Config
from verl_opd.opd.losses import LossSpec
from verl_opd.opd.plan import TrainItem, item_rng
from verl_opd.opd.trace import RolloutSample

Reward = Callable[[tuple[int, ...], tuple[int, ...], str], float]


def opd_loss_spec(cfg: Config) -> LossSpec:
    """The two loss streams of on-policy steps."""
    opd = cfg.opd
    return LossSpec(
        response_loss=opd.response_loss,
        rejected_loss=opd.rejected_loss,
        response_stream_weight=opd.response_stream_weight,
        rejected_stream_weight=opd.rejected_stream_weight,
        response_position_decay=opd.response_position_decay,
        rejected_position_decay=1.0 if opd.rejected_first_only else opd.rejected_position_decay,
        loss_max_clamp=opd.loss_max_clamp,
        log_prob_min_clamp=opd.log_prob_min_clamp,
        convention=opd.convention,
        teacher_temperature=cfg.rollout.temperature or 1.0,
        policy_gradient=opd.policy_gradient,
        clip_ratio=opd.clip_ratio,
        confidence_weight=opd.confidence_weight,
    )


def warmup_loss_spec(cfg: Config) -> LossSpec:
    """Whole-block supervision: only the response stream, unclamped, earlier slots weighing more."""
    return LossSpec(
        response_loss=cfg.sft.loss,
        rejected_loss=cfg.opd.rejected_loss,
        response_stream_weight=1.0,
        rejected_stream_weight=0.0,
        response_position_decay=cfg.sft.position_decay,
        rejected_position_decay=1.0,
        loss_max_clamp=None,
        log_prob_min_clamp=None,
        convention="exact",
    )


def with_policy_terms(
    items: Sequence[TrainItem],
    samples: Sequence[RolloutSample],
    scores: Mapping[str, tuple[float, ...]],
    reward: Reward | None,
    weight: float,
) -> list[TrainItem]:
    """`items` with the drafting draft's log-probs and, given a reward, weight * (reward - mean over
    the batch).
    """
    rewards = [
        reward(sample.prompt_ids, sample.response_ids, sample.data_source) if reward else 0.0
        for sample in samples
    ]
    mean = sum(rewards) / len(rewards)
    return [
        replace(item, old_logprobs=scores[item.sample_id], reward=weight * (value - mean))
        for item, value in zip(items, rewards, strict=True)
    ]


def mini_batches(count: int, parts: int, epochs: int, seed: int, step: int) -> list[list[int]]:
    """Indices of `count` samples in at most `parts` mini-batches per pass: in turn the first time,
    shuffled (by seed and step) afterwards.
    """
    parts = min(parts, count)
    batches: list[list[int]] = []
    for epoch in range(epochs):
        order = (
            item_rng(seed, step, f"epoch {epoch}").permutation(count).tolist()
            if epoch
            else list(range(count))
        )
        batches.extend(order[part::parts] for part in range(parts))
    return batches
