"""HF-format draft directories: reading, checking and writing them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from verl_opd.errors import ConfigError, HubUnreachable

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def local_directory(path: str, weights: bool = True) -> str:
    """`path` itself when it is a directory, else the local copy of the hub repository of that name
    (its configuration alone without `weights`); ConfigError when there is neither.
    """
    if Path(path).is_dir():
        return path
    try:
        return str(
            snapshot_download(
                path, allow_patterns=["*.json", *(["*.safetensors"] if weights else [])]
            )
        )
    except (HFValidationError, OSError) as error:
        raise HubUnreachable(
            f"draft.path={path} is neither a directory nor a hub repository that can be read from "
            f"here ({type(error).__name__})"
        ) from error


def read_config(path: str) -> dict[str, Any]:
    """config.json of a local draft directory."""
    file = Path(path) / CONFIG
    if not file.is_file():
        raise ConfigError(
            f"draft.path={path} has no {CONFIG}: name a local draft directory in HF format"
        )
    config: dict[str, Any] = json.loads(file.read_text())
    return config


def rope_settings(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """rope_type, rope_theta and all other settings, from either spelling; ConfigError when theta is
    missing.

    Engines read the file through transformers, which silently fills in 10000: most proposals of a
    draft that was trained with another base are then rejected.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ConfigError(
            f"the {what}'s config.json has no rope_theta: add the value it was trained with (a "
            "guessed one lowers acceptance without any error)"
        )
    legacy = rope.pop("type", "default")
    return {"rope_theta": float(theta), "rope_type": rope.pop("rope_type", legacy), "extra": rope}


def read_weights(path: str) -> dict[str, Tensor]:
    """All tensors of a draft directory, on the CPU."""
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"draft.path={path} has no *.safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(load_file(file))
    return tensors


def load_into(
    draft: nn.Module,
    path: str,
    frozen: Mapping[str, Tensor] | None,
    copies: Sequence[str] = (),
    rename: Callable[[str], str] = str,
) -> None:
    """Load the draft directory `path` into `draft`, as DraftFamily.load_weights describes.

    copies: names of `frozen` that files of this family may contain; they are compared in bf16 and
    left out. rename: a name in the file -> our name.
    """
    tensors = {rename(name): tensor for name, tensor in read_weights(path).items()}
    for name in copies:
        brought = tensors.pop(name, None)
        if brought is None or frozen is None:
            continue
        if brought.shape != frozen[name].shape or not torch.equal(
            frozen[name].cpu().to(torch.bfloat16), brought.to(torch.bfloat16)
        ):
            raise ConfigError(
                f"draft.path={path}: {name} differs from the target's; only drafts that use the "
                "target's are supported"
            )
    expected = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    compare(
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        expected,
        f"draft.path={path}",
    )
    draft.load_state_dict(
        {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
    )


def compare(found: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    """ConfigError unless two name -> shape tables are equal; names every difference."""
    problems = [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
    problems += [f"unexpected {name}" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} has shape {tuple(found[name])}, expected {tuple(expected[name])}"
        for name in sorted(found.keys() & expected.keys())
        if tuple(found[name]) != tuple(expected[name])
    ]
    if problems:
        shown = "; ".join(problems[:6]) + (
            f"; and {len(problems) - 6} more" if len(problems) > 6 else ""
        )
        raise ConfigError(f"{where}: {shown}")


def narrow(tensor: Tensor) -> Tensor:
    """Weights in bf16; token maps and masks unchanged."""
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def write_draft(state: Mapping[str, Tensor], config: Mapping[str, Any], path: Path) -> None:
    """Write config.json and bf16 weights to the directory `path`, through a temporary directory
    beside it and a rename.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        tensors = {
            name: narrow(tensor.detach()).cpu().contiguous() for name, tensor in state.items()
        }
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n")
        temporary.chmod(0o755)
        if path.exists():
            for name in (WEIGHTS, CONFIG):
                os.replace(temporary / name, path / name)
        else:
            os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
