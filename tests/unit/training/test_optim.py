"""Learning rates by hand, and which parameters decay."""

from __future__ import annotations

import math

import pytest
import torch

from tests.drafts import build_draft, draft_config
from verl_opd.config.schema import OptimConfig
from verl_opd.training.optim import build_optimizer, lr_at


def schedule(total: int, **keys: float) -> list[float]:
    optim = OptimConfig(**{"lr": 1.0, **keys})
    return [lr_at(step, total, optim) for step in range(total)]


def test_warm_up_then_cosine() -> None:
    # 2 warm-up steps of 10 (ceil of 0.15 * 10), then cos over 8 steps
    cosine = [0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]
    assert schedule(10, lr_warmup_ratio=0.15) == pytest.approx([0.5, 1.0, *cosine])


def test_no_warm_up_starts_at_the_full_rate() -> None:
    assert schedule(4, lr_warmup_ratio=0.0) == pytest.approx(
        [1.0, 0.5 * (1 + math.sqrt(0.5)), 0.5, 0.5 * (1 - math.sqrt(0.5))]
    )


def test_the_floor_is_a_share_of_the_rate() -> None:
    optim = OptimConfig(lr=2.0, min_lr_ratio=0.25, lr_warmup_ratio=0.0)
    assert lr_at(5, 10, optim) == pytest.approx(2.0 * (0.25 + 0.75 * 0.5))
    assert lr_at(10, 10, optim) == lr_at(50, 10, optim) == pytest.approx(0.5)


def test_another_base_rate_scales_the_schedule() -> None:
    optim = OptimConfig(lr=2.0, min_lr_ratio=0.1, lr_warmup_ratio=0.2)
    assert [lr_at(step, 10, optim, 0.5) for step in range(10)] == pytest.approx(
        [lr_at(step, 10, optim) / 4 for step in range(10)]
    )


@pytest.mark.parametrize(("total", "ratio"), [(1, 0.05), (1, 0.0), (3, 1.0)])
def test_short_runs_never_train_at_zero(total: int, ratio: float) -> None:
    rates = schedule(total, lr_warmup_ratio=ratio)
    assert min(rates) > 0
    assert max(rates) == 1.0


def test_only_matrices_decay() -> None:
    draft = build_draft(draft_config())
    optimizer = build_optimizer(draft, OptimConfig(lr=0.1, weight_decay=0.5, betas=(0.8, 0.9)))
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    for parameter in draft.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in draft.named_parameters():
        share = 1.0 if name.endswith("norm.weight") else 1 - 0.1 * 0.5
        torch.testing.assert_close(parameter.detach(), before[name] * share)
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}


def test_given_state_is_what_adamw_would_make() -> None:
    ours, theirs = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    plain = torch.optim.AdamW(theirs.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer = build_optimizer(ours, OptimConfig())
    for step in range(3):
        for module, stepper in ((ours, optimizer), (theirs, plain)):
            stepper.zero_grad()
            module(torch.full((1, 3), 1.0 + step)).square().sum().backward()
            stepper.step()
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)
