import json

import pytest

from verl_opd.errors import ConfigError
from verl_opd.report.rundir import RunDir, write_atomic

IDENTITY = {"target": "a", "draft_config": "1"}


def test_open_describe_and_reopen(tmp_path):
    run = RunDir(tmp_path / "run")
    run.open(IDENTITY, resume=True)
    run.describe("x: 1\n", ["verl-opd", "train", "q q"])
    run.open(IDENTITY, resume=True)
    run.describe("x: 1\n", ["verl-opd", "train", "again"])
    assert (run.root / "command.txt").read_text().splitlines() == [
        "verl-opd train 'q q'",
        "verl-opd train again",
    ]
    assert json.loads((run.root / "versions.json").read_text())["torch"]


def test_another_runs_folder_is_an_error_with_the_difference(tmp_path):
    RunDir(tmp_path).open(IDENTITY, resume=True)
    with pytest.raises(ConfigError, match="draft_config: was '1', is now '2'"):
        RunDir(tmp_path).open({**IDENTITY, "draft_config": "2"}, resume=True)


def test_a_folder_that_is_not_ours_is_an_error_and_stays_unchanged(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="is neither empty nor"):
        RunDir(tmp_path).open(IDENTITY, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_checkpoints_are_not_overwritten_when_resume_is_disabled(tmp_path):
    run = RunDir(tmp_path)
    run.open(IDENTITY, resume=False)
    (run.checkpoints / "step_3").mkdir()
    with pytest.raises(ConfigError, match="resume_mode=disable"):
        RunDir(tmp_path).open(IDENTITY, resume=False)


def test_write_atomic_leaves_no_temporary(tmp_path):
    write_atomic(tmp_path / "a.json", "1")
    write_atomic(tmp_path / "a.json", "2")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "2"
