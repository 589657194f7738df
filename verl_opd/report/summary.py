"""The end of a run: what it gained, where time went, and how to use the result."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_opd.report.acceptance import BenchmarkResult, results_by_stage
from verl_opd.report.console import Console
from verl_opd.report.rundir import write_atomic
from verl_opd.report.timing import WORKING, Stopwatch

log = logging.getLogger(__name__)

_PARTS = {
    "gen": "rollout (engines)",
    "update_actor": "training (FSDP ranks)",
    "update_weights": "draft push",
    "testing": "validation (engines)",
    "save_checkpoint": "checkpoints",
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a finished run leaves behind, as summary.json holds it."""

    results: Mapping[str, Sequence[BenchmarkResult]]  # point of the run -> benchmarks
    steps: Mapping[str, int]  # rollout steps by stage, and optimiser steps
    weight_sync: Mapping[str, float]  # version, seconds and bytes of the last push
    export: Path  # directory of the exported draft
    serve: str  # command that serves it


def write_summary(run_dir: Path, outcome: Outcome, clock: Stopwatch) -> None:
    """summary.json: `outcome`, seconds by part (of the process that finished the run), and the
    share of time in which neither engine nor trainer worked.
    """
    busy = sum(clock.total.get(name, 0.0) for name in WORKING)
    summary: dict[str, Any] = {
        "results": {
            point: [result.as_dict() for result in results]
            for point, results in outcome.results.items()
        },
        "steps": dict(outcome.steps),
        "seconds": {
            **{name: round(seconds, 2) for name, seconds in clock.total.items()},
            "total": round(clock.elapsed, 2),
        },
        "idle_share": round(max(0.0, 1 - busy / clock.elapsed), 4),
        "weight_sync": dict(outcome.weight_sync),
        "export": str(outcome.export),
        "serve": outcome.serve,
    }
    write_atomic(run_dir / "summary.json", json.dumps(summary, indent=2))


def print_summary(console: Console, run_dir: Path) -> None:
    """Show summary.json of a finished run."""
    summary = json.loads((run_dir / "summary.json").read_text())
    results = results_by_stage(summary["results"])
    if results:
        console.acceptance(
            "accept length on held-out prompts, measured by the engine (bonus token counted)",
            results,
        )
    total, idle = summary["seconds"]["total"], summary["idle_share"]
    rows = [
        [label, f"{summary['seconds'][name]:.1f}", f"{summary['seconds'][name] / total:.0%}"]
        for name, label in _PARTS.items()
        if name in summary["seconds"]
    ]
    rows.append(["idle (neither engine nor trainer)", f"{idle * total:.1f}", f"{idle:.0%}"])
    console.table("where time went", ["part", "seconds", "share"], rows)
    for line in _gains(results):
        log.info(line)
    log.info("exported draft   %s", summary["export"])
    log.info("serve it with    %s", summary["serve"])
    log.info("run directory    %s", run_dir)


def _gains(results: Mapping[str, Sequence[BenchmarkResult]]) -> list[str]:
    """A line a benchmark: its accept length at the first and the last point of the run."""
    if len(results) < 2:
        return []
    points = list(results.values())
    pairs = zip(points[0], points[-1], strict=True)
    return [
        f"tau {a.benchmark}: {a.tau:.3f} -> {b.tau:.3f}"
        for a, b in pairs
        if a.tau is not None and b.tau is not None
    ]
