"""Warm-up, OPD, validation, kill, resume and export of one tiny run; and the run that must become
nearly perfect.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.docs import undocumented
from tests.e2e.conftest import ROOT, command, environment, metrics_of, run, write_prompts
from verl_opd.config.schema import OptimConfig
from verl_opd.training.optim import lr_at

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


def descendants(pid: int) -> set[int]:
    """Process ids below `pid`, by /proc."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
                )
            except (FileNotFoundError, ProcessLookupError):
                continue
    found, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return found - {pid}


def alive(pids: set[int]) -> set[int]:
    states = {}
    for pid in pids:
        try:
            states[pid] = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return {pid for pid, state in states.items() if state != "Z"}


def shared_names() -> set[str]:
    """What drafts and engines keep in shared memory. (Named semaphores of 32 bytes may stay behind:
    engines make some after they have started.)
    """
    kinds = ("psm_", ".verl-opd-draft-")
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(kinds)}


def wait_for(condition, seconds: float, what: str, every: float = 0.5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(every)


def status(url: str, key: str | None) -> int:
    """HTTP status of a GET with this key."""
    request = urllib.request.Request(
        url, headers={} if key is None else {"Authorization": f"Bearer {key}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_killed_run_resumes_where_it_was_and_ends_as_planned(tiny_llama_dir: Path, folder: Path):
    overrides = [
        "sft.steps=1",
        "trainer.save_freq=1",
        "sft.updates_per_step=2",
        "trainer.updates_per_step=2",
    ]
    arguments = command(tiny_llama_dir, folder, *overrides)
    store = folder / "run" / "checkpoints"
    secret, before = "a-key-of-this-test-5cc1", shared_names()
    with (folder / "first.log").open("w") as log:
        first = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env={**environment(), "VERL_OPD_API_KEY": secret},
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(
            lambda: (store / "step_2").exists() or first.poll() is not None,
            480,
            "the second checkpoint",
        )
        assert first.poll() is None, (folder / "first.log").read_text()[-3000:]
        family = descendants(first.pid)
        url = re.search(r"HTTP at (http://127\.0\.0\.1:\d+)", (folder / "first.log").read_text())[1]
        assert [status(f"{url}/v1/models", key) for key in (secret, "another", None)] == [
            200,
            401,
            401,
        ]
    finally:
        first.kill()
        first.wait()
    wait_for(lambda: not alive(family), 120, f"processes of the killed run to end: {alive(family)}")
    wait_for(
        lambda: not shared_names() - before,
        30,
        f"shared memory to be removed: {shared_names() - before}",
    )

    written = [
        path
        for path in folder.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]
    assert written == [], "the key of the HTTP server is nowhere in the run directory or the output"

    saved = json.loads((store / "latest" / "state.json").read_text())
    output = run(arguments)
    assert "resuming from" in output

    steps = {
        row["training/global_step"]: row
        for row in metrics_of(folder)
        if "training/global_step" in row
    }
    assert sorted(steps) == [1, 2, 3, 4]
    optim = OptimConfig()
    expected = [sum(lr_at(2 * i + j, 6, optim) for j in range(2)) / 2 for i in range(3)]
    assert [steps[step]["actor/lr"] for step in (2, 3, 4)] == pytest.approx(expected)
    assert [steps[step]["training/update_step"] for step in (1, 2, 3, 4)] == [2, 4, 6, 8]
    assert all(
        steps[step]["opd/weight_sync/version"] == steps[step]["training/update_step"]
        for step in steps
    )
    assert all(steps[step]["opd/rollout/empty_reject_ratio"] == 0 for step in (2, 3, 4))
    assert all(steps[step]["actor/distillation/loss"] > 0 for step in steps)

    final = json.loads((store / "latest" / "state.json").read_text())
    assert final["progress"]["opd_step"] == 3
    assert final["data"]["rows_sha256"] == saved["data"]["rows_sha256"]
    assert final["data"]["epoch"] * 2 + final["data"]["batch"] == 4
    assert set(final["progress"]["results"]) == {"before", "after_sft", "after_opd"}
    assert final["progress"]["results"]["before"] == saved["progress"]["results"]["before"]
    stages = [
        row for row in metrics_of(folder) if "test_rollout/tiny/vllm_spec_accept_length" in row
    ]
    assert len(stages) == 3, "no evaluation ran twice"

    assert (
        undocumented({name for row in metrics_of(folder) for name in row} - {"step", "time"})
        == set()
    )
    assert "== step 4, sample" in (folder / "run" / "logs" / "samples.log").read_text()

    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert "vllm serve" in summary["serve"]
    assert summary["serve"] in output
    assert "its summary" in run(arguments), "a finished run only shows its summary"
    exported = folder / "out"
    run(
        [
            sys.executable,
            "-m",
            "verl_opd.cli",
            "export",
            str(folder / "run"),
            "--out",
            str(exported),
        ]
    )
    assert {path.name for path in exported.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("family", ["dflash", "eagle3"])
def test_an_overfitted_draft_is_nearly_always_accepted_also_by_plain_vllm(
    tiny_llama_dir: Path, folder: Path, family: str
):
    """tau near K + 1 on one memorised prompt catches nearly every misalignment of layers,
    positions, labels, masks, heads and weights.
    """
    for name in ("train", "val"):
        write_prompts(folder / f"{name}.jsonl", ["remember this"] * 4)
    run(
        command(
            tiny_llama_dir,
            folder,
            "sft.steps=1",
            "trainer.total_training_steps=1",
            "sft.updates_per_step=120",
            "sft.lr=3e-3",
            "sft.samples_per_update=2",
            "sft.anchors_per_sample=23",
            "trainer.n_student_workers=1",
            "optim.lr=1e-4",
            "draft.init_std=0.05",
            f"draft.family={family}",
            *(
                ["draft.num_hidden_layers=null", "draft.mask_token_id=null"]
                if family == "eagle3"
                else []
            ),
            "trainer.val_before_train=false",
        )
    )
    summary = json.loads((folder / "run" / "summary.json").read_text())
    tau = summary["results"]["after_opd"][0]["tau"]
    assert tau > 3.5, summary["results"]

    exported = folder / "speculators"
    run(
        [
            sys.executable,
            "-m",
            "verl_opd.cli",
            "export",
            str(folder / "run"),
            "--out",
            str(exported),
            "--format",
            "speculators",
        ]
    )
    served = run(
        [
            sys.executable,
            str(Path(__file__).parent / "serve_plain.py"),
            str(exported),
            str(folder / "val.jsonl"),
        ]
    )
    plain = json.loads(served.splitlines()[-1])["tau"]
    assert plain == pytest.approx(tau, rel=0.1), (
        "the exported draft accepts in plain vLLM what it accepted in training"
    )


def test_teacher_servers_score_what_the_rollout_committed(
    tiny_llama_dir: Path, tiny_qwen3_dir: Path, folder: Path
):
    """Two teachers of one vocabulary, one of them not the target, on placement of their own; rows
    name theirs. Started by the launcher for CPUs, whose variables and overrides turn the quickstart
    into a tiny run.
    """
    rows = [{"prompt": f"say {i}", "domain": ("plain", "other")[i % 2]} for i in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    variables = {
        "PYTHON": sys.executable,
        "MODEL_PATH": str(tiny_llama_dir),
        "TRAIN_FILES": str(folder / "train.jsonl"),
        "RUN_DIR": str(folder / "run"),
        "DRAFT_BLOCK_SIZE": "4",
        "NUM_SPECULATIVE_TOKENS": "3",
        "MAX_PROMPT": "64",
        "MAX_RESPONSE_LENGTH": "24",
        "TRAIN_PROMPT_BSZ": "4",
        "STUDENT_WORLD_SIZE": "1",
        "TEACHER_WORLD_SIZE": "1",
        "TOTAL_STEPS": "1",
    }
    overrides = [
        "target.dtype=float32",
        "draft.mask_token_id=3",
        "draft.target_layer_ids=[0,2,5]",
        "sft.steps=0",
        "trainer.updates_per_step=1",
        "trainer.update_epochs=1",
        "trainer.val_before_train=false",
        "trainer.logger=[jsonl]",
        "compute.param_dtype=float32",
        "~data.val_files.python_functions",
        "opd.response_loss=forward_kl_topk",
        "teacher.top_k=8",
        "teacher.key=domain",
        f"teacher.models={{plain: {tiny_llama_dir}, other: {tiny_qwen3_dir}}}",
    ]
    output = run([str(ROOT / "examples" / "cpu.sh"), *overrides], **variables)
    assert f"teacher servers plain: 1 x {tiny_llama_dir}, other: 1 x {tiny_qwen3_dir}" in output
    assert {path.name for path in (folder / "run" / "logs").glob("teacher_*.log")} == {
        "teacher_0.log",
        "teacher_1.log",
    }
    (row,) = [row for row in metrics_of(folder) if "actor/distillation/loss" in row]
    assert row["actor/distillation/loss"] > 0
    assert 0 < row["actor/distillation/student_mass"] < row["actor/distillation/teacher_mass"] < 1
    assert row["opd/replay_mismatch"] == 0
    assert undocumented(set(row) - {"step", "time"}) == set()
