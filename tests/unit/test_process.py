"""What a process leaves behind is removed however it ends, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from verl_opd.process import kill_and_remove

ROOT = Path(__file__).parents[2]


def test_a_reused_process_id_is_left_alone():
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        reused, ended = psutil.Process(other.pid), psutil.Process(other.pid)
        reused._ident = (other.pid, 1.0)  # as if noted when an older process had this id
        ended._pid, ended._ident = 2**22 + 5, (2**22 + 5, 1.0)  # above the largest id
        assert kill_and_remove([reused, ended], []) == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


# Named as by multiprocessing, without its tracker, which would clean up unless it is killed too.
CHILD = (
    "import mmap, time; f = open('/dev/shm/{name}', 'w+b'); f.truncate(64); m = "
    "mmap.mmap(f.fileno(), 64); print('up', flush=True); time.sleep(99)"
)
PARENT = """
import subprocess, sys, time
from pathlib import Path
from verl_opd.process import clean_up_after
older = subprocess.Popen(["sleep", "99"])
clean_up_after([Path(sys.argv[2])], children=sys.argv[4] == "children")
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, older.pid, flush=True)
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize("handles", [True, False], ids=["pidfd", "without pidfd"])
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "ended"])
def test_whatever_a_process_leaves_behind_is_cleaned_up_however_it_ends(
    tmp_path: Path, killed: bool, handles: bool
):
    """Its files, children that it started later, and what they share in memory; nothing else, and
    nothing before it has ended.
    """
    name, file = f"psm_test{os.getpid()}", tmp_path / "snapshot"
    foreign = shared_memory.SharedMemory(create=True, size=64)
    file.write_text("x")
    preamble = "" if handles else "import os\ndel os.pidfd_open\n"
    (tmp_path / "sitecustomize.py").write_text(preamble)
    arguments = [CHILD.format(name=name), str(file), "99" if killed else "3", "children"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        child, older = map(psutil.Process, map(int, parent.stdout.readline().split()))
        time.sleep(2.5)
        assert child.is_running()
        assert file.exists()
        assert (Path("/dev/shm") / name).exists()
        if killed:
            parent.kill()
        child.wait(10)
        parent.wait(10)
        deadline = time.monotonic() + 10
        while file.exists() or (Path("/dev/shm") / name).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (Path("/dev/shm") / foreign.name).exists()
        assert older.is_running(), "an older child is left alone"
        older.kill()
    finally:
        parent.kill()
        parent.wait()
        foreign.close()
        foreign.unlink()


def test_children_are_left_alone_unless_requested(tmp_path: Path):
    """A driver in a notebook has children of other packages."""
    name, file = f"psm_kept{os.getpid()}", tmp_path / "snapshot"
    file.write_text("x")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD.format(name=name), str(file), "99", "no"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    child, older = map(psutil.Process, map(int, parent.stdout.readline().split()))
    try:
        parent.kill()
        parent.wait(10)
        deadline = time.monotonic() + 10
        while file.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert child.is_running()
        assert (Path("/dev/shm") / name).exists()
    finally:
        child.kill()
        older.kill()
        (Path("/dev/shm") / name).unlink(missing_ok=True)
