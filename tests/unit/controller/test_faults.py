"""Restart budget, stop signals and lost processes, without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from verl_opd.controller.faults import Restarts, Stopped, StopSignal, asked_to_stop, first_line
from verl_opd.controller.run import continuing
from verl_opd.errors import RestartsExhausted
from verl_opd.process import end_own

ROOT = Path(__file__).parents[3]


def test_every_restart_is_logged_and_the_last_one_ends_the_run(caplog: pytest.LogCaptureFixture):
    restarts = Restarts(2)
    restarts.spend("engine 0 is lost (a)")
    restarts.spend("trainer rank 1 died (b)")
    with pytest.raises(
        RestartsExhausted, match=r"engine 1 is lost \(c\), and trainer.max_restarts=2 are used up"
    ):
        restarts.spend("engine 1 is lost (c)")
    assert caplog.messages == [
        "engine 0 is lost (a): starting again, 1 of 2 restarts left",
        "trainer rank 1 died (b): starting again, 0 of 2 restarts left",
    ]


@pytest.mark.parametrize(
    ("error", "stop"),
    [
        (Stopped(), True),
        (SystemExit(signal.SIGTERM), True),
        (SystemExit(15), True),
        (SystemExit(1), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_rays_own_answer_to_sigterm_while_it_starts_is_a_stop_too(error: BaseException, stop: bool):
    assert asked_to_stop(error) is stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_interrupts(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
):
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked
        assert f"{number.name}: finishing this step" in capfd.readouterr().err
        signal.signal(number, signal.SIG_IGN)  # as ray.init may
        stop.arm()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_process_id_that_was_given_to_another_is_left_alone():
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert end_own([(other.pid, 1), (2**22 + 5, 1)], []) == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


# as multiprocessing names it, without the tracker that would clean up, and that a SIGKILL takes
# along
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
    """Its files, children that it started later, and what they share in memory; nothing of anybody
    else, and nothing before it has ended.
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
        assert older.is_running(), "what was there before is left alone"
        older.kill()
    finally:
        parent.kill()
        parent.wait()
        foreign.close()
        foreign.unlink()


def test_children_are_left_alone_unless_asked_for(tmp_path: Path):
    """A driver in a notebook has children that are none of ours."""
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


def test_the_line_that_continues_a_run_does_not_start_from_the_old_checkpoint_again():
    plain = ["verl-opd", "train", "quickstart", "optim.lr=1e-4"]
    newest = ["trainer.resume_mode=auto", "trainer.resume_from_path=null"]
    assert continuing(plain, "auto") == plain
    pinned = [
        *plain,
        "++trainer.resume_mode=path",
        "trainer.resume_from_path=runs/a/b/checkpoints/step_10",
    ]
    assert continuing(pinned, "path") == [*plain, *newest]
    assert continuing(plain, "path") == [*plain, *newest], "set by the recipe"


def test_first_line_of_an_error_without_text():
    assert first_line(ValueError()) == "ValueError"
    assert first_line(ValueError("a\nb")) == "a"
