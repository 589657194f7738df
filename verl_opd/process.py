"""Redirects the output of a process, and cleans up after it in whichever way it ends.

This file also runs as a script: `clean_up_after` starts it as the process that cleans up, which
therefore imports nothing that takes long.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

_SHARED = Path("/dev/shm")
_LOOK_SECONDS = 1.0  # how often the process that cleans up looks for new processes and files


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
    """Start a process, in its own session, that waits until this one is gone, even by SIGKILL,
    and then removes `files`. With `children` it also kills all processes below this one that were
    started after this call, and removes the segments and semaphores that they shared in /dev/shm.
    """
    task = {"pid": os.getpid(), "files": list(map(str, files)), "children": children}
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the process that cleans up could not be started: {done.stderr}")


def kill_and_remove(processes: Iterable[psutil.Process], files: Iterable[str]) -> list[int]:
    """SIGKILL those of `processes` that still exist, then remove `files`, which a killed engine
    leaves behind. Returns the ids that were killed; reused process ids are skipped.
    """
    killed = []
    for process in processes:
        try:
            process.kill()  # compares the start time first
        except psutil.NoSuchProcess:
            continue
        killed.append(process.pid)
    for name in files:
        Path(name).unlink(missing_ok=True)
    return killed


def _segments(process: psutil.Process) -> set[str]:
    """Paths of the Python shared memory and semaphores in /dev/shm that a process maps; engines
    talk to their workers through them.
    """
    try:
        # psutil's memory_maps reads smaps, for which the kernel walks every page of an engine
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    paths = (
        line.split(maxsplit=5)[5]
        for line in lines
        if any(f"{_SHARED}/{kind}" in line for kind in ("psm_", "sem.mp-"))
    )
    return {path for path in paths if Path(path).exists()}


def _descendants(process: psutil.Process) -> set[psutil.Process]:
    """All processes below `process`; none once it has ended."""
    try:
        return set(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _gone(process: psutil.Process, seconds: float) -> bool:
    """Wait up to `seconds` for a process to end; True also for one that its parent has not
    collected yet.
    """
    try:
        process.wait(seconds)
        return True
    except psutil.TimeoutExpired:
        pass
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _wait_and_clean() -> None:
    """The main function of the process that `clean_up_after` starts. It detaches from its parent at
    once, because Ray would otherwise kill it together with its parent's children.
    """
    task = json.load(sys.stdin)
    parent = psutil.Process(task["pid"])
    before = _descendants(parent)
    if os.fork():
        return
    before.add(psutil.Process())  # a child again where the parent adopts orphans
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for stream in (0, 1, 2):  # releases the caller, which reads both outputs to their end
        os.dup2(nothing, stream)
    family, files = set[psutil.Process](), set[str](task["files"])
    while True:
        if task["children"]:
            family |= _descendants(parent) - before
            files |= {path for process in (parent, *family) for path in _segments(process)}
        if _gone(parent, _LOOK_SECONDS):
            break
    kill_and_remove(family, files)


if __name__ == "__main__":
    _wait_and_clean()
