"""DFlash drafts with causal blocks or sliding windows: replay follows the engine's mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.engine.conftest import FAMILY, K, LiveEngine, serve
from tests.engine.test_replay_check import checked, trainer_for
from tests.options import planned
from tests.tiny import MASK_TOKEN_ID
from tests.training import process_group
from verl_opd.config.schema import DraftConfig
from verl_opd.opd.plan import TrainItem
from verl_opd.opd.trace import RolloutSample
from verl_opd.opd.wire import from_extra_fields

pytestmark = pytest.mark.engine
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"dflash_config": {"causal": True}},
    "sliding": {"dflash_config": {"use_swa": True, "swa_window_size": 6}},
    "sliding_layers": {
        "dflash_config": {"swa_window_size": 6},
        "layer_types": ["sliding_attention"] * 2,
    },
}


def roll_out(live: LiveEngine, prompts: list[list[int]]) -> list[TrainItem]:
    items = []
    for i, (prompt, r) in enumerate(
        zip(prompts, live.generate_all("variant", prompts), strict=True)
    ):
        trace = from_extra_fields(r.extra_fields, len(r.token_ids))
        sample = RolloutSample(
            sample_id=f"0-{i}",
            data_source="t",
            prompt_ids=tuple(prompt),
            response_ids=r.token_ids,
            trace=trace,
            draft_version=0,
            finish_reason=r.finish_reason,
        )
        items.append(
            TrainItem(
                sample_id=sample.sample_id,
                prompt_ids=sample.prompt_ids,
                response_ids=sample.response_ids,
                plan=planned(sample, block_size=K + 1),
            )
        )
    return items


@pytest.mark.parametrize("name", VARIANTS)
def test_replay_follows_the_engines_mask(
    name: str, tiny_llama_dir: Path, tmp_path: Path, prompts: list[list[int]]
):
    target = AutoConfig.from_pretrained(tiny_llama_dir)
    keys = DraftConfig(num_hidden_layers=2, mask_token_id=MASK_TOKEN_ID, target_layer_ids=[0, 2, 5])
    plain = FAMILY.derive_config(target, keys, K)
    config = {
        **plain,
        **VARIANTS[name],
        "dflash_config": {**plain["dflash_config"], **VARIANTS[name]["dflash_config"]},
    }
    FAMILY.check(config, target, K, False)
    directory = tmp_path / "draft"
    FAMILY.save_pretrained(
        FAMILY.build(config, seed=0, init_std=0.2).state_dict(), config, directory
    )
    live = serve(tiny_llama_dir, directory, config)
    try:
        items = roll_out(live, prompts[:8])
    finally:
        live.call(live.engine.stop())
        live.loop.call_soon_threadsafe(live.loop.stop)
    with process_group(tmp_path / "store"):
        assert checked(trainer_for(live), items)["opd/replay_mismatch_raw"] == 0
        live.draft_config = plain
        assert checked(trainer_for(live), items)["opd/replay_mismatch_raw"] > 0.02, (
            "the variant matters"
        )
