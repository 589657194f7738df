"""Supervision against on-policy distillation at equal wall-clock: several seeds, one warm-up each, every variant continued from it.

    .venv/bin/python scripts/compare.py run --seeds 42 7 123      # hours on two cores; a variant that is done is not run again
    .venv/bin/python scripts/compare.py table                     # markdown table of what has been run, and comparison.png (needs matplotlib)

Every variant trains `--steps` rollout steps of the quickstart recipe after the same warm-up. Continued supervision gets `--supervised-updates`
optimiser steps per rollout step instead, set so that it takes as long as the on-policy variants, whose rollouts draft.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

WARMUP_STEPS = 6
VARIANTS = {
    "OPD, exact convention": [],
    "OPD, draft_opd convention": ["opd.convention=draft_opd"],
    "OPD, without refusals": ["opd.rejected_stream_weight=0"],
    "continued supervision": None,
}


def slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "_").lower()


def train(run_dir: Path, seed: int, overrides: list[str]) -> None:
    """`verl-opd train quickstart` into `run_dir`; its output goes to console.log there."""
    command = [str(Path(sys.executable).with_name("verl-opd")), "train", "quickstart", f"trainer.run_dir={run_dir}"]
    command += [f"trainer.seed={seed}", f"data.seed={seed}", "data.val_max_samples=48", "trainer.val_before_train=false", *overrides]
    log = run_dir.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=True)


def run(root: Path, seeds: list[int], steps: int, supervised_updates: int, only: list[str] | None) -> None:
    for seed in seeds:
        warm = root / f"seed_{seed}" / "warmup"
        if not (warm / "summary.json").exists():
            train(warm, seed, [f"trainer.warmup_steps={WARMUP_STEPS}", "trainer.total_training_steps=0"])
        for name, overrides in VARIANTS.items():
            folder = root / f"seed_{seed}" / slug(name)
            if (folder / "summary.json").exists() or (only and slug(name) not in only):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(warm, folder, symlinks=True)
            (folder / "summary.json").unlink()
            if overrides is None:
                extra = [f"trainer.warmup_steps={WARMUP_STEPS + steps}", f"warmup.updates_per_step={supervised_updates}"]
                extra.append("trainer.total_training_steps=0")
            else:
                extra = [f"trainer.warmup_steps={WARMUP_STEPS}", f"trainer.total_training_steps={steps}", *overrides]
            train(folder, seed, extra)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("--root", type=Path, default=Path("runs/comparison"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 7, 123])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--supervised-updates", type=int, default=165)
    parser.add_argument("--only", nargs="+", help="variants, as folder names")
    options = parser.parse_args()
    run(options.root.resolve(), options.seeds, options.steps, options.supervised_updates, options.only)
