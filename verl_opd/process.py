"""What every process of a run needs: where its output goes, and somebody who cleans up after it
however it ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

_SHARED = Path("/dev/shm")
_LOOK_SECONDS = 1.0  # how often the process that cleans up notes what there is to clean


def redirect_output(log_path: str) -> None:
    """Send stdout and stderr of this process, and of children it starts later, to `log_path`
    (appended).
    """
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    target = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def clean_up_after(files: Sequence[Path] = (), children: bool = False) -> None:
    """Start a process, outside of this one's family, that waits until this one is gone, even by
    SIGKILL, and then removes `files`. With `children` it also ends what is left of all that this
    process has started since, and removes the segments and semaphores that they shared in /dev/shm.
    """
    me = os.getpid()
    task = {
        "pid": me,
        "start": _start(me),
        "files": list(map(str, files)),
        "children": children,
        "before": sorted(_descendants(me)),
    }
    command = [sys.executable, __file__]
    done = subprocess.run(
        command,
        input=json.dumps(task),
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"no process to clean up after this one could be started: {done.stderr}")


def end_own(processes: Iterable[tuple[int, int]], files: Iterable[str]) -> list[int]:
    """SIGKILL those of `processes`, (pid, start), that still live, then remove `files`, as a killed
    engine cannot. A process id that was given to another is left alone.
    """
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
    """The Python shared memory and semaphores below /dev/shm that a process maps; engines talk to
    their workers through them.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    paths = (
        Path(line.split(maxsplit=5)[5])
        for line in lines
        if any(f"{_SHARED}/{kind}" in line for kind in ("psm_", "sem.mp-"))
    )
    return {path for path in paths if path.exists()}


def _start(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process, which no change of the clock moves; None
    when there is no such process, or only what its parent has not collected yet.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _descendants(pid: int) -> set[tuple[int, int]]:
    """(pid, start) of every process below `pid`, by /proc."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(
                    Path(entry.path, "stat").read_text().rsplit(")", 1)[1].split()[1]
                )
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {(child, start) for child in found - {pid} if (start := _start(child)) is not None}


def _opened(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where kernel or container have
    no such thing.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _wait_and_clean() -> None:
    """What the process of `clean_up_after` does. It leaves its parent at once, which Ray would
    otherwise kill with its children.
    """
    task = json.load(sys.stdin)
    pid, start = task["pid"], task["start"]
    handle = _opened(pid)
    if os.fork():
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    family, files = set[tuple[int, int]](), set[str](task["files"])
    before = {(os.getpid(), _start(os.getpid())), *map(tuple, task["before"])}
    while _start(pid) == start:
        if task["children"]:
            family |= _descendants(pid) - before
            files |= {
                str(path)
                for child in [pid, *(child for child, _ in family)]
                for path in _segments(child)
            }
        select.select([handle] if handle is not None else [], [], [], _LOOK_SECONDS)
    end_own(family, files)


if __name__ == "__main__":
    _wait_and_clean()
