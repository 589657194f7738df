"""The training step against a plain reference, and its invariance to how a mini-batch is split over
micro-batches and ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.drafts import MASK, draft_config, make_layout, target_config
from tests.options import varied
from tests.training import (
    BLOCK,
    LR,
    SPEC,
    ObservedTrainer,
    Ranks,
    calm,
    make_config,
    make_item,
    make_items,
    make_trainer,
    totals_of,
)
from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import get_family
from verl_opd.drafts.files import write_draft
from verl_opd.errors import ConfigError
from verl_opd.opd.layout import split_micro_batches
from verl_opd.opd.losses import LossSettings, StreamTotals
from verl_opd.opd.metrics import StepMetrics, reduce_metrics
from verl_opd.opd.plan import TrainItem
from verl_opd.targets.head import TargetHead
from verl_opd.targets.hf import HFSource
from verl_opd.training.objective import Objective
from verl_opd.training.trainer import DraftTrainer

FAMILY = get_family("dflash")
# sample indices per rank, micro-batch budget
SPLITS: dict[str, tuple[list[list[int]], int]] = {
    "even": ([[0, 3], [1, 2]], 4096),
    "rejections_on_one_rank": ([[0, 2], [1, 3]], 4096),
    "a_rank_without_samples": ([[0, 1, 2, 3], []], 4096),
    "a_rank_with_more_micro_batches": ([[0, 1, 2], [3]], 1),
}


@dataclass
class Outcome:
    """After one update: merged metrics and gradients; after two: weights."""

    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def update_twice(
    trainer: ObservedTrainer, items: list[TrainItem], totals: StreamTotals
) -> tuple[StepMetrics, Any, Any]:
    metrics = trainer.update(items, totals, SPEC, LR)
    gradients = trainer.gradients
    trainer.update(items, totals, SPEC, LR)
    return metrics, gradients, trainer.weights()


def poisoned() -> TrainItem:
    return make_item("poisoned", 4, 6, [(0, [1])], ((0, 1, 9, math.nan),))


class Overflowing(Objective):
    """Its loss is as ever and its gradient infinite."""

    def loss(self, *args: Any) -> Tensor:
        loss = super().loss(*args)
        return loss + (loss - loss.detach()).sqrt()


def two_ranks(root: Path, rank: int, world: int) -> dict[str, Any]:
    items, results = make_items(), {}
    for name, (shares, budget) in SPLITS.items():
        trainer = make_trainer(root, rank, world, max_tokens_per_micro_batch=budget)
        results[name] = update_twice(trainer, [items[i] for i in shares[rank]], totals_of(items))
    trainer = calm(ObservedTrainer(make_config(root), draft_config(BLOCK), rank, world, "cpu"))
    results["nan_loss"] = trainer.update(
        [poisoned()] if rank else items, totals_of([*items, poisoned()]), SPEC, LR
    )
    objective = trainer.objective
    trainer.objective = Overflowing(**vars(objective)) if rank == 1 else objective
    results["infinite_gradient"] = trainer.update(items[rank::2], totals_of(items), SPEC, LR)
    trainer.objective = objective
    results["after_skips"] = update_twice(trainer, items[rank::2], totals_of(items))
    before = trainer.weights()
    metrics = trainer.update([], totals_of([]), SPEC, LR)
    results["nothing"] = (metrics, before, trainer.weights())
    return results


@pytest.fixture(scope="module")
def expected(models: Path, one_rank: None) -> Outcome:
    """All samples in one micro-batch of one rank."""
    items = make_items()
    metrics, gradients, weights = update_twice(make_trainer(models), items, totals_of(items))
    return Outcome(reduce_metrics([metrics]), gradients, weights)


@pytest.fixture(scope="module")
def sharded(models: Path) -> list[dict[str, Any]]:
    """Every two-rank scenario, from one pair of processes."""
    return Ranks(models).run(two_ranks, 2)


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
    assert found.gradients.keys() == expected.gradients.keys() == found.weights.keys()
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(
            found.weights[name], expected.weights[name], rtol=1e-5, atol=1e-5
        )


def merged(parts: list[tuple[StepMetrics, Any, Any]]) -> Outcome:
    (_, gradients, weights), (_, other_gradients, other_weights) = parts
    for name in gradients:
        assert torch.equal(gradients[name], other_gradients[name])
        assert torch.equal(weights[name], other_weights[name])
    return Outcome(reduce_metrics([part[0] for part in parts]), gradients, weights)


# -- what an update computes -----------------------------------------------------------------------


def plain_loss(
    draft: torch.nn.Module, target: torch.nn.Module, items: list[TrainItem], spec: LossSettings
) -> Tensor:
    """The loss written out token by token: one block at a time, no padding, no trimming, all
    logits, float64.
    """
    layer_ids, embed = FAMILY.layer_ids(draft_config(BLOCK)), target.get_input_embeddings()
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for item in items:
        ids = torch.tensor([item.prompt_ids + item.response_ids])
        with torch.no_grad():
            output = target(ids, output_hidden_states=True)
        aux = torch.cat([output.hidden_states[i + 1] for i in layer_ids], -1)
        log_p = torch.log_softmax(output.logits[0].double() / spec.teacher_temperature, -1)
        plan, log_q = item.plan, []
        for anchor in plan.anchors:
            full = len(item.prompt_ids) + anchor
            slots = torch.tensor([[[int(ids[0, full]), *[MASK] * (BLOCK - 1)]]])
            hidden = FAMILY.replay(
                draft, aux, embed(slots), make_layout([ids.shape[1]], [[full]], BLOCK)
            )
            log_q.append(torch.log_softmax((hidden[0] @ target.lm_head.weight.T).double(), -1))
        for block, offset, label in zip(
            plan.response_block, plan.response_offset, plan.response_label, strict=True
        ):
            row = log_p[len(item.prompt_ids) + plan.anchors[block] + offset - 1]
            p, q = row.exp(), log_q[block][offset].exp()
            if spec.options.response_loss == "forward_kl":
                value = (
                    p[label] * (p[label] / q[label]).log()
                    + (1 - p[label]) * ((1 - p[label]) / (1 - q[label])).log()
                )
            elif spec.options.response_loss == "full_forward_kl":
                value = (p * (p / q).log()).sum()
            elif spec.options.response_loss == "tv":
                value = (p - q).abs().sum() / 2
            elif spec.options.response_loss == "k2":
                value = (q[label] / p[label]).log() ** 2 / 2
            else:
                value = -q[label].log()
            total = total + value * spec.options.response_position_decay ** (offset - 1)
            weights += spec.options.response_position_decay ** (offset - 1)
        rejected = zip(
            plan.rejected_block,
            plan.rejected_offset,
            plan.rejected_token,
            plan.rejected_logprob,
            strict=True,
        )
        for block, offset, token, logprob in rejected:
            ratio = logprob - log_q[block][offset][token]
            assert ratio.exp() - ratio - 1 < 10, "the estimator clamps larger values"
            total = total + (ratio.exp() - ratio - 1) * spec.options.rejected_position_decay ** (
                offset - 1
            )
            weights += spec.options.rejected_position_decay ** (offset - 1)
    return total / weights


@pytest.mark.parametrize(
    ("response_loss", "temperature"),
    [
        *((name, 1.0) for name in ("forward_kl", "full_forward_kl", "cross_entropy", "tv", "k2")),
        ("forward_kl", 0.6),
        ("full_forward_kl", 0.6),
    ],
)
def test_an_update_has_the_gradient_of_the_plain_loss(
    models: Path, one_rank: None, response_loss: str, temperature: float
) -> None:
    spec = varied(
        SPEC,
        response_loss=response_loss,
        loss_max_clamp=None,
        log_prob_min_clamp=None,
        teacher_temperature=temperature,
    )
    target = AutoModelForCausalLM.from_pretrained(models / "target", dtype=torch.float32)
    draft = FAMILY.build(draft_config(BLOCK), seed=0, init_std=0.02)
    FAMILY.load_weights(draft, str(models / "draft"))
    loss = plain_loss(draft, target, make_items(), spec)
    loss.backward()
    trainer = make_trainer(models)
    metrics = trainer.update(make_items(), totals_of(make_items(), spec), spec, LR)
    assert metrics.finish()["actor/distillation/loss"] == pytest.approx(loss.item(), rel=1e-4)
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in draft.parameters()))
    assert metrics.finish()["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(
            trainer.gradients[name], parameter.grad, rtol=2e-3, atol=1e-4 * norm
        )


@pytest.mark.parametrize(
    "training",
    [
        {"max_tokens_per_micro_batch": 1},
        {"max_tokens_per_micro_batch": 60},
        {"lm_head_chunk_size": 3},
    ],
)
def test_the_result_does_not_depend_on_the_micro_batches(
    models: Path, expected: Outcome, training: dict[str, int]
) -> None:
    items = make_items()
    if budget := training.get("max_tokens_per_micro_batch"):
        assert 1 < len(split_micro_batches(items, budget)) <= 4
    metrics, gradients, weights = update_twice(
        make_trainer(models, **training), items, totals_of(items)
    )
    assert_same(Outcome(reduce_metrics([metrics]), gradients, weights), expected)


def test_padding_does_not_change_the_result(models: Path, expected: Outcome) -> None:
    """A long sample in the same micro-batch that supervises nothing."""
    items = [*make_items(), make_item("long", 30, 40, [])]
    metrics, gradients, weights = update_twice(make_trainer(models), items, totals_of(items))
    assert_same(Outcome(reduce_metrics([metrics]), gradients, weights), expected)


@pytest.mark.parametrize("name", SPLITS)
def test_the_result_does_not_depend_on_the_ranks(
    sharded: list[dict[str, Any]], expected: Outcome, name: str
) -> None:
    """I1, I2: idle ranks join every collective; gradients do not shrink with the
    number of ranks.
    """
    assert_same(merged([rank[name] for rank in sharded]), expected)


# -- what an update rejects ------------------------------------------------------------------------


def test_what_is_not_finite_on_one_rank_skips_the_step_on_all(
    sharded: list[dict[str, Any]], expected: Outcome
) -> None:
    nan, infinite = (
        reduce_metrics([rank[name] for rank in sharded])
        for name in ("nan_loss", "infinite_gradient")
    )
    assert nan["actor/skipped_steps"] == infinite["actor/skipped_steps"] == 1
    assert (
        "actor/distillation/loss" not in nan
    )  # skipped and counted, and no NaN in anyone's dashboard
    assert math.isfinite(infinite["actor/distillation/loss"])
    assert "actor/grad_norm" not in infinite
    assert_same(
        merged([rank["after_skips"] for rank in sharded]), expected
    )  # neither weights nor moments remember the two


def test_nothing_supervised_anywhere_skips_the_step(sharded: list[dict[str, Any]]) -> None:
    """I1."""
    for metrics, before, after in (rank["nothing"] for rank in sharded):
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert "actor/distillation/forward_kl_loss" not in metrics.finish()
        assert metrics.finish()["actor/distillation/loss"] == 0
    assert reduce_metrics([rank["nothing"][0] for rank in sharded])["actor/skipped_steps"] == 1


def test_the_gradient_is_clipped_and_its_norm_reported_before(
    models: Path, one_rank: None, expected: Outcome
) -> None:
    trainer = make_trainer(models)
    trainer.cfg.optim.grad_clip = 1e-3
    seen: list[float] = []
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(
            sum(
                float(p.grad.full_tensor().square().sum())
                for g in optimizer.param_groups
                for p in g["params"]
            )
        )
    )
    metrics = trainer.update(make_items(), totals_of(make_items()), SPEC, LR).finish()
    assert math.sqrt(seen[0]) == pytest.approx(1e-3, rel=1e-3)
    assert metrics["actor/grad_norm"] == pytest.approx(
        expected.metrics["actor/grad_norm"], rel=1e-5
    )
    assert metrics["actor/grad_norm"] > 0.01
    assert (metrics["actor/lr"], metrics["actor/skipped_steps"]) == (LR, 0)


# -- what stays, what moves ------------------------------------------------------------------------


def test_the_target_is_frozen(models: Path, one_rank: None) -> None:
    trainer = make_trainer(models, feature_cache_mb=0)
    ids, lengths = torch.arange(10).unsqueeze(0), torch.tensor([10])
    before, head = trainer.source.features(ids, lengths), trainer.head.weight.clone()
    trainer.update(make_items(), totals_of(make_items()), SPEC, LR)
    after = trainer.source.features(ids, lengths)
    assert torch.equal(before.aux, after.aux)
    assert torch.equal(before.last_hidden, after.last_hidden)
    assert torch.equal(head, trainer.head.weight)
    assert trainer.head.weight.grad is None
    assert not trainer.head.weight.requires_grad


class Padded(HFSource):
    """A target whose embedding has three rows more than its LM head."""

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(path, **options)
        table, weight = self.head.embedding, self.head.weight
        self.head = TargetHead(torch.cat([table, table.new_ones(3, table.shape[1])]), weight)


def test_a_drafts_copy_of_the_embedding_is_compared_without_padding_rows(
    models: Path, one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file repeats the rows that the LM head has, one per token of the vocabulary."""
    family = get_family("eagle3")
    config = family.derive_config(
        target_config(LlamaConfig), DraftConfig(target_layer_ids=[1, 3, 5]), BLOCK - 1
    )
    cfg = make_config(models)
    table = HFSource(cfg.target.path, dtype="float32", layer_ids=[]).head.embedding
    changed = table.clone()
    changed[-1] += 1.0
    weights = family.build(config, seed=1, init_std=0.02).state_dict()
    monkeypatch.setattr("verl_opd.training.trainer.HFSource", Padded)
    cfg.draft.family = "eagle3"
    for name, copy in (("same", table), ("other", changed)):
        write_draft({**weights, "embed_tokens.weight": copy}, config, tmp_path / name)
    cfg.draft.path = str(tmp_path / "same")
    DraftTrainer(cfg, config, 0, 1, "cpu")
    cfg.draft.path = str(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight differs from the target's"):
        DraftTrainer(cfg, config, 0, 1, "cpu")


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_updates_fit_the_draft_to_its_samples(
    models: Path, one_rank: None, param_dtype: str
) -> None:
    trainer = make_trainer(models, param_dtype=param_dtype, gradient_checkpointing=True)
    spec = varied(SPEC, response_loss="cross_entropy", rejected_stream_weight=0.0)
    losses = [
        trainer.update(make_items(), totals_of(make_items(), spec), spec, 10 * LR).finish()[
            "actor/distillation/loss"
        ]
        for _ in range(25)
    ]
    assert losses[-1] < 0.1 * losses[0]
    assert all(weight.dtype == torch.float32 for weight in trainer.weights().values())
