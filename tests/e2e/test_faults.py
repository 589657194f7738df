"""A run whose processes are killed, stopped and asked to end, one after the other, and which goes
on by itself each time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, command, environment, metrics_of
from tests.e2e.test_loop import alive, descendants, shared_names, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

INJURIES = [
    ("VLLM::EngineCor", signal.SIGKILL),
    ("VLLM::Worker", signal.SIGSTOP),
    ("ray::AgentLoopWor", signal.SIGKILL),
    ("ray::RolloutServ", signal.SIGKILL),
    ("ray::TrainWorker", signal.SIGKILL),
]


def processes(root: int, title: str) -> list[int]:
    """Processes below `root` whose title begins like this, by id."""
    found = []
    for pid in sorted(descendants(root)):
        try:
            text = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text.startswith(title):
            found.append(pid)
    return found


def steps_of(folder: Path) -> list[int]:
    file = folder / "run" / "metrics.jsonl"
    return (
        [row["training/global_step"] for row in metrics_of(folder) if "training/global_step" in row]
        if file.exists()
        else []
    )


def test_a_run_survives_dying_processes_and_stops_on_a_signal(tiny_llama_dir: Path, folder: Path):
    overrides = [
        "trainer.total_training_steps=400",
        "trainer.save_freq=1",
        "trainer.max_restarts=8",
        "rollout.stall_timeout=6",
    ]
    arguments = command(
        tiny_llama_dir,
        folder,
        *overrides,
        "trainer.val_before_train=false",
        "data.val_files={}",
        "trainer.total_epochs=999",
    )
    log, before, store = folder / "log", shared_names(), folder / "run" / "checkpoints"
    with log.open("w") as output:
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment(), stdout=output, stderr=output
        )
    try:
        wait_for(lambda: steps_of(folder) or process.poll() is not None, 300, "the first step")
        for title, number in INJURIES:
            assert process.poll() is None, log.read_text()[-3000:]
            victims: list[int] = []
            wait_for(
                lambda title=title, victims=victims: (
                    victims.extend(processes(process.pid, title)) or victims
                ),
                20,
                f"a process called {title}: {log.read_text()[-1000:]}",
                0.1,
            )
            restarts, reached = log.read_text().count("starting again"), max(steps_of(folder))
            if title == "ray::TrainWorker":
                wait_for(
                    lambda: list(store.glob(".tmp-step_*")),
                    60,
                    "a checkpoint that is being written",
                    0.002,
                )
            os.kill(victims[0], number)
            wait_for(
                lambda restarts=restarts, reached=reached: (
                    process.poll() is not None
                    or (
                        log.read_text().count("starting again") > restarts
                        and max(steps_of(folder)) > reached + 1
                    )
                ),
                240,
                f"the run to continue after {title} got {number.name}",
            )
        assert process.poll() is None, log.read_text()[-3000:]
        family = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    said = log.read_text()
    wait_for(lambda: not alive(family), 60, f"all processes to end: {alive(family)}")
    assert re.search(r"trainer rank \d died", said)
    assert re.search(r"agent loop worker \d died", said)
    assert said.count("is lost (") >= 3
    assert re.search(r"no (token for any request|answer to \w+) in rollout.stall_timeout=6 s", said)
    assert "SIGTERM: finishing this step, then writing a checkpoint" in said
    assert re.search(
        r"stopped; the newest checkpoint is \S*step_\d+; continue with:\nverl-opd train", said
    )
    wait_for(
        lambda: not shared_names() - before,
        30,
        f"shared memory to be removed: {shared_names() - before}",
    )

    done = steps_of(folder)
    assert set(done) == set(range(1, max(done) + 1)), "no step is missing"
    state = json.loads((store / "latest" / "state.json").read_text())
    assert state["progress"]["opd_step"] == max(done)
    rows = metrics_of(folder)
    assert sum(row.get("actor/skipped_steps", 0) for row in rows) == 0
    assert all(row.get("opd/replay_mismatch", 0) == 0 for row in rows), (
        "replaced engines draft with the current weights"
    )


def test_a_teacher_that_hangs_or_dies_is_replaced_while_the_run_goes_on(
    tiny_llama_dir: Path, folder: Path
):
    overrides = [
        "trainer.total_training_steps=400",
        "trainer.total_epochs=999",
        "trainer.n_student_workers=1",
        "trainer.val_before_train=false",
        "data.val_files={}",
        "teacher.source=server",
        "teacher.kv_cache_gb=1",
        "rollout.stall_timeout=15",
    ]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(tiny_llama_dir, folder, *overrides),
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=output,
        )

    def restarts() -> float:
        return max(row.get("rollout/teacher_restarts", 0) for row in metrics_of(folder))

    def wait_while_running(done: Callable[[], Any], what: str) -> None:
        wait_for(lambda: process.poll() is not None or done(), 300, what)
        assert process.poll() is None, log.read_text()[-3000:]

    try:
        wait_while_running(lambda: steps_of(folder), "the first step")
        (server,) = processes(process.pid, "ray::TeacherServ")
        for core in processes(server, "VLLM::"):
            os.kill(core, signal.SIGSTOP)
        wait_while_running(lambda: restarts() == 1, "the hanging teacher to be replaced")
        (server,) = processes(process.pid, "ray::TeacherServ")
        os.kill(server, signal.SIGKILL)
        wait_while_running(lambda: restarts() == 2, "the dead teacher to be replaced")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    printed = log.read_text()
    assert re.search(
        r"teacher 0 is lost \(no token for any request in rollout.stall_timeout=15 s\)", printed
    )
    assert printed.count("teacher 0 is lost") == printed.count("starting again") == 2
    done = steps_of(folder)
    assert done == list(range(1, max(done) + 1)), "no step ran twice, and none is missing"
