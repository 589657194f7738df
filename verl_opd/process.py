"""What every process of a run needs: where its output goes, and somebody who cleans up after it however it ends."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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


def clean_up_after(files: Sequence[Path] = ()) -> None:
    """Start a process, outside of this one's family, that waits until this one is gone, even by SIGKILL, and then ends what is left of its children as
    they are now, and removes `files` and the segments and semaphores that the children share in /dev/shm."""
    import psutil

    me = psutil.Process()
    family = [child.pid for child in me.children(recursive=True)]
    task = {
        "pid": me.pid,
        "processes": [(pid, start) for pid in family if (start := _start(pid)) is not None],
        "files": sorted({*map(str, files), *(str(path) for pid in [me.pid, *family] for path in _segments(pid))}),
    }
    command = [sys.executable, __file__]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, start_new_session=True, check=False)
    if done.returncode:
        raise RuntimeError(f"no process to clean up after this one could be started: {done.stderr}")


def end_own(processes: Sequence[tuple[int, int]], files: Sequence[str]) -> list[int]:
    """SIGKILL those of `processes`, (pid, start), that still live, then remove `files`, as a killed engine cannot. A process id that was given to
    another is left alone."""
    ended = []
    for pid, start in processes:
        if _start(pid) == start:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            ended.append(pid)
    for name in files:
        Path(name).unlink(missing_ok=True)
    return ended


def _segments(pid: int) -> set[Path]:
    """The Python shared memory and semaphores below /dev/shm that a process maps; engines talk to their workers through them."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    paths = (Path(line.split(maxsplit=5)[5]) for line in lines if any(f"{_SHARED}/{kind}" in line for kind in ("psm_", "sem.mp-")))
    return {path for path in paths if path.exists()}


def _start(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process, which no change of the clock moves; None when there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _wait_and_clean() -> None:
    """What the process of `clean_up_after` does. It leaves its parent at once, which Ray would otherwise kill with its children."""
    task = json.load(sys.stdin)
    parent = os.pidfd_open(task["pid"])
    if os.fork():
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    select.select([parent], [], [])
    end_own([tuple(entry) for entry in task["processes"]], task["files"])


if __name__ == "__main__":
    _wait_and_clean()
