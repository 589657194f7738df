"""Small facts about the current process that every actor needs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any


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
    """{"processes": [(pid, creation time)]} of this process and all below it, so that they can be ended by `end_own` later and nobody else."""
    import psutil

    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    return {"processes": [(process.pid, process.create_time()) for process in family]}


def end_own(processes: list[tuple[int, float]]) -> list[int]:
    """SIGKILL those of `processes` (from `own_processes`, on this machine) that still live; a process id that was given to another is left alone."""
    import psutil

    ended = []
    for pid, created in processes:
        try:
            if psutil.Process(pid).create_time() == created:
                os.kill(pid, signal.SIGKILL)
                ended.append(pid)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return ended
