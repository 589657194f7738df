"""From a checkpoint to a draft directory that engines serve."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from pathlib import Path

import torch

from verl_opd.drafts import files, get_family
from verl_opd.errors import ConfigError
from verl_opd.training.checkpoint import CheckpointStore, find_checkpoint


def export_checkpoint(checkpoint: Path, out: Path, force: bool = False) -> Path:
    """Copy the draft of `checkpoint` (or of a run directory: its best, else its latest) to `out`, whole or not at all.

    What will be handed over is read back first: every tensor of the draft's own network, by name, shape and dtype, finite. ConfigError when
    it is not that, or when `out` exists and `force` is not set. The checkpoint is never changed.
    """
    source = find_checkpoint(Path(checkpoint))
    if out.exists() and not force:
        raise ConfigError(f"--out {out} exists: choose another directory, or add --force to replace its {files.WEIGHTS} and {files.CONFIG}")
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / files.CONFIG).is_file())):
        raise ConfigError(f"--out {out} is not a draft directory and is left alone, --force or not")
    missing = [name for name in (files.CONFIG, files.WEIGHTS) if not (source / "draft" / name).is_file()]
    if missing:
        raise ConfigError(f"{source} holds no {' and no '.join(f'draft/{name}' for name in missing)}: use another checkpoint")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for name in (files.CONFIG, files.WEIGHTS):
            shutil.copyfile(source / "draft" / name, temporary / name)
        verify_draft(temporary, _family_of(source), str(source))
        out.mkdir(exist_ok=True)
        for name in (files.WEIGHTS, files.CONFIG):
            os.replace(temporary / name, out / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def verify_draft(path: Path, family_name: str, where: str) -> None:
    """ConfigError, about `where`, unless the directory `path` holds the whole bf16 draft that its config.json describes, all finite."""
    family = get_family(family_name)
    with torch.device("meta"):
        network = family.build(family.load_config(str(path)), seed=0, init_std=0.0)
    tensors = files.read_weights(str(path))
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    files.compare({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected, f"draft of {where}")
    bad = [name for name, tensor in tensors.items() if files.narrow(tensor).dtype != tensor.dtype or not tensor.isfinite().all()]
    if bad:
        raise ConfigError(
            f"draft of {where}: {len(bad)} tensors are not bf16 or not finite ({', '.join(sorted(bad)[:3])}): use another checkpoint"
        )


def _family_of(checkpoint: Path) -> str:
    family: str = CheckpointStore.read_state(checkpoint)["identity"]["family"]
    return family


def serve_command(target_path: str, draft_path: str, num_speculative_tokens: int, method: str) -> str:
    """The `vllm serve` line that uses the draft."""
    speculative = json.dumps({"method": method, "model": draft_path, "num_speculative_tokens": num_speculative_tokens})
    return f"vllm serve {shlex.quote(target_path)} --speculative-config {shlex.quote(speculative)}"


def serve_line(checkpoint: Path, draft: Path) -> str:
    """`serve_command` for a draft exported from `checkpoint`: its target, and all proposals of its block."""
    identity = CheckpointStore.read_state(find_checkpoint(checkpoint))["identity"]
    family = get_family(identity["family"])
    return serve_command(identity["target"], str(draft), identity["num_speculative_tokens"], family.engine_method)
