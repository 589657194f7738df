"""`verl-opd train` and `verl-opd eval`: check everything that can be checked, then start processes,
run, and sum up.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from verl_opd.config.load import to_yaml
from verl_opd.config.schema import Config
from verl_opd.controller.benchmarks import Benchmarks
from verl_opd.controller.faults import Restarts, Stopped, StopSignal, asked_to_stop
from verl_opd.controller.fleet import Fleet
from verl_opd.controller.job import Job, prepare
from verl_opd.controller.loop import Loop
from verl_opd.controller.placement import Placement, place
from verl_opd.controller.progress import Progress, SnapshotWriter
from verl_opd.controller.trainers import Trainers
from verl_opd.data.loader import Loader
from verl_opd.data.prompts import Prompt
from verl_opd.drafts import get_family
from verl_opd.errors import ConfigError, WorkerDied
from verl_opd.opd.names import TOP_K_LOSS
from verl_opd.opd.trace import RolloutSample
from verl_opd.report.console import Console
from verl_opd.report.rundir import RunDir, write_atomic
from verl_opd.report.sample_log import SampleLog
from verl_opd.report.summary import print_summary, write_summary
from verl_opd.report.trackers import Trackers
from verl_opd.rollout.server import EngineSettings
from verl_opd.rollout.teacher import TeacherSettings
from verl_opd.training.checkpoint import CheckpointStore, check_identity, resolve_resume


def engine_settings(
    job: Job, placement: Placement, draft_path: Path, logs: Path
) -> list[EngineSettings]:
    """One engine per student worker, all equal but for cores and log file."""
    cfg, family = job.cfg, get_family(job.cfg.draft.family)
    rollout, data = cfg.rollout, cfg.data
    length = (
        rollout.max_model_len
        or data.max_prompt_length + data.max_response_length + 2 * rollout.num_speculative_tokens
    )
    return [
        EngineSettings(
            target_path=cfg.target.path,
            target_dtype=cfg.target.dtype,
            trust_remote_code=cfg.target.trust_remote_code,
            draft_path=str(draft_path),
            method=family.engine_method,
            num_speculative_tokens=rollout.num_speculative_tokens,
            target_layer_ids=tuple(family.layer_ids(job.draft_config)),
            mask_token_id=family.mask_token_id(job.draft_config),
            engine_names=family.engine_names,
            token_map=job.token_map,
            v2_runner=family.v2_runner,
            max_model_len=length,
            max_num_seqs=rollout.max_num_seqs,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            kv_cache_gb=rollout.kv_cache_gb,
            engine_kwargs=rollout.engine_kwargs,
            device=job.device.name,
            cpu_cores=slot.cores,
            seed=cfg.trainer.seed,
            log_path=str(logs / f"rollout_{slot.index}.log"),
            stall_timeout=rollout.stall_timeout,
        )
        for slot in placement.slots
    ]


def teacher_settings(job: Job, placement: Placement, logs: Path) -> list[TeacherSettings]:
    """teacher.replicas servers per model."""
    cfg, data = job.cfg, job.cfg.data
    models = [
        (name, path) for name, path in job.teachers.items() for _ in range(cfg.teacher.replicas)
    ]
    return [
        TeacherSettings(
            name=name,
            model_path=path,
            dtype=cfg.target.dtype,
            max_model_len=data.max_prompt_length + data.max_response_length + 1,
            max_num_seqs=cfg.teacher.max_num_seqs,
            top_k=cfg.teacher.top_k if cfg.opd.response_loss == TOP_K_LOSS else 0,
            trust_remote_code=cfg.target.trust_remote_code,
            gpu_memory_utilization=cfg.teacher.gpu_memory_utilization,
            enforce_eager=cfg.rollout.enforce_eager,
            kv_cache_gb=cfg.teacher.kv_cache_gb,
            engine_kwargs=cfg.teacher.engine_kwargs,
            device=job.device.name,
            cpu_cores=slot.cores,
            seed=cfg.trainer.seed,
            log_path=str(logs / f"teacher_{slot.index}.log"),
        )
        for (name, path), slot in zip(models, placement.teacher_slots, strict=True)
    ]


def _benchmarks(job: Job) -> Benchmarks:
    return Benchmarks(job.benchmarks, job.cfg.data.max_response_length)


def total_steps(cfg: Config, loader: Loader[Prompt]) -> int:
    if cfg.trainer.total_training_steps is not None:
        return cfg.trainer.total_training_steps
    return cfg.trainer.total_epochs * loader.batches_per_epoch


@contextmanager
def running(
    job: Job,
    run: RunDir,
    console: Console,
    checkpoint: Path | None,
    restarts: Restarts | None = None,
    stop: StopSignal | None = None,
) -> Iterator[tuple[Placement, Trainers, Fleet]]:
    """Trainers and engines of a run, started; stopped on the way out whatever happens. WorkerDied
    instead of another error when one of them is gone.
    """
    placement = place(job.cfg, job.device, len(job.teachers) * job.cfg.teacher.replicas)
    if stop is not None:
        stop.arm()  # ray.init has taken the signals
    fleet: Fleet | None = None
    trainers: Trainers | None = None
    try:
        servers = f" and {len(placement.teacher_slots)} teacher server(s)" if job.teachers else ""
        console.say(
            f"starting {len(placement.slots)} student worker(s){servers} on {job.device.name}: "
            "trainer ranks, then engines"
        )
        trainers = Trainers(job.cfg, job.draft_config, placement, run.logs)
        trainers.init()
        if checkpoint is not None:
            trainers.load(checkpoint / "dcp")
        draft_path = run.root / "engine_draft"
        trainers.export(draft_path)
        settings, teachers = (
            engine_settings(job, placement, draft_path, run.logs),
            teacher_settings(job, placement, run.logs),
        )
        fleet = Fleet(job.cfg, placement, settings, teachers, console.say, restarts)
        for index, report in enumerate(fleet.start()):
            console.say(
                f"engine {index}: ready in {report['seconds']:.0f} s, HTTP at {report['url']}"
            )
        yield placement, trainers, fleet
    except (ray.exceptions.RayError, RuntimeError) as error:
        lost = [*(trainers.deaths() if trainers else ()), *(fleet.deaths() if fleet else ())]
        if not lost or isinstance(error, WorkerDied):
            raise
        raise WorkerDied("; ".join(lost)) from error
    finally:
        try:
            if fleet is not None:
                fleet.stop()
        finally:
            placement.close()


def train(cfg: Config, argv: list[str]) -> None:
    """Run or continue the training described by `cfg`; a process that dies costs at most the steps
    since the last checkpoint.
    """
    console, job = Console(), prepare(cfg)
    for note in job.notes:
        console.say(f"note: {note}")
    run = RunDir(cfg.trainer.run_dir)
    run.open(job.identity, resume=cfg.trainer.resume_mode != "disable")
    store = CheckpointStore(run.root, cfg.trainer.keep_last)
    first = checkpoint = resolve_resume(
        cfg.trainer.resume_mode, cfg.trainer.resume_from_path, store, console.say
    )
    restarts = Restarts(cfg.trainer.max_restarts, console.say)
    config = to_yaml(cfg)
    if _finished(job, run, store, checkpoint):
        console.say(
            "all steps of this run are done; here is its summary. Another trainer.experiment_name "
            "starts a new run."
        )
        print_summary(console, run.root)
        return
    with closing(
        Trackers(
            cfg.trainer.logger,
            run.root,
            cfg.trainer.project_name,
            cfg.trainer.experiment_name,
            {"config": config},
        )
    ) as trackers:
        run.describe(config, argv)
        with StopSignal() as stop:
            again = False
            while True:
                try:
                    if stop.asked:
                        raise Stopped
                    _train_from(checkpoint, job, run, store, trackers, console, restarts, stop)
                    break
                except WorkerDied as error:
                    if "trainer.max_restarts" in str(error):  # said by whoever spent the last one
                        raise
                    restarts.spend(str(error))
                    again = True
                    checkpoint = (
                        resolve_resume("auto", None, store, console.say)
                        if store.committed
                        else first
                    )
                except (
                    ConfigError
                ) as error:  # what was there at first is not there any more, such as a node
                    if not again:
                        raise
                    raise WorkerDied(
                        f"cannot start again: {error}\n{_continue(store, cfg, argv)}"
                    ) from error
                except (Stopped, SystemExit) as error:
                    if not asked_to_stop(error):
                        raise
                    console.say(f"stopped; {_continue(store, cfg, argv)}")
                    return
    print_summary(console, run.root)


def _continue(store: CheckpointStore, cfg: Config, argv: Sequence[str]) -> str:
    return (
        f"the newest checkpoint is {store.latest()}; continue "
        f"with:\n{shlex.join(continuing(argv, cfg.trainer.resume_mode))}"
    )


def continuing(argv: Sequence[str], resume_mode: str) -> list[str]:
    """The command that goes on where this one stopped: from this run's newest checkpoint, wherever
    this one, with its `resume_mode`, started from.
    """
    started = ("trainer.resume_mode=", "trainer.resume_from_path=")
    kept = [argument for argument in argv if not argument.lstrip("+").startswith(started)]
    return (
        kept
        if resume_mode == "auto"
        else [*kept, "trainer.resume_mode=auto", "trainer.resume_from_path=null"]
    )


@dataclass
class Position:
    """Where a run stands in its data and counters. conversations: while warm-up still learns from
    them; given: what they are.
    """

    loader: Loader[Prompt]
    progress: Progress
    conversations: Loader[RolloutSample] | None = None
    given: str = ""


def _position(job: Job, store: CheckpointStore, checkpoint: Path | None) -> Position:
    """Where `checkpoint` left data and counters; ConfigError when it belongs to another run or
    other data.
    """
    data = job.cfg.data
    at, state = (
        Position(Loader(job.train, data.train_batch_size, data.shuffle, data.seed), Progress()),
        dict[str, Any](),
    )
    if checkpoint is not None:
        check_identity(checkpoint, job.identity)
        state = store.read_state(checkpoint)
        at.loader.load_state(state["data"])
        at.progress = Progress.from_state(state["progress"])
    if at.progress.warmup_step < job.cfg.sft.steps:
        _place_conversations(at, job, state.get("conversations"))
    return at


def _place_conversations(at: Position, job: Job, state: dict[str, Any] | None) -> None:
    sft, data = job.cfg.sft, job.cfg.data
    if at.progress.warmup_step and (state is None) != (job.conversations is None):
        raise ConfigError(
            f"the checkpoint was written {'without' if state is None else 'with'} sft.files, in "
            "the middle of warm-up: "
            "restore the key to resume, or start a new run from the exported draft with draft.path"
        )
    if job.conversations is not None:
        samples, report = job.conversations()
        at.conversations = Loader(
            samples, sft.samples_per_update, data.shuffle, data.seed, "sft.samples_per_update"
        )
        at.given = f"given  {len(samples)} conversations ({report})\n"
        if state is not None:
            at.conversations.load_state(state)


def _finished(job: Job, run: RunDir, store: CheckpointStore, checkpoint: Path | None) -> bool:
    at = _position(job, store, checkpoint)
    progress = at.progress
    done = (
        progress.opd_step >= total_steps(job.cfg, at.loader)
        and progress.warmup_step >= job.cfg.sft.steps
    )
    return checkpoint is not None and done and (run.root / "summary.json").exists()


def _train_from(
    checkpoint: Path | None,
    job: Job,
    run: RunDir,
    store: CheckpointStore,
    trackers: Trackers,
    console: Console,
    restarts: Restarts,
    stop: StopSignal,
) -> None:
    """Start everything, train from `checkpoint` (None: from the beginning) to the end, export and
    sum up.
    """
    cfg = job.cfg
    at = _position(job, store, checkpoint)
    progress, steps = at.progress, total_steps(cfg, at.loader)
    console.say(_headline(job, run, steps, checkpoint, at.given))
    with running(job, run, console, checkpoint, restarts, stop) as (placement, trainers, fleet):
        snapshots = SnapshotWriter(run.root, placement.on_this_node, 2 * trainers.draft_parameters)
        loop = Loop(
            cfg,
            get_family(cfg.draft.family).block_size(
                job.draft_config, cfg.rollout.num_speculative_tokens
            ),
            steps,
            fleet,
            trainers,
            at.loader,
            _benchmarks(job),
            store,
            trackers,
            console,
            snapshots,
            progress,
            job.identity,
            job.facts,
            SampleLog(run.logs / "samples.log", job.decode),
            at.conversations,
            job.reward,
            None if job.vocabulary is None else frozenset(job.vocabulary.token_ids.tolist()),
            stopping=lambda: stop.asked,
        )
        try:
            loop.run()
            trainers.export(run.exports / "draft")
            write_summary(run.root, cfg, progress, loop.clock)
        finally:
            snapshots.clear()


def evaluate(cfg: Config, argv: list[str]) -> None:
    """Measure held-out accept length of the configured draft (draft.path) in the engine; writes
    eval.json into the run directory.
    """
    if not cfg.data.val_files:
        raise ConfigError("data.val_files is empty: nothing to evaluate")
    console, job = Console(), prepare(cfg)
    for note in job.notes:
        console.say(f"note: {note}")
    run = RunDir(cfg.trainer.run_dir)
    run.open(job.identity, resume=True)
    run.describe(to_yaml(cfg), argv)
    with running(replace(job, teachers={}), run, console, None) as (_, _, fleet):
        results = _benchmarks(job).run(fleet, 0)
    console.acceptance("held-out accept length", {"eval": results})
    write_atomic(
        run.root / "eval.json", json.dumps([result.as_dict() for result in results], indent=2)
    )


def _headline(job: Job, run: RunDir, steps: int, checkpoint: Path | None, given: str) -> str:
    cfg, report = job.cfg, job.train_report
    servers = ", ".join(
        f"{name}: {cfg.teacher.replicas} x {path}" for name, path in job.teachers.items()
    )
    teacher = f"servers {servers}" if servers else "the trainer's own copy of the target"
    start = (
        f"resuming from {checkpoint}"
        if checkpoint
        else f"starting from {cfg.draft.path or 'random draft weights'}"
    )
    return (
        f"target {cfg.target.path}\ndraft  {cfg.draft.family}, "
        f"{job.draft_config['num_hidden_layers']} layers, "
        f"block {job.facts['block_size']}, K={cfg.rollout.num_speculative_tokens}; {start}\n"
        f"teacher {teacher}\n"
        f"data   {len(job.train)} prompts ({report}); {sum(map(len, job.benchmarks.values()))} "
        f"held out\n{given}"
        f"plan   {cfg.sft.steps} warm-up + {steps} OPD steps of "
        f"{cfg.data.train_batch_size} prompts, "
        f"{cfg.trainer.n_student_workers} student worker(s) on {job.device.name}\nrun    "
        f"{run.root}\npython {sys.version.split()[0]}"
    )
