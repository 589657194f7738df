"""Compares supervision with on-policy distillation at equal wall-clock time: several seeds, each
with one supervised start from which every variant continues.

    .venv/bin/python scripts/compare.py run --seeds 42 7 123
        hours on two cores; finished variants are not run again
    .venv/bin/python scripts/compare.py table
        markdown table of the finished runs, and docs/comparison.png (needs matplotlib)

Every variant trains `--steps` rollout steps of the quickstart recipe after the same start.
Continued supervision gets `--supervised-updates` optimiser steps per rollout step instead, chosen
so that it takes as long as the on-policy variants, whose rollouts draft.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

START_STEPS = 6  # supervised steps before variants differ
START = "warmup"  # folder of the supervised start
VARIANTS = {
    "OPD, exact convention": [],
    "OPD, draft_opd convention": ["opd.convention=draft_opd"],
    "OPD, without rejections": ["opd.rejected_stream_weight=0"],
    "continued supervision": None,
}


def slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "_").lower()


def train(run_dir: Path, seed: int, overrides: list[str]) -> None:
    """`verl-opd train quickstart` into `run_dir`; its output goes to console.log there."""
    command = [
        str(Path(sys.executable).with_name("verl-opd")),
        "train",
        "quickstart",
        f"trainer.run_dir={run_dir}",
    ]
    command += [
        f"trainer.seed={seed}",
        f"data.seed={seed}",
        "data.val_max_samples=48",
        "trainer.val_before_train=false",
        *overrides,
    ]
    log = run_dir.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=True)


def run(
    root: Path, seeds: list[int], steps: int, supervised_updates: int, only: list[str] | None
) -> None:
    for seed in seeds:
        start = root / f"seed_{seed}" / START
        if not (start / "summary.json").exists():
            train(
                start,
                seed,
                [f"sft.steps={START_STEPS}", "trainer.total_training_steps=0"],
            )
        for name, overrides in VARIANTS.items():
            folder = root / f"seed_{seed}" / slug(name)
            if (folder / "summary.json").exists() or (only and slug(name) not in only):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(start, folder, symlinks=True)
            (folder / "summary.json").unlink()
            if overrides is None:
                extra = [
                    f"sft.steps={START_STEPS + steps}",
                    f"sft.updates_per_step={supervised_updates}",
                ]
                extra.append("trainer.total_training_steps=0")
            else:
                extra = [
                    f"sft.steps={START_STEPS}",
                    f"trainer.total_training_steps={steps}",
                    *overrides,
                ]
            train(folder, seed, extra)


def outcome(folder: Path, stage: str) -> tuple[float, float]:
    """(held-out tau after `stage`, seconds of rollout, training and push in the steps after the
    start).
    """
    tau = json.loads((folder / "summary.json").read_text())["results"][stage][0]["tau"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    parts = ("timing_s/gen", "timing_s/update_actor", "timing_s/update_weights")
    steps = [
        row for row in rows if "timing_s/step" in row and row["training/global_step"] > START_STEPS
    ]
    return tau, sum(row[part] for row in steps for part in parts)


def table(root: Path, seeds: list[int], image: Path) -> None:
    """Print a markdown table of all seeds that are complete, and draw them to `image`."""
    done = [
        seed
        for seed in seeds
        if all((root / f"seed_{seed}" / slug(name) / "summary.json").exists() for name in VARIANTS)
    ]
    taus = {
        "the start alone": [outcome(root / f"seed_{seed}" / START, "after_sft")[0] for seed in done]
    }
    seconds: dict[str, list[float]] = {}
    for name, overrides in VARIANTS.items():
        stage = "after_sft" if overrides is None else "after_opd"
        results = [outcome(root / f"seed_{seed}" / slug(name), stage) for seed in done]
        taus[name], seconds[name] = [tau for tau, _ in results], [spent for _, spent in results]
    print(
        "| after the supervised start | "
        + " | ".join(f"seed {seed}" for seed in done)
        + " | mean tau | seconds |"
    )
    print("|---" * (len(done) + 3) + "|")
    for name, values in taus.items():
        spent = f"{statistics.mean(seconds[name]):.0f}" if name in seconds else ""
        print(
            f"| {name} | "
            + " | ".join(f"{tau:.3f}" for tau in values)
            + f" | {statistics.mean(values):.3f} | {spent} |"
        )
    draw(taus, done, image)


def draw(taus: dict[str, list[float]], seeds: list[int], image: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    names = list(taus)[::-1]
    for index, seed in enumerate(seeds):
        axes.plot(
            [taus[name][index] for name in names],
            range(len(names)),
            marker="o",
            linestyle="",
            label=f"seed {seed}",
        )
    axes.plot(
        [statistics.mean(taus[name]) for name in names],
        range(len(names)),
        marker="|",
        markersize=18,
        linestyle="",
        color="black",
        label="mean",
    )
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("held-out accept length tau, 48 prompts, measured by the engine")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    figure.savefig(image, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("--root", type=Path, default=Path("runs/comparison"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 7, 123])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--supervised-updates", type=int, default=165)
    parser.add_argument("--only", nargs="+", help="variants, as folder names")
    parser.add_argument("--image", type=Path, default=Path("docs/comparison.png"))
    options = parser.parse_args()
    if options.action == "run":
        run(
            options.root.resolve(),
            options.seeds,
            options.steps,
            options.supervised_updates,
            options.only,
        )
    else:
        table(options.root.resolve(), options.seeds, options.image)
