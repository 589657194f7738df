"""Export: a whole draft directory or none, nothing overwritten by accident, the checkpoint
untouched.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafts import build_draft, draft_config
from verl_opd.drafts import get_family
from verl_opd.errors import ConfigError
from verl_opd.snapshot import checksum
from verl_opd.training.checkpoint import CheckpointStore
from verl_opd.training.export import export_checkpoint, serve_command, serve_line


def save(run: Path, step: int, std: float = 0.2) -> Path:
    store = CheckpointStore(run, keep_last=3)
    get_family("dflash").save_pretrained(
        build_draft(draft_config(), std).state_dict(), draft_config(), store.begin(step) / "draft"
    )
    return store.commit(
        step,
        {
            "identity": {
                "family": "dflash",
                "target": "/models/some target",
                "num_speculative_tokens": 3,
            }
        },
    )


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def spoil(checkpoint: Path, name: str, tensor: torch.Tensor | None) -> None:
    file = checkpoint / "draft" / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(name)
    save_file({**tensors, **({} if tensor is None else {name: tensor})}, file)


def test_an_export_is_the_checkpoints_draft(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "run", 4)
    before = content(checkpoint)
    out = export_checkpoint(checkpoint, tmp_path / "deep" / "out")
    assert content(checkpoint) == before
    assert content(out) == content(checkpoint / "draft")
    assert set(content(out)) == {"config.json", "model.safetensors"}
    network = get_family("dflash").build(
        json.loads((out / "config.json").read_text()), seed=0, init_std=0.0
    )
    get_family("dflash").load_weights(network, str(out))
    expected = {
        name: tensor.bfloat16() for name, tensor in build_draft(draft_config()).state_dict().items()
    }
    assert checksum(
        {name: tensor.bfloat16() for name, tensor in network.state_dict().items()}
    ) == checksum(expected)
    assert os.stat(out).st_mode & 0o055 == 0o055  # readable for the account that serves it


def test_of_a_run_the_best_is_exported(tmp_path: Path) -> None:
    best, latest = save(tmp_path / "run", 1, std=0.1), save(tmp_path / "run", 2)
    assert content(export_checkpoint(tmp_path / "run", tmp_path / "a")) == content(latest / "draft")
    CheckpointStore(tmp_path / "run", keep_last=3).mark_best(1, 2.0)
    assert content(export_checkpoint(tmp_path / "run", tmp_path / "b")) == content(best / "draft")


def test_an_existing_directory_is_replaced_only_by_force(tmp_path: Path) -> None:
    old, new = save(tmp_path / "run", 1, std=0.1), save(tmp_path / "run", 2)
    out = export_checkpoint(old, tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    before = content(out)
    with pytest.raises(ConfigError, match=r"--out .*out exists: .*--force"):
        export_checkpoint(new, out)
    assert content(out) == before
    export_checkpoint(new, out, force=True)
    assert content(out) == {**content(new / "draft"), "notes.txt": b"mine"}


def test_force_never_touches_what_is_not_a_draft(tmp_path: Path) -> None:
    checkpoint, photos, file = save(tmp_path / "run", 1), tmp_path / "photos", tmp_path / "file"
    photos.mkdir()
    (photos / "cat.png").write_bytes(b"cat")
    file.write_text("text")
    for out in (photos, file):
        with pytest.raises(ConfigError, match="is not a draft directory and is not replaced"):
            export_checkpoint(checkpoint, out, force=True)
    assert content(photos) == {"cat.png": b"cat"}
    assert file.read_text() == "text"


def test_what_is_not_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is neither a checkpoint nor a run directory"):
        export_checkpoint(tmp_path / "nowhere", tmp_path / "out")
    checkpoint = save(tmp_path / "run", 1)
    (checkpoint / "draft" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"step_1 has no draft/model\.safetensors"):
        export_checkpoint(checkpoint, tmp_path / "out")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, r"draft of .*step_1: missing fc\.weight"),
        (
            torch.zeros(2, 3, dtype=torch.bfloat16),
            r"fc\.weight has shape \(2, 3\), expected \(32, 96\)",
        ),
        (torch.zeros(32, 96), r"1 tensors are not bf16 or not finite \(fc\.weight\)"),
        (
            torch.full((32, 96), float("nan"), dtype=torch.bfloat16),
            r"1 tensors are not bf16 or not finite \(fc\.weight\)",
        ),
    ],
)
def test_a_draft_that_does_not_fit_its_config_is_not_handed_over(
    tmp_path: Path, tensor: torch.Tensor | None, message: str
) -> None:
    checkpoint = save(tmp_path / "run", 1)
    spoil(checkpoint, "fc.weight", tensor)
    with pytest.raises(ConfigError, match=message):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [
        "run"
    ]  # nothing half-written, no temporary left


def test_the_serve_line_survives_a_shell() -> None:
    words = shlex.split(serve_command("/models/a b", "/drafts/it's", 7, "dflash"))
    assert words[:4] == ["vllm", "serve", "/models/a b", "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "dflash",
        "model": "/drafts/it's",
        "num_speculative_tokens": 7,
    }


def test_the_serve_line_of_an_export_uses_the_whole_block(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "run", 1)
    out = export_checkpoint(checkpoint, tmp_path / "out")
    expected = serve_command(
        "/models/some target", str(out), 3, "dflash"
    )  # blocks of 4: one anchor, three proposals
    assert serve_line(checkpoint, out) == expected
