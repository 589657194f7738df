"""The last thing a run says: what it gained, where time went, what to do with the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl_opd.config.schema import Config
from verl_opd.controller.progress import Progress
from verl_opd.drafts import get_family
from verl_opd.report.acceptance import BenchmarkResult
from verl_opd.report.console import Console
from verl_opd.report.rundir import write_atomic
from verl_opd.report.timing import WORKING, Stopwatch
from verl_opd.training.export import serve_command


def write_summary(run_dir: Path, cfg: Config, progress: Progress, clock: Stopwatch) -> None:
    """summary.json: results by stage, seconds by part (of the process that finished the run), idle
    share, export and serve line.
    """
    busy = sum(clock.total.get(name, 0.0) for name in WORKING)
    draft = run_dir / "exports" / "draft"
    summary: dict[str, Any] = {
        "results": progress.state()["results"],
        "steps": {
            "warmup": progress.warmup_step,
            "opd": progress.opd_step,
            "optimiser": progress.version,
        },
        "seconds": {
            **{name: round(seconds, 2) for name, seconds in clock.total.items()},
            "total": round(clock.elapsed, 2),
        },
        "idle_share": round(max(0.0, 1 - busy / clock.elapsed), 4),
        "weight_sync": {
            "version": progress.sync.version,
            "seconds": round(progress.sync.seconds, 4),
            "bytes": progress.sync.bytes,
        },
        "export": str(draft),
        "serve": serve_command(
            cfg.target.path,
            str(draft),
            cfg.rollout.num_speculative_tokens,
            get_family(cfg.draft.family).engine_method,
        ),
    }
    write_atomic(run_dir / "summary.json", json.dumps(summary, indent=2))


_PARTS = {
    "gen": "rollout (engines)",
    "update_actor": "training (FSDP ranks)",
    "update_weights": "draft push",
    "testing": "validation (engines)",
    "save_checkpoint": "checkpoints",
}


def print_summary(console: Console, run_dir: Path) -> None:
    """Show summary.json of a finished run."""
    summary = json.loads((run_dir / "summary.json").read_text())
    results = {
        stage: [
            BenchmarkResult(**{**row, "by_position": tuple(row["by_position"])}) for row in rows
        ]
        for stage, rows in summary["results"].items()
    }
    if results:
        console.acceptance(
            "accept length on held-out prompts, measured by the engine (bonus token counted)",
            results,
        )
    total = summary["seconds"]["total"]
    rows = [
        [label, f"{summary['seconds'][name]:.1f}", f"{summary['seconds'][name] / total:.0%}"]
        for name, label in _PARTS.items()
        if name in summary["seconds"]
    ]
    rows.append(
        [
            "idle (neither engine nor trainer)",
            f"{summary['idle_share'] * total:.1f}",
            f"{summary['idle_share']:.0%}",
        ]
    )
    console.table("where time went", ["part", "seconds", "share"], rows)
    console.say(_gain(results))
    console.say(
        f"exported draft   {summary['export']}\nserve it with    {summary['serve']}\nrun directory "
        f"   {run_dir}"
    )


def _gain(results: dict[str, list[BenchmarkResult]]) -> str:
    stages = list(results)
    if len(stages) < 2:
        return ""
    first, last = results[stages[0]], results[stages[-1]]
    pairs = [
        (a, b) for a, b in zip(first, last, strict=True) if a.tau is not None and b.tau is not None
    ]
    return "\n".join(f"tau {a.benchmark}: {a.tau:.3f} -> {b.tau:.3f}" for a, b in pairs)
