"""A pushed draft is read back, or rejected while the old one keeps serving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.engine.conftest import FAMILY, LiveEngine
from verl_opd.errors import WeightSyncError
from verl_opd.rollout.sync import prove
from verl_opd.snapshot import DraftSnapshot, checksum

pytestmark = pytest.mark.engine


def snapshot_of(
    live: LiveEngine, path: Path, seed: int, version: int
) -> tuple[DraftSnapshot, dict[str, torch.Tensor]]:
    state = FAMILY.build(live.draft_config, seed=seed, init_std=0.2).state_dict()
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in state.items()}
    save_file(tensors, path)
    return DraftSnapshot(
        version, str(path), {n: tuple(t.shape) for n, t in tensors.items()}, checksum(tensors)
    ), tensors


def push(live: LiveEngine, snapshot: DraftSnapshot) -> dict:
    return live.call(live.engine.load_draft(snapshot))["workers"][0]


@pytest.fixture
def restored(live: LiveEngine, tmp_path: Path):
    """Leaves the engine with the draft it started with."""
    yield
    snapshot, _ = snapshot_of(live, tmp_path / "initial.safetensors", seed=0, version=0)
    assert push(live, snapshot)["error"] == ""
    live.call(live.engine.reset_prefix_cache())


def test_a_push_is_read_back_and_changes_what_is_proposed(
    live: LiveEngine, prompts, tmp_path: Path, restored
):
    target_before = live.call(live.engine.target_checksum())
    before = live.generate("before", prompts[3])
    snapshot, _ = snapshot_of(live, tmp_path / "new.safetensors", seed=7, version=12)
    prove(push(live, snapshot), snapshot, "replica 0")
    live.call(live.engine.reset_prefix_cache())
    after = live.generate("after", prompts[3])
    key = "dflash_replay_block_drafted_token_ids"
    assert after.extra_fields[key] != before.extra_fields[key]
    assert after.token_ids == before.token_ids
    assert live.call(live.engine.read_back())["version"] == 12
    assert live.call(live.engine.target_checksum()) == target_before


def test_pushing_the_same_draft_reproduces_the_proposals(
    live: LiveEngine, prompts, tmp_path: Path, restored
):
    before = live.generate("same-before", prompts[4])
    other, _ = snapshot_of(live, tmp_path / "other.safetensors", seed=7, version=1)
    same, _ = snapshot_of(live, tmp_path / "same.safetensors", seed=0, version=2)
    for snapshot in (other, same):
        prove(push(live, snapshot), snapshot, "replica 0")
    live.call(live.engine.reset_prefix_cache())
    assert live.generate("same-after", prompts[4]).extra_fields == before.extra_fields


BROKEN = {
    "missing": lambda t: t.pop("norm.weight"),
    "unexpected": lambda t: t.update(
        {"layers.9.mlp.up_proj.weight": torch.zeros(2, 2, dtype=torch.bfloat16)}
    ),
    "the engine holds": lambda t: t.update({"norm.weight": torch.zeros(3, dtype=torch.bfloat16)}),
    "torch.float32": lambda t: t.update({"norm.weight": t["norm.weight"].float()}),
    "frozen target": lambda t: t.update(
        {"lm_head.weight": torch.zeros(4, 4, dtype=torch.bfloat16)}
    ),
    "checksum": lambda t: t.update({"norm.weight": t["norm.weight"] * 2}),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_wrong_push_is_rejected_and_nothing_changes(
    live: LiveEngine, tmp_path: Path, problem: str
):
    before = live.call(live.engine.read_back())
    snapshot, tensors = snapshot_of(live, tmp_path / "broken.safetensors", seed=9, version=99)
    BROKEN[problem](tensors)
    save_file(tensors, snapshot.path)
    reply = push(live, snapshot)
    assert problem in reply["error"]
    assert live.call(live.engine.read_back()) == before
    with pytest.raises(
        WeightSyncError, match=f"did not load draft version 99 and still serves {before['version']}"
    ):
        prove(reply, snapshot, "replica 0")


def test_a_truncated_file_is_rejected(live: LiveEngine, tmp_path: Path):
    """K10."""
    before = live.call(live.engine.read_back())
    snapshot, _ = snapshot_of(live, tmp_path / "cut.safetensors", seed=9, version=99)
    content = Path(snapshot.path).read_bytes()
    Path(snapshot.path).write_bytes(content[: len(content) // 2])
    assert push(live, snapshot)["error"]
    assert live.call(live.engine.read_back()) == before


def test_a_silent_mismatch_would_be_caught(live: LiveEngine, tmp_path: Path):
    snapshot, _ = snapshot_of(live, tmp_path / "x.safetensors", seed=3, version=5)
    stale = {**live.call(live.engine.read_back()), "error": ""}
    with pytest.raises(
        WeightSyncError,
        match=r"replica 1 does not hold the draft that was pushed.*version is .* pushed 5",
    ):
        prove(stale, snapshot, "replica 1")
    with pytest.raises(WeightSyncError, match="checksum is"):
        prove({**stale, "version": 5}, snapshot, "replica 1")
    with pytest.raises(WeightSyncError, match="fused_consistent is False"):
        prove(
            {
                "error": "",
                "version": 5,
                "checksum": snapshot.checksum,
                "tensors": len(snapshot.shapes),
                "fused_consistent": False,
            },
            replace(snapshot),
            "replica 1",
        )
