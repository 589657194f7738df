"""What a draft family inherits, and what it has to bring."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from verl_opd.drafts import family_names, get_family
from verl_opd.drafts.base import DraftFamily
from verl_opd.drafts.formats import Use
from verl_opd.errors import ConfigError

USE = Use("target", 3)


class Line(nn.Module):
    """A network of one linear layer and one norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(config["hidden_size"], 2)
        self.norm = nn.LayerNorm(2, bias=False)


class Smallest(DraftFamily):
    """The least that a family writes."""

    name = "smallest"
    engine_method = "smallest"
    network = Line

    def derive_config(self, *_: Any) -> dict[str, Any]:
        return {"hidden_size": 4}

    def check(self, *_: Any) -> None:
        pass

    def layer_ids(self, *_: Any) -> list[int]:
        return [1]

    def inputs(self, *_: Any) -> None:
        pass

    def replay(self, *_: Any) -> Tensor:
        return torch.zeros(1, 4, 4)

    def to_speculators(self, config: Any, use: Use) -> dict[str, Any]:
        return {"size": config["hidden_size"], "target": use.target}

    def from_speculators(self, config: Any) -> dict[str, Any]:
        return {"hidden_size": config.get("size", config.get("hidden_size"))}


def test_a_family_without_what_replay_needs_cannot_be_made() -> None:
    for name in DraftFamily.__abstractmethods__:
        partial = type("Partial", (Smallest,), {name: getattr(DraftFamily, name)})
        with pytest.raises(TypeError, match=name):
            partial()
    assert "replay" in DraftFamily.__abstractmethods__


def test_a_family_borrows_the_targets_head_and_drafts_k_proposals() -> None:
    family, config = Smallest(), {"hidden_size": 4}
    assert family.block_size(config, 3) == 4
    assert family.mask_token_id(config) is None
    assert family.own_head(Line(config), torch.zeros(5, 4)) is None
    assert family.confidence(Line(config)) is None
    assert family.vocabulary(config, None) is None
    assert family.shard_units(Line(config)) == []
    with pytest.raises(ConfigError, match=r"draft\.block_size=8: .*; leave the key out"):
        family.with_block(config, 8)


def test_new_weights_follow_from_the_seed() -> None:
    family, config = Smallest(), {"hidden_size": 4}
    first, same, other = (family.build(config, seed=seed, init_std=0.5) for seed in (1, 1, 2))
    assert torch.equal(first.fc.weight, same.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert torch.equal(first.fc.bias, torch.zeros(2))
    assert torch.equal(first.norm.weight, torch.ones(2))


def test_a_written_draft_is_read_back_in_bf16(tmp_path: Path) -> None:
    family, config = Smallest(), {"hidden_size": 4}
    draft, again = (family.build(config, seed=seed, init_std=0.5) for seed in (1, 2))
    family.save_pretrained(draft.state_dict(), config, tmp_path / "draft")
    assert family.load_config(str(tmp_path / "draft"), SimpleNamespace()) == config
    family.load_weights(again, str(tmp_path / "draft"))
    assert torch.equal(again.fc.weight, draft.fc.weight.bfloat16().float())


def test_formats_without_a_place_of_their_own_are_those_of_vllm() -> None:
    config = {"hidden_size": 4}
    for format in ("vllm", "sglang"):
        written, rename = Smallest().to_format(config, format, USE)
        assert (written, rename("fc.weight")) == (config, "fc.weight")
        assert written is not config
    written, rename = Smallest().to_format(config, "speculators", USE)
    assert (written, rename("fc.weight")) == ({"size": 4, "target": "target"}, "fc.weight")


@pytest.mark.parametrize("name", family_names())
def test_a_family_is_named_like_its_folder(name: str) -> None:
    assert isinstance(get_family(name), DraftFamily)
    assert get_family(name).name == name


def test_the_confidence_head_keeps_its_metric_names() -> None:
    prefixes = {name: get_family(name).confidence_prefix for name in family_names()}
    assert prefixes == {"dflash": "", "dspark": "dspark_", "eagle3": ""}
