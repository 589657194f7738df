"""A run that was killed and resumed is, number for number, the run that was not; on another number
of workers, within rounding.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, command, environment, metrics_of, run
from tests.e2e.test_loop import alive, descendants, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

# One sequence at a time: what else is in a batch may change the last bit of a log-prob.
OVERRIDES = [
    "trainer.n_student_workers=1",
    "rollout.max_num_seqs=1",
    "sft.steps=1",
    "trainer.total_training_steps=10",
    "trainer.update_accumulation_steps=2",
    "trainer.updates_per_step=2",
    "trainer.total_epochs=9",
    "trainer.save_freq=1",
    "trainer.keep_last=99",
    "sft.samples_per_update=2",
    "trainer.val_before_train=false",
    "data.val_files={}",
]
MEASURED = (
    "actor/distillation/loss",
    "actor/grad_norm",
    "actor/lr",
    "training/epoch",
    "training/update_step",
    "opd/weight_sync/version",
)


def outcome(folder: Path) -> tuple[dict[int, tuple[float, ...]], list[str]]:
    """Measurements by global step, the later one where a step ran twice, and the samples that
    samples.log shows.
    """
    rows = {
        row["training/global_step"]: tuple(row[name] for name in MEASURED)
        for row in metrics_of(folder)
        if MEASURED[0] in row
    }
    shown = dict(
        re.findall(
            r"^== step (\d+), sample (\S+)",
            (folder / "run" / "logs" / "samples.log").read_text(),
            re.MULTILINE,
        )
    )
    return rows, [shown[step] for step in sorted(shown, key=int)]


def test_a_resumed_run_has_the_losses_rates_and_samples_of_the_whole_one(
    tiny_qwen3_dir: Path, folder: Path, tmp_path: Path
):
    """G1, G2: killed between two updates, some time after the checkpoint of step 5 (in the middle
    of an epoch of two batches). Warm-up learns from given conversations.
    """
    chats = folder / "chats.jsonl"
    rows = [
        [
            {"from": "human", "value": f"say {word}"},
            {"from": "gpt", "value": f"{word}, {word} and {word}"},
        ]
        for word in ("one", "two", "six")
    ]
    chats.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    given = [*OVERRIDES, f"sft.files=[{chats}]"]
    whole = tmp_path / "whole"
    whole.mkdir()
    for name in ("train.jsonl", "val.jsonl"):
        (whole / name).write_text((folder / name).read_text())
    output = run(command(tiny_qwen3_dir, whole, *given))
    assert "given  3 conversations (3 rows read" in output
    expected, samples = outcome(whole)
    assert sorted(expected) == [1, 3, 5, 7, 9, 11]

    arguments = command(tiny_qwen3_dir, folder, *given)
    store = folder / "run" / "checkpoints"
    with (folder / "first.log").open("w") as log:
        first = subprocess.Popen(arguments, cwd=ROOT, env=environment(), stdout=log, stderr=log)
    try:
        wait_for(
            lambda: (store / "step_5").exists() or first.poll() is not None,
            480,
            "the checkpoint of step 5",
        )
        assert first.poll() is None, (folder / "first.log").read_text()[-3000:]
        family = descendants(first.pid)
    finally:
        first.kill()
        first.wait()
    wait_for(lambda: not alive(family), 120, f"processes of the killed run to end: {alive(family)}")
    assert "resuming from" in run(arguments)
    assert outcome(folder) == (expected, samples)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("train.jsonl", "val.jsonl"):
        (elsewhere / name).write_text((folder / name).read_text())
    start = [
        "trainer.resume_mode=path",
        f"trainer.resume_from_path={whole / 'run' / 'checkpoints' / 'step_5'}",
    ]
    run(command(tiny_qwen3_dir, elsewhere, *given, *start, "trainer.n_student_workers=2"))
    for step, values in outcome(elsewhere)[0].items():
        assert values == pytest.approx(expected[step], rel=1e-3, abs=1e-6)
