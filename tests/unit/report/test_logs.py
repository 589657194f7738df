"""What a line of ours looks like: plain on the console, with time, level and role in files."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.engines.test_settings import settings
from verl_opd.config.schema import Config
from verl_opd.engines.settings import Host
from verl_opd.engines.vllm import VllmEngine
from verl_opd.logs import TREE
from verl_opd.report.console import Console
from verl_opd.report.logs import driver_log
from verl_opd.rollout.agent_loop import AgentLoopWorker
from verl_opd.training.worker import TrainWorker

ROOT = Path(__file__).parents[3]
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
log = logging.getLogger("verl_opd.controller.fleet")


def test_the_driver_prints_messages_and_writes_them_with_time_and_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with driver_log(Console(), tmp_path / "run.log"):
        log.info("draft [/tmp/a], two\nlines")
        log.warning("%d samples dropped", 3)
        log.debug("not this one")
        logging.getLogger("another.package").warning("nor this one")
    log.info("nor this one, afterwards")
    assert capsys.readouterr().out == "draft [/tmp/a], two\nlines\n3 samples dropped\n"
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [re.sub(TIME, "T", line) for line in lines] == [
        "T INFO    driver  draft [/tmp/a], two",
        "T INFO    driver  lines",
        "T WARNING driver  3 samples dropped",
    ]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log files and roles that processes open, as "file: role"."""
    calls: list[str] = []
    for module in ("training.worker", "engines.vllm", "rollout.agent_loop"):
        monkeypatch.setattr(f"verl_opd.{module}.redirect_output", calls.append)
        monkeypatch.setattr(
            f"verl_opd.{module}.open_log", lambda role: calls.append(f"{calls.pop()}: {role}")
        )
    return calls


def test_each_kind_of_process_opens_its_log_under_its_role(
    opened: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    cfg = Config()
    cfg.trainer.device, cfg.compute.num_threads = "cpu", torch.get_num_threads()
    TrainWorker(cfg, {}, 3, 4, (), "t.log")
    VllmEngine(settings(Host(role="teacher 2", log_path="e.log")))
    AgentLoopWorker("single_turn", [], None, 1, 1.0, role="agent loop 1", log_path="a.log")
    assert opened == ["t.log: trainer rank 3", "e.log: teacher 2", "a.log: agent loop 1"]


def test_a_process_without_a_log_file_leaves_its_output_alone(opened: list[str]):
    VllmEngine(settings())
    AgentLoopWorker("single_turn", [], None, 1, 1.0)
    assert opened == []


def test_a_continued_run_appends_and_the_tree_is_left_as_it_was(tmp_path: Path):
    tree = logging.getLogger(TREE)
    before = list(tree.handlers), tree.level, tree.propagate
    for text in ("one", "two"):
        with driver_log(Console(), tmp_path / "run.log"):
            log.info(text)
    assert (list(tree.handlers), tree.level, tree.propagate) == before
    assert [line.split()[-1] for line in (tmp_path / "run.log").read_text().splitlines()] == [
        "one",
        "two",
    ]


def test_a_message_does_not_break_a_progress_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """On a terminal the bar is drawn anew below the message, by the console that draws both."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    console = Console()
    with driver_log(console, tmp_path / "run.log"), console.stage("OPD", 3, 1) as bar:
        log.info("an engine was replaced")
        bar.advance({"actor/lr": 0.5})
    lines = capsys.readouterr().out.split("\n")
    (message,) = [line for line in lines if "an engine was replaced" in line]
    assert message.split("\x1b[2K")[-1] == "an engine was replaced"  # the bar is erased before
    assert "lr 0.5" in lines[-2]


PROCESS = """
import logging
from verl_opd.logs import open_log
from verl_opd.process import redirect_output
redirect_output("{path}")
open_log({role!r})
logging.getLogger("verl_opd.training.worker").info("ready\\nto go")
logging.getLogger("elsewhere").info("not this one")
"""


@pytest.mark.parametrize(
    ("file", "role"), [("train_0.log", "trainer rank 0"), ("other.log", "any other process")]
)
def test_the_file_of_a_process_names_its_role_on_every_line(tmp_path: Path, file: str, role: str):
    code = PROCESS.format(path=tmp_path / file, role=role)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == done.stderr == ""
    lines = (tmp_path / file).read_text().splitlines()
    assert [re.sub(TIME, "T", line) for line in lines] == [
        f"T INFO    {role}  ready",
        f"T INFO    {role}  to go",
    ]
