"""Small facts about the current process that every actor needs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

_SHARED = Path("/dev/shm")


def redirect_output(log_path: str) -> None:
    """Send stdout and stderr of this process, and of children it starts later, to `log_path` (appended)."""
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    target = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def log_tail(log_path: Path, lines: int = 15) -> str:
    """The last lines of a log file, for an error message; a hint when there is none."""
    if not log_path.exists():
        return f"(no log at {log_path})"
    return "\n".join(log_path.read_text(errors="replace").splitlines()[-lines:])


def own_processes() -> dict[str, Any]:
    """{"processes": [(pid, start)], "shared_memory": [name]} of this process and all below it, so that they can be ended, and what they share in
    /dev/shm removed, by `end_own` later: they, and nobody else."""
    import psutil

    me = psutil.Process()
    family = [me.pid, *(child.pid for child in me.children(recursive=True))]
    return {
        "processes": [(pid, start) for pid in family if (start := _start(pid)) is not None],
        "shared_memory": sorted({name for pid in family for name in _segments(pid)}),
    }


def end_own(processes: list[tuple[int, int]], shared_memory: list[str]) -> list[int]:
    """SIGKILL those of `processes` (from `own_processes`, on this machine) that still live, then remove the segments they leave, as a killed engine
    cannot. A process id that was given to another is left alone."""
    ended = []
    for pid, start in processes:
        if _start(pid) == start:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            ended.append(pid)
    for name in shared_memory:
        (_SHARED / name).unlink(missing_ok=True)
    return ended


def _segments(pid: int) -> set[str]:
    """Names below /dev/shm of the Python shared memory and semaphores that a process maps; engines talk to their workers through them."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    paths = (Path(line.split(maxsplit=5)[5]) for line in lines if any(f"{_SHARED}/{kind}" in line for kind in ("psm_", "sem.mp-")))
    return {path.name for path in paths if path.exists()}


def _start(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process, which no change of the clock moves; None when there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None
