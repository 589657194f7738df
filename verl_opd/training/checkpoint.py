"""Checkpoints on disk: written aside, renamed when complete, pointed at last."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from verl_opd.errors import ConfigError

_NAME = re.compile(r"step_(\d+)$")
_TEMPORARY = ".tmp-step_"


class CheckpointStore:
    """`checkpoints/` of one run: step_<n>/ directories and the links `latest` and `best`.

    begin -> the caller fills the returned directory -> commit. A crash in between leaves a `.tmp-step_*` directory that is never read and is
    removed by the next begin. Only the newest `keep_last` checkpoints stay, plus the one `best` points at.
    """

    def __init__(self, run_dir: Path, keep_last: int) -> None:
        self.root = Path(run_dir) / "checkpoints"
        self.keep_last = keep_last

    def begin(self, step: int, needed_bytes: int = 0) -> Path:
        """A fresh directory to write checkpoint `step` into; ConfigError, before anything is written, when the disk cannot take it."""
        self.root.mkdir(parents=True, exist_ok=True)
        for leftover in self.root.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover)
        free = shutil.disk_usage(self.root).free
        if free < needed_bytes:
            raise ConfigError(
                f"checkpoint {step} needs about {needed_bytes / 1e6:.0f} MB and {self.root} has {free / 1e6:.0f} MB left: free some space, or lower "
                "trainer.keep_last; checkpoints already written are untouched"
            )
        temporary = self.root / f"{_TEMPORARY}{step}"
        temporary.mkdir()
        return temporary

    def commit(self, step: int, state: dict[str, Any]) -> Path:
        """Add state.json, make the directory durable, give it its name and point `latest` at it."""
        temporary, final = self.root / f"{_TEMPORARY}{step}", self.root / f"step_{step}"
        (temporary / "state.json").write_text(json.dumps(state))
        _sync_tree(temporary)
        if final.exists():
            replaced = self.root / f"{_TEMPORARY}{step}-replaced"
            os.rename(final, replaced)
            os.rename(temporary, final)
            shutil.rmtree(replaced)
        else:
            os.rename(temporary, final)
        self._point("latest", final.name)
        self._prune()
        return final

    def mark_best(self, step: int, tau: float) -> bool:
        """Point `best` at checkpoint `step` when its held-out accept length `tau` is the highest so far."""
        record = self.root / "best.json"
        if record.exists() and (self.root / "best").exists() and json.loads(record.read_text())["tau"] >= tau:
            return False
        self._point("best", f"step_{step}")
        temporary = record.with_suffix(".tmp")
        temporary.write_text(json.dumps({"step": step, "tau": tau}))
        os.replace(temporary, record)
        self._prune()
        return True

    def latest(self) -> Path | None:
        return self._target("latest")

    def best(self) -> Path | None:
        return self._target("best")

    @staticmethod
    def read_state(checkpoint: Path) -> dict[str, Any]:
        file = checkpoint / "state.json"
        if not file.is_file():
            raise ConfigError(f"{checkpoint} is not a checkpoint: it has no state.json")
        state: dict[str, Any] = json.loads(file.read_text())
        return state

    def _target(self, name: str) -> Path | None:
        link = self.root / name
        return link.resolve() if link.exists() else None

    def _point(self, name: str, target: str) -> None:
        temporary = self.root / f".{name}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        os.replace(temporary, self.root / name)

    def _prune(self) -> None:
        steps = sorted((int(match[1]), path) for path in self.root.iterdir() if not path.is_symlink() and (match := _NAME.match(path.name)))
        kept = {self.latest(), self.best(), *(path.resolve() for _, path in steps[-max(1, self.keep_last) :])}
        for _, path in steps:
            if path.resolve() not in kept:
                shutil.rmtree(path)


def resolve_resume(mode: str, path: str | None, store: CheckpointStore) -> Path | None:
    """The checkpoint to continue from: auto = the newest of this run, if any; disable = none; path = the one named by resume_from_path."""
    if mode == "disable":
        return None
    if mode == "auto":
        return store.latest()
    if path is None:
        raise ConfigError("trainer.resume_mode=path needs trainer.resume_from_path")
    checkpoint = find_checkpoint(Path(path))
    store.read_state(checkpoint)
    return checkpoint


def find_checkpoint(path: Path) -> Path:
    """A checkpoint directory, from itself, from a run directory (its best, else latest), or from its checkpoints/ folder."""
    for candidate in (path, path / "checkpoints" / "best", path / "checkpoints" / "latest", path / "best", path / "latest"):
        if (candidate / "state.json").is_file():
            return candidate.resolve()
    raise ConfigError(f"{path} is neither a checkpoint nor a run directory with one (no state.json found)")


def check_identity(checkpoint: Path, ours: dict[str, Any]) -> None:
    """ConfigError with every difference when `checkpoint` was made for another target, draft or template."""
    theirs = CheckpointStore.read_state(checkpoint).get("identity", {})
    rows = [f"{key}: checkpoint {theirs.get(key)!r}, now {value!r}" for key, value in ours.items() if theirs.get(key) != value]
    if rows:
        raise ConfigError(f"checkpoint {checkpoint} belongs to another run ({'; '.join(rows)})")


def _sync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
