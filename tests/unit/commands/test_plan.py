"""`verl-opd plan` prints placement and memory; a model out of reach only costs the estimate, a
configuration that cannot work is an error.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import MASK_TOKEN_ID
from verl_opd.commands.plan import plan
from verl_opd.config.schema import Config
from verl_opd.errors import ConfigError


@pytest.fixture
def cfg(tiny_llama_dir: Path) -> Config:
    cfg = Config()
    cfg.target.path, cfg.trainer.device = str(tiny_llama_dir), "cpu"
    cfg.draft.mask_token_id, cfg.draft.target_layer_ids = MASK_TOKEN_ID, [0, 2, 5]
    return cfg


def test_placement_and_memory_are_printed(cfg: Config, capsys: pytest.CaptureFixture[str]) -> None:
    cfg.trainer.n_student_workers = 2
    plan(cfg)
    out = capsys.readouterr().out
    assert "trainer rank 1, engine 1" in out
    assert "frozen target" in out
    assert "peak of the run: about" in out
    assert "environment of the actors" not in out, "a CPU needs no variables"


def test_an_accelerator_is_estimated_without_being_there(
    cfg: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg.trainer.device, cfg.rollout.enforce_eager = "npu", True
    plan(cfg)
    out = capsys.readouterr().out
    assert "NPU bundle 0" in out
    assert "peak of one device (no device here: the engine's share is not counted)" in out
    assert "VLLM_ASCEND_ENABLE_NZ" in out


def test_a_draft_out_of_reach_leaves_only_memory_out(
    cfg: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg.draft.path = "/no/such/draft"
    plan(cfg)
    out = capsys.readouterr().out
    assert "trainer rank 0, engine 0" in out
    assert "memory: not estimated (draft.path=/no/such/draft is neither a directory" in out


def test_a_draft_that_is_here_and_unreadable_is_an_error(cfg: Config, tmp_path: Path) -> None:
    cfg.draft.path = str(tmp_path)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        plan(cfg)


def test_limits_of_the_device_are_checked(cfg: Config) -> None:
    cfg.trainer.device, cfg.rollout.num_speculative_tokens = "npu", 16
    with pytest.raises(ConfigError, match="is too much for an NPU"):
        plan(cfg)
