"""Loss settings of the two stages."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest

from verl_opd.config.schema import Config
from verl_opd.opd.options import LossOptions
from verl_opd.training.updates import opd_loss


def test_ranks_get_the_loss_options_of_the_configuration_and_nothing_else():
    cfg = Config()
    cfg.opd.response_loss, cfg.opd.loss_max_clamp = "k2", None
    cfg.opd.reward = "module:function"
    options = opd_loss(cfg).options
    assert type(options) is LossOptions
    assert asdict(options) == {
        item.name: getattr(cfg.opd, item.name) for item in fields(LossOptions)
    }
    cfg.opd.response_loss = "k3"
    assert options.response_loss == "k2", "a copy"


@pytest.mark.parametrize(("first_only", "decay"), [(False, 0.5), (True, 1.0)])
def test_only_the_first_rejected_proposal_does_not_decay(first_only: bool, decay: float):
    cfg = Config()
    cfg.opd.rejected_first_only, cfg.opd.rejected_position_decay = first_only, 0.5
    assert opd_loss(cfg).options.rejected_position_decay == decay


@pytest.mark.parametrize(("sampled", "divisor"), [(0.0, 1.0), (0.7, 0.7)])
def test_the_target_is_scored_at_the_temperature_it_sampled_with(sampled: float, divisor: float):
    cfg = Config()
    cfg.rollout.temperature = sampled
    assert opd_loss(cfg).teacher_temperature == divisor
