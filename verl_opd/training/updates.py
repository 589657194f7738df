"""What optimiser steps are made of: loss settings of the two stages, mini-batches, and the terms of
the policy-gradient form. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

from verl_opd.config.schema import Config
from verl_opd.opd.losses import LossSettings
from verl_opd.opd.options import LossOptions
from verl_opd.opd.plan import TrainItem, item_rng
from verl_opd.opd.trace import RolloutSample

Reward = Callable[[tuple[int, ...], tuple[int, ...], str], float]


def opd_loss(cfg: Config) -> LossSettings:
    """The two loss streams of on-policy steps."""
    own = {item.name: getattr(cfg.opd, item.name) for item in fields(LossOptions)}
    options = LossOptions(**own)
    if cfg.opd.rejected_first_only:
        options.rejected_position_decay = 1.0
    return LossSettings(options, teacher_temperature=cfg.rollout.temperature or 1.0)


def sft_loss(cfg: Config) -> LossSettings:
    """Whole-block supervision: only the response stream, unclamped, earlier slots weighing more."""
    options = LossOptions(
        response_loss=cfg.sft.loss,
        rejected_loss=cfg.opd.rejected_loss,
        rejected_stream_weight=0.0,
        confidence_weight=0.0,
        response_position_decay=cfg.sft.position_decay,
        rejected_position_decay=1.0,
        loss_max_clamp=None,
        log_prob_min_clamp=None,
    )
    return LossSettings(options)


def with_policy_terms(
    items: Sequence[TrainItem],
    samples: Sequence[RolloutSample],
    scores: Mapping[str, tuple[float, ...]],
    reward: Reward | None,
    weight: float,
) -> list[TrainItem]:
    """`items` with the log-probs of the draft that proposed them and, given a reward, weight *
    (reward - mean over the batch).
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
