"""From a checkpoint to a draft directory that engines serve."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_opd.drafts import files, get_family
from verl_opd.drafts.formats import Use, without_nulls
from verl_opd.errors import ConfigError
from verl_opd.training.checkpoint import CheckpointStore, find_checkpoint


def export_checkpoint(
    checkpoint: Path, out: Path, force: bool = False, format: str = "vllm"
) -> Path:
    """Write the draft of `checkpoint` (or of a run directory: its best, else its latest) to `out`
    in `format` (drafts/formats.py), whole or not at all.

    The written files are read back before they are put in place: every tensor of the draft's own
    network, by name, shape and dtype, finite and unchanged. ConfigError when they differ, when the
    format does not support this draft, or when `out` exists and `force` is not set. The checkpoint
    is never changed.
    """
    source = find_checkpoint(Path(checkpoint))
    if out.exists() and not force:
        raise ConfigError(
            f"--out {out} exists: choose another directory, or add --force to replace its "
            f"{files.WEIGHTS} and {files.CONFIG}"
        )
    if out.exists() and not (
        out.is_dir() and (not any(out.iterdir()) or (out / files.CONFIG).is_file())
    ):
        raise ConfigError(
            f"--out {out} is not a draft directory and is not replaced, not even with --force: "
            "choose another directory"
        )
    draft = source / "draft"
    missing = [name for name in (files.CONFIG, files.WEIGHTS) if not (draft / name).is_file()]
    if missing:
        raise ConfigError(
            f"{source} has no {' and no '.join(f'draft/{name}' for name in missing)}: use "
            "another checkpoint"
        )
    verify_draft(draft, _family_of(source), str(source))
    identity = CheckpointStore.read_state(source)["identity"]
    use = Use(
        identity["target"], identity["num_speculative_tokens"], _architectures(identity["target"])
    )
    family = get_family(identity["family"])
    config, rename = family.to_format(files.read_config(str(draft)), format, use)
    config = without_nulls(config)
    tensors = {rename(name): tensor for name, tensor in files.read_weights(str(draft)).items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        files.write_draft(tensors, config, temporary / "new")
        _compare(temporary / "new", tensors, config)
        out.mkdir(exist_ok=True)
        for name in (files.WEIGHTS, files.CONFIG):
            os.replace(temporary / "new" / name, out / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _architectures(target: str) -> tuple[str, ...]:
    """The target's classes, as its config.json names them; empty where the target is not on this
    machine.
    """
    file = Path(target) / files.CONFIG
    return tuple(json.loads(file.read_text()).get("architectures") or ()) if file.is_file() else ()


def _compare(written: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """ConfigError unless the directory `written` holds exactly this."""
    found = files.read_weights(str(written))
    if found.keys() != tensors.keys() or any(
        not torch.equal(found[name], tensor) for name, tensor in tensors.items()
    ):
        raise ConfigError(
            f"the tensors written to {written} differ from the exported ones: check the disk"
        )
    if files.read_config(str(written)) != json.loads(json.dumps(dict(config))):
        raise ConfigError(f"{written / files.CONFIG} differs from the exported one: check the disk")


def verify_draft(path: Path, family_name: str, where: str) -> None:
    """ConfigError, about `where`, unless the directory `path` holds the whole bf16 draft that its
    config.json describes, all finite.
    """
    family = get_family(family_name)
    with torch.device("meta"):
        network = family.build(family.load_config(str(path)), seed=0, init_std=0.0)
    tensors = files.read_weights(str(path))
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    files.compare(
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        expected,
        f"draft of {where}",
    )
    bad = [
        name
        for name, tensor in tensors.items()
        if files.narrow(tensor).dtype != tensor.dtype or not tensor.isfinite().all()
    ]
    if bad:
        raise ConfigError(
            f"draft of {where}: {len(bad)} tensors are not bf16 or not finite "
            f"({', '.join(sorted(bad)[:3])}): use another checkpoint"
        )


def _family_of(checkpoint: Path) -> str:
    family: str = CheckpointStore.read_state(checkpoint)["identity"]["family"]
    return family


def serve_command(
    target_path: str, draft_path: str, num_speculative_tokens: int, method: str
) -> str:
    """The `vllm serve` line that uses the draft."""
    speculative = json.dumps(
        {"method": method, "model": draft_path, "num_speculative_tokens": num_speculative_tokens}
    )
    return f"vllm serve {shlex.quote(target_path)} --speculative-config {shlex.quote(speculative)}"


def serve_line(checkpoint: Path, out: Path, format: str = "vllm") -> str:
    """The command that serves `out`, exported from `checkpoint` in `format`, with its target and
    all proposals of its block.
    """
    identity = CheckpointStore.read_state(find_checkpoint(checkpoint))["identity"]
    family, tokens = get_family(identity["family"]), identity["num_speculative_tokens"]
    if format == "speculators":
        return f"vllm serve {shlex.quote(str(out))}"
    if format == "sglang":
        chain = (
            f"--speculative-num-steps {tokens} --speculative-eagle-topk 1 "
            if family.autoregressive
            else ""
        )
        return (
            f"python -m sglang.launch_server --model-path {shlex.quote(identity['target'])} "
            f"--speculative-algorithm {family.engine_method.upper()} "
            f"--speculative-draft-model-path {shlex.quote(str(out))} "
            f"{chain}--speculative-num-draft-tokens {tokens + 1}"
        )
    return serve_command(identity["target"], str(out), tokens, family.engine_method)
