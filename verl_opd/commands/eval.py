"""`verl-opd eval`: accept length of the configured draft on held-out prompts, in the engine."""

from __future__ import annotations

import json
from dataclasses import replace

from verl_opd.config.load import to_yaml
from verl_opd.config.schema import Config
from verl_opd.controller.benchmarks import Benchmarks
from verl_opd.controller.run import opened, running
from verl_opd.errors import ConfigError
from verl_opd.report.rundir import write_atomic


def run(cfg: Config, argv: list[str]) -> None:
    """Measure draft.path on data.val_files and print; writes eval.json into the run directory."""
    if not cfg.data.val_files:
        raise ConfigError("data.val_files is empty: nothing to evaluate")
    with opened(cfg) as (job, directory, console):
        directory.describe(to_yaml(cfg), argv)
        benchmarks = Benchmarks(job.benchmarks, cfg.data.max_response_length)
        with running(replace(job, teachers={}), directory) as (_, _, fleet):
            results = benchmarks.run(fleet, 0)
        console.acceptance("held-out accept length", {"eval": results})
        rows = [result.as_dict() for result in results]
        write_atomic(directory.root / "eval.json", json.dumps(rows, indent=2))
