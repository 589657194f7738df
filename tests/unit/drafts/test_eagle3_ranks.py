"""I1, I2, I3 of docs/known_faults.md for a draft with a head of its own: one rank, two ranks and an
idle rank give the same gradient.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.drafts import target_config
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
    process_group,
    totals_of,
)
from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import get_family
from verl_opd.opd.metrics import reduce_metrics
from verl_opd.opd.plan import TrainItem

FAMILY = get_family("eagle3")
PROPOSABLE = torch.arange(97)[::2]  # even tokens
SPLITS = {
    "even": [[0], [1, 2]],
    "rejections_on_one_rank": [[0, 2], [1]],
    "a_rank_without_samples": [[0, 1, 2], []],
}


def config() -> dict[str, Any]:
    derived = FAMILY.derive_config(
        target_config(LlamaConfig), DraftConfig(target_layer_ids=[1, 3, 5]), BLOCK - 1
    )
    return {**derived, "draft_vocab_size": len(PROPOSABLE)}


def items() -> list[TrainItem]:
    made = [
        make_item(
            "a", 5, 9, [(0, [1, 2]), (2, [1, 2, 3]), (6, [1])], ((0, 2, 40, -6.5), (6, 2, 4, -8.0))
        ),
        make_item("b", 3, 14, [(4, [1, 2, 3]), (12, [1])]),
        make_item("c", 8, 6, [(0, [1])], ((0, 1, 90, -7.5),)),
    ]
    kept = []
    for item in made:  # labels a pruned vocabulary can propose, as `restrict_labels` leaves them
        plan = item.plan
        entries = [
            e
            for e in zip(
                plan.response_block, plan.response_offset, plan.response_label, strict=True
            )
            if e[2] % 2 == 0
        ]
        block, offset, label = zip(*entries, strict=True) if entries else ((), (), ())
        kept.append(
            replace(
                item,
                plan=replace(
                    plan, response_block=block, response_offset=offset, response_label=label
                ),
            )
        )
    return kept


def make_trainer(root: Path, rank: int, world: int, **training: Any) -> ObservedTrainer:
    cfg = make_config(root, **training)
    cfg.draft.family, cfg.draft.path, cfg.rollout.num_speculative_tokens = (
        "eagle3",
        str(root / "eagle"),
        BLOCK - 1,
    )
    return calm(ObservedTrainer(cfg, config(), rank, world, "cpu"))


def outcome(
    trainer: ObservedTrainer, share: list[TrainItem], response_loss: str
) -> tuple[Any, dict[str, torch.Tensor]]:
    spec = varied(SPEC, response_loss=response_loss)
    return trainer.update(share, totals_of(items(), spec), spec, LR), trainer.gradients


def two_ranks(root: Path, rank: int, world: int) -> dict[str, Any]:
    every = items()
    return {
        f"{name}-{loss}": outcome(
            make_trainer(root, rank, world, max_tokens_per_micro_batch=60),
            [every[i] for i in shares[rank]],
            loss,
        )
        for name, shares in SPLITS.items()
        for loss in ("forward_kl", "full_forward_kl")
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle-ranks")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(target_config(LlamaConfig, initializer_range=0.25)).save_pretrained(
            folder / "target"
        )
    draft = FAMILY.build(config(), seed=3, init_std=0.2)
    draft.d2t.copy_(PROPOSABLE - torch.arange(len(PROPOSABLE)))
    draft.t2d[PROPOSABLE] = True
    FAMILY.save_pretrained(draft.state_dict(), config(), folder / "eagle")
    return folder


@pytest.fixture(scope="module")
def sharded(root: Path) -> list[dict[str, Any]]:
    return Ranks(root).run(two_ranks, 2)


@pytest.mark.parametrize("response_loss", ["forward_kl", "full_forward_kl"])
def test_ranks_do_not_change_the_result(
    root: Path, sharded: list[dict[str, Any]], tmp_path: Path, response_loss: str
) -> None:
    with process_group(tmp_path / "store"):
        metrics, gradients = outcome(make_trainer(root, 0, 1), items(), response_loss)
    assert gradients["lm_head.weight"].abs().sum() > 0
    expected = reduce_metrics([metrics])
    for name in SPLITS:
        parts = [rank[f"{name}-{response_loss}"] for rank in sharded]
        assert reduce_metrics([part[0] for part in parts]) == pytest.approx(
            expected, rel=1e-4, abs=1e-6
        )
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(parts[0][1][parameter], gradient, rtol=1e-4, atol=1e-6)
            assert torch.equal(parts[0][1][parameter], parts[1][1][parameter])
