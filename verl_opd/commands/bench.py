"""`verl-opd bench`: the cost of recording and of draft pushes, for the configured target and draft.

Recorder overhead is measured in two ways. The same greedy prompts run on the same engines with the
recorder on and off, in turns: the median of paired ratios includes every effect of recording, and
the noise of the machine. The time spent inside the recorder, as a share of the recorded runs, has
no such noise but misses side effects such as colder caches. Draft push: seconds from the trainer's
gather to the engine's read-back, over several pushes.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from dataclasses import replace

from verl_opd.config.load import to_yaml
from verl_opd.config.schema import Config
from verl_opd.controller.benchmarks import GREEDY
from verl_opd.controller.fleet import Fleet
from verl_opd.controller.job import Job
from verl_opd.controller.run import opened, running
from verl_opd.controller.trainers import Trainers
from verl_opd.data.prompts import Prompt
from verl_opd.report.rundir import write_atomic
from verl_opd.snapshot import SnapshotWriter

log = logging.getLogger(__name__)

PAIRS = 10
PUSHES = 5


def run(cfg: Config, argv: list[str]) -> None:
    """Measure and print; writes bench.json into the run directory."""
    with opened(cfg) as (job, directory, console):
        directory.describe(to_yaml(cfg), argv)
        with running(replace(job, teachers={}), directory) as (placement, trainers, fleet):
            size = 2 * trainers.draft_parameters  # bytes, bf16
            writer = SnapshotWriter(directory.root, placement.on_this_node, size)
            results = {**_recorder(job, fleet), **_push(writer, trainers, fleet)}
        rows = [[name, f"{value:.4g}"] for name, value in results.items()]
        console.table("bench", ["measure", "value"], rows)
        write_atomic(directory.root / "bench.json", json.dumps(results, indent=2))


def _recorder(job: Job, fleet: Fleet) -> dict[str, float]:
    prompts = job.train[: job.cfg.data.train_batch_size]
    _generate(job, fleet, prompts, True)  # first use compiles and allocates
    ratios, rates = [], []
    recorded = inside = 0.0
    for pair in range(PAIRS):
        order = (True, False) if pair % 2 == 0 else (False, True)
        before = fleet.recorder_seconds()
        runs = {recording: _generate(job, fleet, prompts, recording) for recording in order}
        speed = {recording: tokens / seconds for recording, (tokens, seconds) in runs.items()}
        inside += fleet.recorder_seconds() - before
        recorded += runs[True][1] * len(fleet.servers)
        ratios.append(speed[False] / speed[True] - 1)
        rates.append(speed[True])
        log.info(
            f"pair {pair + 1}/{PAIRS}: recorder costs {ratios[-1]:+.2%} of {speed[False]:.1f} "
            "tokens/s"
        )
    return {
        "recorder_time_share": inside / recorded,
        "recorder_overhead_median": statistics.median(ratios),
        "recorder_overhead_min": min(ratios),
        "recorder_overhead_max": max(ratios),
        "tokens_per_second_median": statistics.median(rates),
    }


def _generate(job: Job, fleet: Fleet, prompts: list[Prompt], recording: bool) -> tuple[int, float]:
    """Tokens and seconds of one greedy run over all replicas."""
    fleet.set_recording(recording)
    return fleet.throughput(prompts, {**GREEDY, "max_tokens": job.cfg.data.max_response_length})


def _push(writer: SnapshotWriter, trainers: Trainers, fleet: Fleet) -> dict[str, float]:
    try:
        seconds = []
        for version in range(PUSHES):
            fleet.sleep()
            started = time.monotonic()
            report = fleet.sync(trainers.snapshot(writer.path, version))
            seconds.append(time.monotonic() - started)
    finally:
        writer.clear()
    return {
        "push_seconds_median": statistics.median(seconds),
        "push_seconds_max": max(seconds),
        "push_bytes": report.bytes,
    }
