"""Checkpoints on disk: written to a temporary directory, renamed when complete, then linked."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from verl_opd.errors import ConfigError

log = logging.getLogger(__name__)

STATE = "state.json"
MANIFEST = "manifest.json"  # size and CRC-32 of every other file
_NAME = re.compile(r"step_(\d+)")
_ASIDE = re.compile(r"\.tmp-(step_\d+)(-replaced)?")


def checkpoint_bytes(draft_parameters: int) -> int:
    """Bytes a checkpoint takes: float32 master weights and two AdamW moments, the bf16 draft, and 1
    MiB for the rest.
    """
    return draft_parameters * (3 * 4 + 2) + 2**20


class CheckpointStore:
    """`checkpoints/` of one run: step_<n>/ directories (dcp/, draft/, state.json), the links
    `latest` and `best`, best.json.

    begin -> the caller fills the returned directory -> commit. A crash in between leaves a
    `.tmp-step_*` directory that is never read and is removed by the next begin. Only the newest
    `keep_last` checkpoints stay, plus those that `latest` and `best` name.
    """

    def __init__(self, run_dir: Path, keep_last: int) -> None:
        self.root = Path(run_dir) / "checkpoints"
        self.keep_last = keep_last
        self.committed = 0  # checkpoints written through this object

    def begin(self, step: int, needed_bytes: int = 0) -> Path:
        """A fresh directory to write checkpoint `step` into; ConfigError, before anything is
        written, when the disk cannot take it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self.recover()
        free = shutil.disk_usage(self.root).free
        if free < needed_bytes:
            raise ConfigError(
                f"checkpoint {step} needs about {needed_bytes / 1e6:.1f} MB, but {self.root} has "
                f"{free / 1e6:.1f} MB left: free some space, or lower "
                "trainer.keep_last; checkpoints already written are untouched"
            )
        temporary = self._aside(step)
        temporary.mkdir()
        return temporary

    def commit(self, step: int, state: dict[str, Any]) -> Path:
        """Add state.json, make the directory durable, give it its name and point `latest` at it. An
        older checkpoint of `step` is replaced.
        """
        temporary, final = self._aside(step), self.root / f"step_{step}"
        (temporary / STATE).write_text(json.dumps(state))
        (temporary / MANIFEST).write_text(json.dumps(_contents(temporary), indent=0))
        _sync(*temporary.rglob("*"), temporary)
        replaced = temporary.with_name(f"{temporary.name}-replaced")
        if final.exists():
            os.rename(final, replaced)
        os.rename(temporary, final)
        _sync(self.root)
        self._point("latest", final.name)
        self.committed += 1
        if replaced.exists():
            shutil.rmtree(replaced)
        self._prune()
        return final

    def recover(self) -> None:
        """Tidy up after a crash: restore a checkpoint that was being replaced, remove unfinished
        ones. Only for the process that writes here.
        """
        for path in sorted(self.root.iterdir()) if self.root.exists() else ():
            match = _ASIDE.fullmatch(path.name)
            if match is None or not path.is_dir():
                continue
            if match[2] and not (self.root / match[1]).exists():
                os.rename(path, self.root / match[1])
            else:
                shutil.rmtree(path)

    def mark_best(self, step: int, tau: float) -> bool:
        """Make checkpoint `step` the best one when its held-out accept length `tau` is the highest
        so far; True when it is.
        """
        held = self._best()
        if held is not None and self.best() is not None and held["tau"] >= tau:
            return False
        record = self.root / "best.json"
        temporary = record.with_suffix(".tmp")
        temporary.write_text(json.dumps({"step": step, "tau": tau}))
        _sync(temporary)
        os.replace(temporary, record)
        self._point("best", f"step_{step}")
        self._prune()
        return True

    def latest(self) -> Path | None:
        """The checkpoint that `latest` points at; if that is gone, the newest complete one.
        ConfigError where a copy of the run has directories instead of links: later checkpoints
        could not update them.
        """
        for link in (self.root / "best", self.root / "latest"):
            if link.is_dir() and not link.is_symlink():
                raise ConfigError(
                    f"{link} is a directory, but must be a link to a step_<n> beside it (a copy "
                    "that follows links turns it into a directory): remove it to use the newest "
                    "step_<n>, or replace it by a link (ln -s)"
                )
        link = self.root / "latest"
        if (link / STATE).is_file():
            return link.resolve()
        complete = [path for _, path in self._steps() if (path / STATE).is_file()]
        return complete[-1].resolve() if complete else None

    def candidates(self) -> list[Path]:
        """All checkpoints, the one that `latest` gives first, then from newest to oldest."""
        latest = self.latest()
        others = [path.resolve() for _, path in reversed(self._steps())]
        return ([] if latest is None else [latest]) + [path for path in others if path != latest]

    def best(self) -> Path | None:
        held = self._best()
        path = None if held is None else self.root / f"step_{held['step']}"
        return path.resolve() if path is not None and (path / STATE).is_file() else None

    @staticmethod
    def read_state(checkpoint: Path) -> dict[str, Any]:
        """The state given to `commit`. ConfigError when `checkpoint` is damaged, or is not one."""
        file = checkpoint / STATE
        if not file.is_file():
            raise ConfigError(f"{checkpoint} is not a checkpoint: it has no {STATE}")
        try:
            state: dict[str, Any] = json.loads(file.read_text())
        except (ValueError, OSError) as error:  # not JSON, not text, not readable
            raise ConfigError(f"{file} is damaged ({error}): use another checkpoint") from error
        return state

    def _aside(self, step: int) -> Path:
        return self.root / f".tmp-step_{step}"

    def _best(self) -> dict[str, Any] | None:
        record = self.root / "best.json"
        try:
            return json.loads(record.read_text()) if record.exists() else None
        except ValueError:  # a damaged best.json counts as missing
            return None

    def _point(self, name: str, target: str) -> None:
        temporary = self.root / f".{name}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        os.replace(temporary, self.root / name)
        _sync(self.root)

    def _steps(self) -> list[tuple[int, Path]]:
        """(step, directory), oldest step first."""
        paths = (
            [path for path in self.root.iterdir() if not path.is_symlink()]
            if self.root.exists()
            else []
        )
        return sorted(
            (int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name))
        )

    def _prune(self) -> None:
        steps = self._steps()
        kept = {
            self.latest(),
            self.best(),
            *(path.resolve() for _, path in steps[-max(1, self.keep_last) :]),
        }
        for step, path in steps:
            if path.resolve() not in kept:
                # renamed first: half a checkpoint must not have the name of a whole one
                os.rename(path, self._aside(step))
                shutil.rmtree(self._aside(step))


def resolve_resume(mode: str, path: str | None, store: CheckpointStore) -> Path | None:
    """The checkpoint to continue from: auto = the newest of this run that is whole, if any; disable
    = none; path = the one named by resume_from_path.

    Damaged checkpoints that auto passes over are logged. ConfigError when all of them are damaged,
    or the one that was named is. Only for the process that owns the run directory.
    """
    if mode == "disable":
        return None
    if mode == "auto":
        store.recover()
        return _newest_whole(store)
    if path is None:
        raise ConfigError(
            "trainer.resume_mode=path needs trainer.resume_from_path, the checkpoint directory to "
            "continue from"
        )
    checkpoint = find_checkpoint(Path(path).expanduser(), prefer="latest")
    if wrong := damage(checkpoint):
        raise ConfigError(f"checkpoint {checkpoint} is damaged ({wrong}): use another one")
    return checkpoint


def _newest_whole(store: CheckpointStore) -> Path | None:
    found = store.candidates()
    for checkpoint in found:
        wrong = damage(checkpoint)
        if not wrong:
            return checkpoint
        log.warning("checkpoint %s is damaged (%s): trying the one before it", checkpoint, wrong)
    if found:
        raise ConfigError(
            f"every checkpoint in {store.root} is damaged ({len(found)} found): move them away to "
            "start from the beginning"
        )
    return None


def damage(checkpoint: Path) -> str:
    """Why training cannot continue from `checkpoint`; empty when it is whole. Every byte of it is
    read.
    """
    try:
        CheckpointStore.read_state(checkpoint)
    except ConfigError as error:
        return str(error)
    if not (checkpoint / "dcp" / ".metadata").is_file():
        return "it has no dcp/.metadata"
    if not (checkpoint / MANIFEST).is_file():
        return ""
    try:
        announced, found = json.loads((checkpoint / MANIFEST).read_text()), _contents(checkpoint)
    except (ValueError, OSError) as error:
        return f"{MANIFEST}: {error}"
    wrong = [name for name, entry in announced.items() if found.get(name) != entry]
    return f"{', '.join(wrong[:4])}: missing or changed" if wrong else ""


def _contents(folder: Path) -> dict[str, list[int]]:
    """name -> [bytes, CRC-32] of every file below `folder` but the manifest."""
    contents = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            crc = 0
            with path.open("rb") as file:
                while block := file.read(1 << 24):
                    crc = zlib.crc32(block, crc)
            contents[str(path.relative_to(folder))] = [path.stat().st_size, crc]
    return contents


def find_checkpoint(path: Path, prefer: str = "best") -> Path:
    """A checkpoint directory, from itself, from a run directory or from its checkpoints/ folder.

    Of a run, the `prefer`red of "best" and "latest", else the other.
    """
    if (path / STATE).is_file():
        return path.resolve()
    for run_dir in (path, path.parent) if path.name == "checkpoints" else (path,):
        store = CheckpointStore(run_dir, keep_last=1)
        best, latest = store.best(), store.latest()
        found = (latest or best) if prefer == "latest" else (best or latest)
        if found is not None:
            return found
    raise ConfigError(
        f"{path} is neither a checkpoint nor a run directory with one (no {STATE} found)"
    )


def check_identity(checkpoint: Path, ours: dict[str, Any]) -> None:
    """ConfigError with every difference when `checkpoint` was made for another target, draft or
    template.
    """
    theirs = CheckpointStore.read_state(checkpoint).get("identity", {})
    rows = [
        f"{key}: checkpoint {theirs.get(key)!r}, now {value!r}"
        for key, value in ours.items()
        if theirs.get(key) != value
    ]
    if rows:
        raise ConfigError(
            f"checkpoint {checkpoint} belongs to another run ({'; '.join(rows)}): restore these "
            "values, or start from its exported draft with draft.path"
        )


def _sync(*paths: Path) -> None:
    """Flush files and directories to the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
