"""What leaves a trainer: snapshots, exports, and checkpoints that continue on any
number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.training import LR, SPEC, ObservedTrainer, Ranks, make_items, make_trainer, totals_of
from verl_opd.snapshot import checksum
from verl_opd.training.export import verify_draft


def step(trainer: ObservedTrainer) -> dict[str, Tensor]:
    """One update on this rank's share of the samples; the weights after it."""
    items = make_items()
    trainer.update(items[trainer.rank :: trainer.world_size], totals_of(items), SPEC, LR)
    return trainer.weights()


def trained(root: Path, rank: int, world: int) -> ObservedTrainer:
    trainer = make_trainer(root, rank, world)
    step(trainer)
    step(trainer)
    return trainer


def other(root: Path, rank: int, world: int) -> ObservedTrainer:
    """A trainer that has gone elsewhere."""
    trainer = make_trainer(root, rank, world)
    trainer.update(make_items()[:1], totals_of(make_items()[:1]), SPEC, 0.1)
    return trainer


def two_ranks(root: Path, rank: int, world: int) -> dict[str, Any]:
    trainer = trained(root, rank, world)
    results: dict[str, Any] = {"weights": trainer.weights()}
    torch.manual_seed(100 + rank)
    trainer.save(str(root / "dcp_two"))
    results["random"] = torch.rand(2)
    results["third"] = step(trainer)
    torch.manual_seed(0)
    resumed = other(root, rank, world)
    resumed.load(str(root / "dcp_two"))
    results["random_resumed"] = torch.rand(2)
    results["third_resumed"] = step(resumed)
    wider = other(root, rank, world)
    wider.load(str(root / "dcp_one"))
    results["third_from_one"] = step(wider)
    resumed.load(str(root / "dcp_two"))
    results["snapshot"] = resumed.snapshot(str(root / "snapshot.safetensors"), 7)
    resumed.export(str(root / "export"))
    return results


@pytest.fixture(scope="module")
def third(models: Path, one_rank: None) -> dict[str, Tensor]:
    """Weights after three updates of one rank, which saved after two."""
    trainer = trained(models, 0, 1)
    trainer.save(str(models / "dcp_one"))
    return step(trainer)


@pytest.fixture(scope="module")
def ranks(models: Path, third: dict[str, Tensor]) -> list[dict[str, Any]]:
    return Ranks(models).run(two_ranks, 2)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5)


def test_a_resumed_trainer_continues_bit_by_bit(
    models: Path, third: dict[str, Tensor], ranks: list[dict[str, Any]]
) -> None:
    resumed = other(models, 0, 1)
    resumed.load(str(models / "dcp_one"))
    assert_equal(step(resumed), third)
    for rank in ranks:
        assert_equal(rank["third_resumed"], rank["third"])


def test_it_continues_on_another_number_of_ranks(
    models: Path, third: dict[str, Tensor], ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        assert_close(rank["third_from_one"], third)
    narrower = other(models, 0, 1)
    narrower.load(str(models / "dcp_two"))
    assert_close(narrower.weights(), ranks[0]["weights"])
    assert_close(step(narrower), third)


def test_each_rank_gets_its_own_random_state_back(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert torch.equal(rank["random_resumed"], rank["random"])
    assert not torch.equal(ranks[0]["random"], ranks[1]["random"])


def test_saving_before_the_first_update_changes_nothing(
    models: Path, tmp_path: Path, one_rank: None
) -> None:
    saver = make_trainer(models)
    saver.save(str(tmp_path / "dcp"))
    resumed = other(models, 0, 1)
    resumed.load(str(tmp_path / "dcp"))
    expected = step(make_trainer(models))
    assert_equal(step(saver), expected)
    assert_equal(step(resumed), expected)


def test_a_snapshot_is_the_draft_in_bf16_with_its_checksum(
    models: Path, ranks: list[dict[str, Any]]
) -> None:
    snapshot = ranks[0]["snapshot"]
    assert ranks[1]["snapshot"] is None
    assert (snapshot.version, snapshot.path) == (7, str(models / "snapshot.safetensors"))
    tensors = load_file(snapshot.path)
    assert_equal(
        tensors, {name: weight.to(torch.bfloat16) for name, weight in ranks[0]["weights"].items()}
    )
    assert checksum(tensors) == snapshot.checksum
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == snapshot.shapes
    assert [path.name for path in models.glob("snapshot*")] == ["snapshot.safetensors"]


def test_an_export_holds_the_snapshot(models: Path, ranks: list[dict[str, Any]]) -> None:
    verify_draft(models / "export", "dflash", "the export")
    assert (
        checksum(load_file(models / "export" / "model.safetensors"))
        == ranks[0]["snapshot"].checksum
    )
