"""Block plans and loss settings of tests, from the options that differ from the defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verl_opd.opd.losses import LossSettings
from verl_opd.opd.options import AnchorOptions, LossOptions
from verl_opd.opd.plan import BlockPlan, plan_opd
from verl_opd.opd.trace import RolloutSample


def planned(
    sample: RolloutSample,
    block_size: int,
    *,
    seed: int = 0,
    autoregressive: bool = False,
    **options: Any,
) -> BlockPlan:
    return plan_opd(
        sample,
        AnchorOptions(**options),
        block_size=block_size,
        seed=seed,
        autoregressive=autoregressive,
    )


def loss_options(**options: Any) -> LossOptions:
    """Without the confidence stream, unless it is named."""
    return LossOptions(**{"confidence_weight": 0.0, **options})


def loss_settings(teacher_temperature: float = 1.0, **options: Any) -> LossSettings:
    return LossSettings(loss_options(**options), teacher_temperature)


def varied(
    settings: LossSettings, teacher_temperature: float | None = None, **options: Any
) -> LossSettings:
    """`settings` with other options."""
    return LossSettings(
        replace(settings.options, **options),
        settings.teacher_temperature if teacher_temperature is None else teacher_temperature,
    )
