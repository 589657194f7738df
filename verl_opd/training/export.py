"""From a checkpoint to a draft directory that engines serve."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from pathlib import Path

from verl_opd.drafts import files
from verl_opd.errors import ConfigError
from verl_opd.training.checkpoint import find_checkpoint


def export_checkpoint(checkpoint: Path, out: Path, force: bool = False) -> Path:
    """Copy the draft of `checkpoint` (or of a run directory: its best) to `out`, whole or not at all, and verify it by reading it back.

    ConfigError when `out` exists and `force` is not set. The checkpoint is never changed.
    """
    source = find_checkpoint(Path(checkpoint)) / "draft"
    if out.exists() and not force:
        raise ConfigError(f"--out {out} exists: choose another directory, or add --force to replace its {files.WEIGHTS} and {files.CONFIG}")
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / files.CONFIG).is_file())):
        raise ConfigError(f"--out {out} is not a draft directory and is left alone, --force or not")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for name in (files.CONFIG, files.WEIGHTS):
            shutil.copyfile(source / name, temporary / name)
        json.loads((temporary / files.CONFIG).read_text())
        files.compare(files.shapes_of(temporary / files.WEIGHTS), files.shapes_of(source / files.WEIGHTS), f"export to {out}")
        out.mkdir(exist_ok=True)
        for name in (files.WEIGHTS, files.CONFIG):
            os.replace(temporary / name, out / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def serve_command(target_path: str, draft_path: str, num_speculative_tokens: int, method: str = "dflash") -> str:
    """The `vllm serve` line that uses the draft."""
    speculative = json.dumps({"method": method, "model": draft_path, "num_speculative_tokens": num_speculative_tokens})
    return f"vllm serve {shlex.quote(target_path)} --speculative-config {shlex.quote(speculative)}"
