"""EAGLE-3 in the real engine: what it drafts is what training replays, and its own head and
vocabulary arrive where they belong.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.engine.conftest import K, LiveEngine, changed, serve
from tests.options import loss_settings, planned
from tests.training import process_group
from verl_opd.config.schema import Config, DraftConfig
from verl_opd.drafts import get_family
from verl_opd.errors import RolloutError
from verl_opd.opd.losses import stream_totals
from verl_opd.opd.metrics import reduce_metrics
from verl_opd.opd.plan import TrainItem, restrict_labels
from verl_opd.opd.trace import RolloutSample, check_trace
from verl_opd.opd.wire import from_extra_fields
from verl_opd.rollout.server import RolloutServer
from verl_opd.snapshot import DraftSnapshot, checksum
from verl_opd.training.trainer import DraftTrainer

pytestmark = pytest.mark.engine
FAMILY = get_family("eagle3")
PROPOSABLE = torch.arange(0, 320, 2)  # every other token of the target


def pruned_draft(target: Path, directory: Path, seed: int) -> dict[str, Any]:
    """Write a random draft over PROPOSABLE; its config."""
    keys = DraftConfig(target_layer_ids=[0, 2, 5])
    config = {
        **FAMILY.derive_config(AutoConfig.from_pretrained(target), keys, K),
        "draft_vocab_size": len(PROPOSABLE),
    }
    draft = FAMILY.build(config, seed=seed, init_std=0.2)
    draft.d2t.copy_(PROPOSABLE - torch.arange(len(PROPOSABLE)))
    draft.t2d[PROPOSABLE] = True
    FAMILY.save_pretrained(draft.state_dict(), config, directory)
    return config


@pytest.fixture(scope="module")
def eagle(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    directory = tmp_path_factory.mktemp("eagle") / "draft"
    config = pruned_draft(tiny_llama_dir, directory, seed=0)
    started = serve(
        tiny_llama_dir,
        directory,
        config,
        FAMILY,
        token_map=checksum({"d2t": PROPOSABLE - torch.arange(len(PROPOSABLE))}),
    )
    yield started
    started.call(started.engine.stop())
    started.loop.call_soon_threadsafe(started.loop.stop)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(tmp_path_factory.mktemp("eagle-group") / "store"):
        yield


def roll_out(eagle: LiveEngine, prompts: list[list[int]], name: str) -> list[TrainItem]:
    items = []
    for i, (prompt, result) in enumerate(
        zip(prompts, eagle.generate_all(name, prompts), strict=True)
    ):
        trace = from_extra_fields(result.extra_fields, len(result.token_ids))
        check_trace(trace, result.token_ids)
        assert all(token % 2 == 0 for step in trace.steps for token in step.drafted), (
            "only proposable tokens are proposed"
        )
        sample = RolloutSample(
            sample_id=f"0-{i}",
            data_source="t",
            prompt_ids=tuple(prompt),
            response_ids=result.token_ids,
            trace=trace,
            draft_version=0,
            finish_reason=result.finish_reason,
        )
        plan = restrict_labels(planned(sample, block_size=K + 1), frozenset(PROPOSABLE.tolist()))
        items.append(
            TrainItem(
                sample_id=sample.sample_id,
                prompt_ids=sample.prompt_ids,
                response_ids=sample.response_ids,
                plan=plan,
            )
        )
    return items


def trainer_for(eagle: LiveEngine, draft_path: str | None = None) -> DraftTrainer:
    cfg = Config()
    cfg.target.path, cfg.target.dtype, cfg.draft.path = (
        eagle.settings.model_path,
        "float32",
        draft_path or eagle.settings.speculation.draft_path,
    )
    cfg.draft.family, cfg.compute.param_dtype, cfg.rollout.num_speculative_tokens = (
        "eagle3",
        "float32",
        K,
    )
    return DraftTrainer(cfg, eagle.draft_config, 0, 1, "cpu")


def update(
    trainer: DraftTrainer, items: list[TrainItem], lr: float, **spec: Any
) -> dict[str, float]:
    loss = loss_settings(**spec)
    totals = stream_totals(
        [item.plan for item in items], [len(item.response_ids) for item in items], loss.options
    )
    return reduce_metrics([trainer.update(items, totals, loss, lr, check_replay=True)])


def push(
    eagle: LiveEngine, tensors: dict[str, torch.Tensor], path: Path, version: int
) -> dict[str, Any]:
    save_file(tensors, path)
    snapshot = DraftSnapshot(
        version, str(path), {name: tuple(t.shape) for name, t in tensors.items()}, checksum(tensors)
    )
    return eagle.call(eagle.engine.load_draft(snapshot))["workers"][0]


def test_training_replays_what_the_engine_drafts_before_and_after_a_push(
    eagle: LiveEngine, prompts: Any, one_rank: None, tmp_path: Path
):
    items = roll_out(eagle, prompts[:8], "first")
    trainer = trainer_for(eagle)
    before = eagle.call(eagle.engine.target_checksum())
    metrics = update(trainer, items, 1e-2)
    assert metrics["opd/replay_slots"] > 400
    assert metrics["opd/replay_mismatch_raw"] == 0
    stale = update(trainer, items, 1e-2, response_loss="full_forward_kl")
    assert stale["opd/replay_mismatch_raw"] > 0.1, (
        "weights that moved on no longer choose what was proposed"
    )

    tensors = trainer.published()
    assert "lm_head.weight" in tensors
    assert not {"d2t", "t2d"} & tensors.keys()
    report = push(eagle, tensors, tmp_path / "v2", 2)
    assert (report["error"], report["version"], report["checksum"]) == ("", 2, checksum(tensors))
    eagle.call(eagle.engine.reset_prefix_cache())
    trainer.export(str(tmp_path / "draft"))
    fresh = update(
        trainer_for(eagle, str(tmp_path / "draft")), roll_out(eagle, prompts[:8], "second"), 0.0
    )
    assert fresh["opd/replay_mismatch_raw"] == 0, (
        "the pushed draft, head included, is what drafts now"
    )
    assert eagle.call(eagle.engine.target_checksum()) == before


def test_token_maps_do_not_travel_and_a_push_without_the_head_is_rejected(
    eagle: LiveEngine, tmp_path: Path
):
    """C3: the engine must not fall back to the target's head."""
    tensors = load_file(Path(eagle.settings.speculation.draft_path) / "model.safetensors")
    report = push(eagle, tensors, tmp_path / "with-maps", 7)
    assert "unexpected d2t" in report["error"]
    weights = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    report = push(
        eagle,
        {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"},
        tmp_path / "headless",
        8,
    )
    assert "missing lm_head.weight" in report["error"]
    assert push(eagle, weights, tmp_path / "whole", 9)["error"] == ""


def test_another_token_map_in_the_engine_is_found_by_the_probe(eagle: LiveEngine):
    engine = RolloutServer(changed(eagle.settings, token_map="0" * 32))
    engine._engine = eagle.engine._engine
    with pytest.raises(RolloutError, match="token_map is"):
        eagle.call(engine._probe())


def test_a_run_with_a_pruned_vocabulary_trains(eagle: LiveEngine, prompts: Any, one_rank: None):
    items = roll_out(eagle, prompts[8:16], "train")
    trainer = trainer_for(eagle)
    losses = [
        update(trainer, items, 5e-3, response_loss="cross_entropy", loss_max_clamp=None)[
            "actor/distillation/loss"
        ]
        for _ in range(8)
    ]
    assert losses[-1] < 0.7 * losses[0]
