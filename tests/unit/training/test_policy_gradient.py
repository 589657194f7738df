"""The policy-gradient form: divergences as advantages, a clipped ratio against the drafting draft,
and a task reward mixed in.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.options import planned, varied
from tests.rollouts import worked_sample
from tests.training import LR, SPEC, make_items, make_trainer, totals_of
from verl_opd.controller.job import load_reward
from verl_opd.errors import ConfigError
from verl_opd.opd.layout import build_layout
from verl_opd.opd.losses import policy_loss
from verl_opd.opd.plan import TrainItem
from verl_opd.training.updates import with_policy_terms

PG = varied(
    SPEC,
    response_loss="k1",
    rejected_stream_weight=0.0,
    policy_gradient=True,
    log_prob_min_clamp=None,
    loss_max_clamp=2.0,
)


def test_the_clipped_objective_by_hand() -> None:
    """Ratios 1.1, 1.5, 1.5, 0.5, 0.5 with c = 0.2: an improvement beyond the clip earns nothing
    more, a harm is never hidden.
    """
    old = torch.zeros(5)
    student = torch.tensor([1.1, 1.5, 1.5, 0.5, 0.5]).log().requires_grad_()
    advantage = torch.tensor([2.0, 2.0, -2.0, 2.0, -2.0])
    values = policy_loss(student, old, advantage, 0.2)
    torch.testing.assert_close(values.detach(), torch.tensor([-2.2, -2.4, 3.0, -1.0, 1.6]))
    values.sum().backward()
    torch.testing.assert_close(student.grad, torch.tensor([-2.2, 0.0, 3.0, -1.0, 0.0]))


def test_the_first_update_follows_the_advantage(models: Path, one_rank: None) -> None:
    """At ratio 1 the gradient is that of -A s: as if each label's log-prob were weighed by its own
    clamped, detached value.
    """
    trainer = make_trainer(models)
    items = make_items()
    scores = trainer.score(items)
    assert {name: len(values) for name, values in scores.items()} == {
        item.sample_id: len(item.plan.response_label) for item in items
    }
    rewarded = [
        replace(
            item,
            old_logprobs=scores[item.sample_id],
            reward=0.5 if item.sample_id == "a" else -0.25,
        )
        for item in items
    ]
    metrics = trainer.update(rewarded, totals_of(items, PG), PG, LR).finish()

    other = make_trainer(models)
    batch = other._forward(items)
    layout, features, hidden = batch.layout, batch.features, batch.hidden
    rows = (
        layout.response.sample * layout.anchors.shape[1] * layout.block_size + layout.response.slot
    )
    log_q = torch.log_softmax(hidden[rows].double() @ other.head.weight.T.double(), 1)
    s = log_q.gather(1, layout.response.token.unsqueeze(1)).squeeze(1)
    target_rows = features.last_hidden.flatten(0, 1)[
        layout.response.sample * layout.input_ids.shape[1] + layout.response.target_row
    ]
    t = (
        torch.log_softmax(target_rows.double() @ other.head.weight.T.double(), 1)
        .gather(1, layout.response.token.unsqueeze(1))
        .squeeze(1)
    )
    torch.testing.assert_close(
        torch.tensor([v for item in items for v in scores[item.sample_id]]).double(),
        s.detach(),
        atol=1e-4,
        rtol=1e-4,
    )
    reward = torch.tensor(
        [
            0.5 if item.sample_id == "a" else -0.25
            for item in items
            for _ in item.plan.response_label
        ]
    )
    advantage = reward - (s - t).detach().clamp(-2.0, 2.0)
    weights = SPEC.options.response_position_decay ** (layout.response.offset - 1).double()
    loss = (-(s - s.detach()).exp() * advantage * weights).sum() / weights.sum()
    loss.backward()
    assert metrics["actor/distillation/loss"] == pytest.approx(loss.item(), rel=1e-4)
    for name, parameter in other.draft.named_parameters():
        torch.testing.assert_close(
            trainer.gradients[name], parameter.grad.full_tensor(), rtol=2e-3, atol=1e-4
        )


def test_rewards_are_centred_over_the_batch() -> None:
    samples = [replace(worked_sample(), sample_id=name) for name in ("a", "b")]
    items = [
        TrainItem(
            sample_id=s.sample_id,
            prompt_ids=s.prompt_ids,
            response_ids=s.response_ids,
            plan=planned(s, block_size=4),
        )
        for s in samples
    ]
    scores = {"a": (-1.0,) * 6, "b": (-2.0,) * 6}
    values = iter([1.0, 3.0])
    made = with_policy_terms(
        items, samples, scores, lambda prompt, response, source: next(values), 0.5
    )
    assert [(item.reward, item.old_logprobs[0]) for item in made] == [(-0.5, -1.0), (0.5, -2.0)]
    assert [item.reward for item in with_policy_terms(items, samples, scores, None, 0.5)] == [
        0.0,
        0.0,
    ]


def test_log_probs_that_do_not_fit_their_labels_are_an_error() -> None:
    sample = worked_sample()
    item = TrainItem(
        sample_id="a",
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        plan=planned(sample, block_size=4),
        old_logprobs=(-1.0,),
    )
    with pytest.raises(ValueError, match="1 old log-probs for 6 labels"):
        build_layout([item])


@pytest.mark.parametrize("name", ["no.such.module:f", "math:no_such_function", "math", ":f"])
def test_a_reward_that_cannot_be_imported_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"opd\.reward="):
        load_reward(name)
