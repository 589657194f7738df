"""The configuration of a run that could be prepared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import MASK_TOKEN_ID
from verl_opd.config.schema import Config


@pytest.fixture
def cfg(tiny_llama_dir: Path, tmp_path: Path) -> Config:
    (tmp_path / "train.jsonl").write_text('{"prompt": "say one"}\n')
    cfg = Config()
    cfg.target.path, cfg.data.train_files, cfg.trainer.device = (
        str(tiny_llama_dir),
        [str(tmp_path / "train.jsonl")],
        "cpu",
    )
    cfg.draft.mask_token_id, cfg.draft.target_layer_ids, cfg.rollout.num_speculative_tokens = (
        MASK_TOKEN_ID,
        [0, 2, 5],
        3,
    )
    return cfg
