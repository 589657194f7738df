"""The checkpoint store: what a crash at any point leaves behind, what is kept, what is an error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from verl_opd.errors import ConfigError
from verl_opd.training.checkpoint import (
    CheckpointStore,
    check_identity,
    checkpoint_bytes,
    find_checkpoint,
    resolve_resume,
)

ROOT = Path(__file__).parents[3]
IDENTITY = {"target": "t", "family": "dflash", "draft_config": "abc"}


def fill(directory: Path, mark: object = "") -> None:
    (directory / "dcp").mkdir()
    (directory / "dcp" / ".metadata").write_text(str(mark))


def save(store: CheckpointStore, step: int, **state: Any) -> Path:
    fill(store.begin(step), step)
    return store.commit(step, {"step": step, "identity": IDENTITY, **state})


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir())


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, keep_last=2)


# -- writing ---------------------------------------------------------------------------------------


def test_a_checkpoint_appears_whole_and_is_pointed_at(
    store: CheckpointStore, tmp_path: Path
) -> None:
    assert store.latest() is None
    assert store.best() is None
    directory = store.begin(3)
    fill(directory)
    assert names(store) == [".tmp-step_3"]
    assert store.latest() is None
    committed = store.commit(3, {"step": 3})
    assert committed == store.latest() == tmp_path / "checkpoints" / "step_3"
    assert os.readlink(store.root / "latest") == "step_3"
    assert store.read_state(committed) == {"step": 3}
    assert names(store) == ["latest", "step_3"]


def test_the_newest_and_the_best_are_kept(store: CheckpointStore) -> None:
    for step in range(1, 6):
        save(store, step)
        if step == 2:
            assert store.mark_best(2, 1.8)
    assert names(store) == ["best", "best.json", "latest", "step_2", "step_4", "step_5"]
    assert store.best() == store.root / "step_2"
    assert store.latest() == store.root / "step_5"


def test_only_a_higher_tau_becomes_best(store: CheckpointStore) -> None:
    for step, tau, best in [(1, 1.5, True), (2, 1.4, False), (3, 1.5, False), (4, 1.6, True)]:
        save(store, step)
        assert store.mark_best(step, tau) is best
    assert store.best() == store.root / "step_4" == (store.root / "best").resolve()
    assert "step_1" not in names(store)


def test_a_best_that_was_deleted_gives_way(store: CheckpointStore) -> None:
    gone = save(store, 1)
    store.mark_best(1, 9.0)
    shutil.rmtree(gone)
    save(store, 2)
    assert store.best() is None
    assert store.mark_best(2, 1.0)
    assert store.best() == store.root / "step_2"


def test_a_step_can_be_written_again(store: CheckpointStore) -> None:
    save(store, 1, attempt=1)
    save(store, 1, attempt=2)
    assert store.read_state(store.root / "step_1")["attempt"] == 2
    assert names(store) == ["latest", "step_1"]


def test_a_full_disk_is_noticed_before_anything_is_written(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 5_000_000, 5_000_000))
    with pytest.raises(
        ConfigError, match=r"checkpoint 2 needs about 15\.0 MB, but .* has 5\.0 MB left"
    ):
        store.begin(2, 15_000_000)
    assert names(store) == ["latest", "step_1"]
    store.begin(2, 5_000_000)


def test_size_of_a_checkpoint() -> None:
    assert (
        checkpoint_bytes(1_000_000) == 14_000_000 + 2**20
    )  # 4 B weights, 2 x 4 B moments, 2 B published


# -- crashes ---------------------------------------------------------------------------------------


class Crash(Exception):
    pass


def crash_at(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """The process dies right before its `number`-th call of os.`call`."""
    real, count = getattr(os, call), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            raise Crash
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, dying)


def test_a_crash_while_filling_leaves_the_previous_one(store: CheckpointStore) -> None:
    save(store, 1)
    fill(store.begin(2))
    again = CheckpointStore(store.root.parent, keep_last=2)
    assert resolve_resume("auto", None, again) == store.root / "step_1"
    save(again, 3)
    assert names(again) == ["latest", "step_1", "step_3"]


@pytest.mark.parametrize("call", ["fsync", "rename", "replace"])
def test_a_crash_during_commit_leaves_the_previous_one(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    save(store, 1)
    fill(store.begin(2))
    with monkeypatch.context() as patch:
        crash_at(patch, call, 1)
        with pytest.raises(Crash):
            store.commit(2, {"step": 2, "identity": IDENTITY})
    resumed = resolve_resume("auto", None, CheckpointStore(store.root.parent, keep_last=2))
    assert resumed == store.root / "step_1"
    save(store, 3)
    assert store.latest() == store.root / "step_3"


@pytest.mark.parametrize("number", [1, 2])
def test_a_crash_while_replacing_keeps_one_of_the_two(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(store, 1, attempt=1)
    fill(store.begin(1))
    with monkeypatch.context() as patch:
        crash_at(patch, "rename", number)
        with pytest.raises(Crash):
            store.commit(1, {"step": 1, "identity": IDENTITY, "attempt": 2})
    resumed = resolve_resume("auto", None, CheckpointStore(store.root.parent, keep_last=2))
    assert resumed == store.root / "step_1"
    assert store.read_state(resumed)["attempt"] == 1
    assert names(store) == ["latest", "step_1"]


def test_a_crash_while_pruning_leaves_no_half_checkpoint_under_its_name(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1)
    save(store, 2)

    def die(_: object) -> None:
        raise Crash

    fill(store.begin(3))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(Crash):
            store.commit(3, {"step": 3})
    assert "step_1" not in names(store)
    assert store.latest() == store.root / "step_3"
    store.begin(4)
    assert names(store) == [".tmp-step_4", "latest", "step_2", "step_3"]


def test_only_our_leftovers_are_removed(store: CheckpointStore) -> None:
    store.root.mkdir()
    for foreign in ("notes", ".tmp-step_x", ".tmp-step_3.bak", "step_best"):
        (store.root / foreign).mkdir()
    (store.root / ".tmp-step_4").write_text("a file")
    (store.root / ".tmp-step_5").mkdir()
    save(store, 9)
    save(store, 10)
    save(store, 11)
    assert names(store) == [
        ".tmp-step_3.bak",
        ".tmp-step_4",
        ".tmp-step_x",
        "latest",
        "notes",
        "step_10",
        "step_11",
        "step_best",
    ]


# -- finding ---------------------------------------------------------------------------------------


def test_resume_modes(store: CheckpointStore, tmp_path: Path) -> None:
    assert resolve_resume("auto", None, store) is None
    first, second = save(store, 1), save(store, 2)
    assert resolve_resume("auto", None, store) == second
    assert resolve_resume("disable", None, store) is None
    assert resolve_resume("path", str(first), store) == first
    store.mark_best(1, 2.0)
    assert (
        resolve_resume("path", str(tmp_path), store) == second
    )  # the newest of that run, best or not
    with pytest.raises(ConfigError, match="resume_from_path"):
        resolve_resume("path", None, store)
    with pytest.raises(ConfigError, match=r"nowhere is neither a checkpoint nor a run directory"):
        resolve_resume("path", str(tmp_path / "nowhere"), store)


def missing(checkpoint: Path) -> str:
    (checkpoint / "dcp" / ".metadata").unlink()
    return "it has no dcp/.metadata"


def cut_state(checkpoint: Path) -> str:
    (checkpoint / "state.json").write_text('{"step": ')
    return "state.json is damaged"


def no_text(checkpoint: Path) -> str:
    (checkpoint / "state.json").write_bytes(b"\xff\xfe{}")
    return "state.json is damaged"


def one_other_byte(checkpoint: Path) -> str:
    (checkpoint / "dcp" / ".metadata").write_text("0")
    return "dcp/.metadata: missing or changed"


def lost_file(checkpoint: Path) -> str:
    (checkpoint / "draft").unlink()
    return "draft: missing or changed"


@pytest.mark.parametrize("harm", [missing, cut_state, no_text, one_other_byte, lost_file])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it_and_that_is_logged(
    store: CheckpointStore, harm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        fill(store.begin(step), step)
        (store.root / f".tmp-step_{step}" / "draft").write_text("weights")
        store.commit(step, {"identity": IDENTITY})
    what = harm(store.root / "step_2")
    assert resolve_resume("auto", None, store) == (store.root / "step_1").resolve()
    (logged,) = caplog.messages
    assert "step_2 is damaged" in logged
    assert what in logged
    with pytest.raises(ConfigError, match="step_2 is damaged"):
        resolve_resume("path", str(store.root / "step_2"), store)
    harm(store.root / "step_1")
    with pytest.raises(ConfigError, match=r"every checkpoint in .* is damaged .2 found"):
        resolve_resume("auto", None, store)


def test_without_the_newest_directory_the_one_before_is_used(store: CheckpointStore) -> None:
    save(store, 9)
    shutil.rmtree(save(store, 10))
    assert store.latest() == store.root / "step_9"


def test_a_run_directory_gives_its_best_else_its_latest(
    store: CheckpointStore, tmp_path: Path
) -> None:
    first, second = save(store, 1), save(store, 2)
    places = [tmp_path, tmp_path / "checkpoints"]
    assert [find_checkpoint(place) for place in places] == [second, second]
    store.mark_best(1, 1.2)
    assert [find_checkpoint(place) for place in places] == [first, first]
    assert [find_checkpoint(place, prefer="latest") for place in places] == [second, second]
    assert find_checkpoint(store.root / "latest") == find_checkpoint(second) == second


def test_another_runs_checkpoint_is_an_error_with_every_difference(store: CheckpointStore) -> None:
    checkpoint = save(store, 1)
    check_identity(checkpoint, IDENTITY)
    with pytest.raises(
        ConfigError,
        match=r"target: checkpoint 't', now 'u'; draft_config: checkpoint 'abc', now 'def'\)",
    ):
        check_identity(checkpoint, {**IDENTITY, "target": "u", "draft_config": "def"})


def test_a_run_copied_without_its_links_is_an_error_before_it_trains(
    store: CheckpointStore, tmp_path: Path
) -> None:
    save(store, 3)
    shutil.copytree(tmp_path, tmp_path.parent / "copy")  # follows links, as many copying tools do
    copied = CheckpointStore(tmp_path.parent / "copy", keep_last=2)
    with pytest.raises(
        ConfigError, match="latest is a directory, but must be a link to a step_<n> beside it"
    ):
        resolve_resume("auto", None, copied)
    shutil.rmtree(copied.root / "latest")
    assert resolve_resume("auto", None, copied) == (copied.root / "step_3").resolve()


FULL_DISK = """
import json, os, subprocess, sys, torch
from pathlib import Path
from verl_opd.drafts.files import write_draft
from verl_opd.errors import CheckpointError
from verl_opd.training.checkpoint import CheckpointStore, damage
from verl_opd.training.state import save_distributed

run = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(run)], check=True)
store = CheckpointStore(run, keep_last=2)

def write(step, size):
    draft = torch.nn.Linear(size, size)
    optimizer = torch.optim.AdamW(draft.parameters())
    draft(torch.ones(1, size)).sum().backward()
    optimizer.step()
    directory = store.begin(step)
    save_distributed(draft, optimizer, str(directory / "dcp"), 0)
    write_draft(draft.state_dict(), {}, directory / "draft")
    store.commit(step, {})

write(1, 256)
said = []
for size in (1024, 1024):
    try:
        write(2, size)
    except CheckpointError as error:
        said.append(str(error))
try:
    write_draft({"w": torch.ones(4 << 20)}, {}, run / "draft")
except Exception as error:
    said.append(str(error))
write(3, 256)
paths = store.candidates()
damages = [damage(path) for path in paths]
print(json.dumps([said, damages, [path.name for path in paths], os.listdir(run)]))
"""


def test_a_disk_that_is_really_full_costs_one_checkpoint_and_its_space_comes_back(
    tmp_path: Path,
) -> None:
    """On a file system of 6 MB of its own, which needs the right to mount one."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said, damages, names, left = json.loads(done.stdout.splitlines()[-1])
    assert [text.startswith("rank 0: ") for text in said] == [True, True, False], said
    assert "No space left on device" in said[2]
    assert damages == ["", ""]
    assert names == ["step_3", "step_1"]
    assert left == ["checkpoints"]
