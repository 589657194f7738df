"""End-to-end total variation in the training step, against every state written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.drafts import MASK, draft_config, make_layout
from tests.options import varied
from tests.training import BLOCK, LR, SPEC, make_item, make_items, make_trainer, totals_of
from verl_opd.drafts import get_family
from verl_opd.errors import ConfigError
from verl_opd.opd.losses import stream_totals
from verl_opd.opd.plan import TrainItem

FAMILY = get_family("dflash")
TV = varied(SPEC, response_loss="e2e_tv", rejected_stream_weight=0.0, response_position_decay=1.0)


def block_items() -> list[TrainItem]:
    """Rejected proposals are where an engine rejects them: before the response ends."""
    a, b, _, d = make_items()
    return [
        a,
        b,
        make_item("c", 8, 6, [(0, [1])], ((0, 1, 90, -7.5), (2, 2, 33, -9.5), (2, 3, 34, -9.0))),
        d,
    ]


def reference(
    draft: torch.nn.Module, target: torch.nn.Module, items: list[TrainItem], temperature: float
) -> tuple[Tensor, int]:
    """Mean loss over blocks, float64: the target reads each position's own prefix,
    one at a time.
    """
    ids_of, embed = FAMILY.layer_ids(draft_config(BLOCK)), target.get_input_embeddings()
    losses = []
    for item in items:
        ids, plan = list(item.prompt_ids + item.response_ids), item.plan
        with torch.no_grad():
            output = target(torch.tensor([ids]), output_hidden_states=True)
        aux = torch.cat([output.hidden_states[i + 1] for i in ids_of], -1)
        for block, anchor in enumerate(plan.anchors):
            full = len(item.prompt_ids) + anchor
            rejected = {
                o: t
                for b, o, t in zip(
                    plan.rejected_block, plan.rejected_offset, plan.rejected_token, strict=True
                )
                if b == block
            }
            labelled = [
                o
                for b, o in zip(plan.response_block, plan.response_offset, strict=True)
                if b == block
            ]
            first = min(rejected) if rejected else None
            offsets = [*range(1, first), *sorted(rejected)] if rejected else labelled
            slots = torch.tensor([[[ids[full], *[MASK] * (BLOCK - 1)]]])
            hidden = FAMILY.replay(
                draft, aux, embed(slots), make_layout([len(ids)], [[full]], BLOCK)
            )
            q = torch.softmax((hidden[0] @ target.lm_head.weight.T).double(), -1)
            accepted, expected = (
                torch.ones((), dtype=torch.float64),
                torch.zeros((), dtype=torch.float64),
            )
            for offset in offsets:
                known = ids[: full + (offset if first is None else min(offset, first))]
                prefix = known + [rejected[o] for o in range(first or offset, offset)]
                with torch.no_grad():
                    p = torch.softmax(
                        target(torch.tensor([prefix])).logits[0, -1].double() / temperature, -1
                    )
                accepted = accepted * (1 - (p - q[offset]).abs().sum() / 2)
                expected = expected + accepted
            losses.append(1 - expected / len(offsets))
    return torch.stack(losses).mean(), len(losses)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_loss_and_gradient_are_those_of_every_state_written_out(
    models: Path, one_rank: None, temperature: float
) -> None:
    target = AutoModelForCausalLM.from_pretrained(models / "target", dtype=torch.float32)
    draft = FAMILY.build(draft_config(BLOCK), seed=0, init_std=0.02)
    FAMILY.load_weights(draft, str(models / "draft"))
    loss, blocks = reference(draft, target, block_items(), temperature)
    loss.backward()
    spec = varied(TV, teacher_temperature=temperature)
    trainer = make_trainer(models)
    metrics = trainer.update(block_items(), totals_of(block_items(), spec), spec, LR).finish()
    assert metrics["actor/distillation/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["actor/distillation/tv_block_count"] == blocks
    assert metrics["actor/distillation/tv_teacher_branch_position_count"] == 3
    norm = sum(float(parameter.grad.square().sum()) for parameter in draft.parameters()) ** 0.5
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(
            trainer.gradients[name], parameter.grad, rtol=2e-3, atol=1e-3 * norm
        )


def test_micro_batches_and_an_empty_one_do_not_change_it(models: Path, one_rank: None) -> None:
    found: list[tuple[Any, dict[str, Tensor]]] = []
    for budget in (4096, 1):
        trainer = make_trainer(models, max_tokens_per_micro_batch=budget)
        metrics = trainer.update(block_items(), totals_of(block_items(), TV), TV, LR).finish()
        found.append((metrics, trainer.gradients))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4, abs=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-4, atol=1e-6)


def test_a_source_that_cannot_read_branches_is_named(models: Path, one_rank: None) -> None:
    trainer = make_trainer(models)
    blind = SimpleNamespace(reads_branches=False)
    trainer.objective = replace(trainer.objective, branches=blind)
    with pytest.raises(ConfigError, match="e2e_tv needs the target's features of rejected"):
        trainer.update(block_items(), totals_of(block_items(), TV), TV, LR)


def test_blocks_are_what_is_counted() -> None:
    plans = [item.plan for item in block_items()]
    assert stream_totals(plans, [9, 14, 6, 6], TV.options).response == 3 + 4 + 2
    assert (
        stream_totals(plans, [9, 14, 6, 6], varied(TV, convention="draft_opd").options).response
        == 9
    )
