"""The replay check on real rollouts: silent when training replays what the engine drafted, loud for
every fault that would pass unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.engine.conftest import K, LiveEngine, draft_for
from tests.options import loss_settings, planned
from tests.training import process_group
from verl_opd.config.schema import Config
from verl_opd.drafts.dflash import replay as dflash_replay
from verl_opd.opd.layout import Layout
from verl_opd.opd.losses import stream_totals
from verl_opd.opd.metrics import reduce_metrics
from verl_opd.opd.plan import TrainItem
from verl_opd.opd.replay_check import diagnose
from verl_opd.opd.trace import RolloutSample
from verl_opd.opd.wire import from_extra_fields
from verl_opd.training.trainer import DraftTrainer

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(tmp_path_factory.mktemp("replay") / "store"):
        yield


@pytest.fixture(scope="module")
def rolled_out(live: LiveEngine, prompts: list[list[int]]) -> list[TrainItem]:
    results = live.generate_all("replay-check", prompts[:8])
    samples = [
        RolloutSample(
            sample_id=f"0-{i}",
            data_source="t",
            prompt_ids=tuple(prompt),
            response_ids=r.token_ids,
            trace=from_extra_fields(r.extra_fields, len(r.token_ids)),
            draft_version=0,
            finish_reason=r.finish_reason,
        )
        for i, (prompt, r) in enumerate(zip(prompts, results, strict=False))
    ]
    return [
        TrainItem(
            sample_id=s.sample_id,
            prompt_ids=s.prompt_ids,
            response_ids=s.response_ids,
            plan=planned(s, block_size=K + 1),
        )
        for s in samples
    ]


def trainer_for(live: LiveEngine, draft_path: str | None = None, **changes: Any) -> DraftTrainer:
    cfg = Config()
    cfg.target.path, cfg.target.dtype, cfg.draft.path = (
        live.settings.model_path,
        "float32",
        draft_path or live.settings.speculation.draft_path,
    )
    cfg.compute.param_dtype = "float32"
    return DraftTrainer(cfg, {**live.draft_config, **changes}, 0, 1, "cpu")


def checked(trainer: DraftTrainer, items: list[TrainItem]) -> dict[str, float]:
    spec = loss_settings()
    totals = stream_totals(
        [item.plan for item in items], [len(item.response_ids) for item in items], spec.options
    )
    return reduce_metrics([trainer.update(items, totals, spec, 0.0, check_replay=True)])


def test_a_faithful_replay_has_no_mismatch(
    live: LiveEngine, one_rank: None, rolled_out: list[TrainItem]
):
    metrics = checked(trainer_for(live), rolled_out)
    assert metrics["opd/replay_slots"] > 400
    assert metrics["opd/replay_mismatch"] == metrics["opd/replay_mismatch_raw"] == 0
    assert diagnose(metrics, 0.0, 0.0, {}) is None


def layer_later(live: LiveEngine, patch: pytest.MonkeyPatch, tmp_path: Path) -> DraftTrainer:
    return trainer_for(
        live, dflash_config={**live.draft_config["dflash_config"], "target_layer_ids": [1, 3, 4]}
    )


def other_rope(live: LiveEngine, patch: pytest.MonkeyPatch, tmp_path: Path) -> DraftTrainer:
    return trainer_for(live, rope_theta=live.draft_config["rope_theta"] / 100)


def stale_draft(live: LiveEngine, patch: pytest.MonkeyPatch, tmp_path: Path) -> DraftTrainer:
    draft_for(Path(live.settings.model_path), tmp_path / "other", seed=9)
    return trainer_for(live, draft_path=str(tmp_path / "other"))


def swapped_head(live: LiveEngine, patch: pytest.MonkeyPatch, tmp_path: Path) -> DraftTrainer:
    trainer = trainer_for(live)
    rolled = replace(trainer.head, weight=trainer.head.weight.roll(1, dims=0))
    trainer.objective = replace(trainer.objective, head=rolled)
    return trainer


def anchor_sees_itself(live: LiveEngine, patch: pytest.MonkeyPatch, tmp_path: Path) -> DraftTrainer:
    strict = dflash_replay.visibility

    def not_strict(layout: Layout, context_len: int, *kind: Any) -> Tensor:
        return strict(replace(layout, anchors=layout.anchors + 1), context_len, *kind)

    patch.setattr(dflash_replay, "visibility", not_strict)
    return trainer_for(live)


FAULTS: list[Callable[..., DraftTrainer]] = [
    layer_later,
    other_rope,
    stale_draft,
    swapped_head,
    anchor_sees_itself,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_silent_fault_is_found(
    live: LiveEngine,
    one_rank: None,
    rolled_out: list[TrainItem],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fault: Any,
):
    metrics = checked(fault(live, monkeypatch, tmp_path), rolled_out)
    opd = Config().opd
    problem = diagnose(
        metrics,
        opd.max_replay_mismatch,
        opd.max_replay_mismatch_raw,
        {"target_layer_ids": [0, 2, 5]},
    )
    assert problem is not None, metrics
    assert "target_layer_ids [0, 2, 5]" in problem


def test_blocks_anchored_one_token_late_are_found(
    live: LiveEngine, one_rank: None, rolled_out: list[TrainItem]
):
    items = []
    for item in rolled_out:
        keep = [
            i
            for i, anchor in enumerate(item.plan.anchors)
            if anchor + 1 < len(item.response_ids) - 1
        ]
        none: tuple[Any, ...] = ()
        late = replace(
            item.plan,
            anchors=tuple(item.plan.anchors[i] + 1 for i in keep),
            drafted=tuple(item.plan.drafted[i] for i in keep),
            **dict.fromkeys(("response_block", "response_offset", "response_label"), none),
            **dict.fromkeys(
                ("rejected_block", "rejected_offset", "rejected_token", "rejected_logprob"), none
            ),
        )
        items.append(replace(item, plan=late))
    assert checked(trainer_for(live), items)["opd/replay_mismatch"] > 0.02


def test_weights_that_have_moved_on_are_found(
    live: LiveEngine, one_rank: None, rolled_out: list[TrainItem]
):
    trainer = trainer_for(live)
    spec = loss_settings()
    totals = stream_totals(
        [item.plan for item in rolled_out],
        [len(item.response_ids) for item in rolled_out],
        spec.options,
    )
    for _ in range(3):
        trainer.update(rolled_out, totals, spec, 1e-2)
    assert checked(trainer, rolled_out)["opd/replay_mismatch"] > 0.02
