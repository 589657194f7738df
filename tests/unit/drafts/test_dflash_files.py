"""Draft directories and the family registry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.drafts import build_draft, draft_config
from verl_opd import drafts
from verl_opd.drafts import family_names, get_family
from verl_opd.errors import ConfigError

FAMILY = get_family("dflash")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    config = draft_config()
    FAMILY.save_pretrained(build_draft(config).state_dict(), config, tmp_path / "draft")
    return tmp_path / "draft"


def _rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) drop tensors; a double underscore stands for a dot."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, directory / "model.safetensors")


def test_a_saved_draft_loads_as_its_bfloat16_rounding(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in saved.parent.iterdir()] == [
        "draft"
    ]  # nothing temporary stays behind
    with safe_open(saved / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
        assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    config = FAMILY.load_config(str(saved))
    assert config == draft_config()
    loaded = FAMILY.build(config, seed=99, init_std=1.0)
    FAMILY.load_weights(loaded, str(saved))
    for name, tensor in build_draft(config).state_dict().items():
        assert loaded.state_dict()[name].dtype == torch.float32
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float()), name


def test_saving_again_replaces_both_files(saved: Path) -> None:
    config = {**draft_config(), "intermediate_size": 40}
    FAMILY.save_pretrained(build_draft(config).state_dict(), config, saved)
    assert json.loads((saved / "config.json").read_text())["intermediate_size"] == 40
    FAMILY.load_weights(build_draft(config), str(saved))
    assert [path.name for path in saved.parent.iterdir()] == ["draft"]


def test_a_failed_save_leaves_the_old_draft(saved: Path) -> None:
    before = (saved / "model.safetensors").read_bytes()
    with pytest.raises(TypeError):
        FAMILY.save_pretrained(build_draft(draft_config()).state_dict(), {"bad": object()}, saved)
    assert (saved / "model.safetensors").read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["draft"]


def test_every_difference_of_a_weight_file_is_named(saved: Path) -> None:
    _rewrite(saved, fc__weight=torch.zeros(32, 64), norm__weight=None, midlayer__mlp=torch.zeros(2))
    with pytest.raises(ConfigError) as caught:
        FAMILY.load_weights(build_draft(draft_config()), str(saved))
    message = str(caught.value)
    assert str(saved) in message
    assert "missing norm.weight" in message
    assert "unexpected midlayer.mlp" in message
    assert "fc.weight has shape (32, 64), expected (32, 96)" in message


@pytest.mark.parametrize("name", ["lm_head__weight", "embed_tokens__weight"])
def test_a_draft_with_a_head_or_embedding_of_its_own_is_unsupported(saved: Path, name: str) -> None:
    """The engine would draft with it, training scores with the target's."""
    _rewrite(saved, **{name: torch.zeros(97, 32)})
    with pytest.raises(ConfigError, match=f"unexpected {name.replace('__', '.')}"):
        FAMILY.load_weights(build_draft(draft_config()), str(saved))


def test_weights_of_several_files_are_read_together(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file(
        {name: tensors[name] for name in names[:9]}, saved / "model-00001-of-00002.safetensors"
    )
    save_file(
        {name: tensors[name] for name in names[9:]}, saved / "model-00002-of-00002.safetensors"
    )
    draft = build_draft(draft_config(), std=1.0)
    FAMILY.load_weights(draft, str(saved))
    assert torch.equal(draft.state_dict()["fc.weight"], tensors["fc.weight"].float())


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft\.path=.*no config\.json"):
        FAMILY.load_config(str(tmp_path))
    with pytest.raises(ConfigError, match=r"draft\.path=.*no \*\.safetensors"):
        FAMILY.load_weights(build_draft(draft_config()), str(tmp_path))


def test_a_separate_mask_embedding_is_unsupported(saved: Path) -> None:
    (saved / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"mask_embedding\.pt"):
        FAMILY.load_config(str(saved))


def test_registry() -> None:
    assert family_names() == ["dflash", "dspark", "eagle3"]
    assert (FAMILY.name, FAMILY.engine_method) == ("dflash", "dflash")
    with pytest.raises(
        ConfigError, match=r"draft\.family='eagle9' is unknown; available: dflash, dspark, eagle3"
    ):
        get_family("eagle9")


def test_a_new_folder_is_a_new_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "newcomer").mkdir()
    (tmp_path / "newcomer" / "__init__.py").write_text("FAMILY = 'the newcomer'\n")
    monkeypatch.setattr(drafts, "__path__", [*drafts.__path__, str(tmp_path)])
    assert get_family("newcomer") == "the newcomer"
    assert family_names() == ["dflash", "dspark", "eagle3", "newcomer"]
