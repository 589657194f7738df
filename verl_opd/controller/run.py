"""`verl-opd train`: check what can be checked, then start processes, train and sum up."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from verl_opd.config.load import to_yaml
from verl_opd.config.schema import Config
from verl_opd.controller.benchmarks import Benchmarks
from verl_opd.controller.checkpoints import Checkpoints
from verl_opd.controller.faults import Restarts
from verl_opd.controller.fleet import Fleet
from verl_opd.controller.job import Job, prepare
from verl_opd.controller.loop import Loop
from verl_opd.controller.placement import Placement, place
from verl_opd.controller.position import Position, planned_steps, position_at
from verl_opd.controller.progress import OPD, SFT
from verl_opd.controller.rollouts import Rollouts
from verl_opd.controller.settings import engine_settings, teacher_settings
from verl_opd.controller.stages import Blocks, OnPolicy, Supervised
from verl_opd.controller.trainers import Trainers
from verl_opd.drafts import get_family
from verl_opd.errors import ConfigError, RestartsExhausted, WorkerDied
from verl_opd.report.console import Console
from verl_opd.report.logs import driver_log
from verl_opd.report.rundir import RunDir
from verl_opd.report.sample_log import SampleLog
from verl_opd.report.step_report import StepReporter
from verl_opd.report.summary import Outcome, print_summary, write_summary
from verl_opd.report.timing import Stopwatch
from verl_opd.report.trackers import Trackers
from verl_opd.signals import Stopped, StopSignal, asked_to_stop
from verl_opd.snapshot import SnapshotWriter
from verl_opd.training.checkpoint import CheckpointStore, resolve_resume
from verl_opd.training.export import serve_command

log = logging.getLogger(__name__)


@contextmanager
def running(
    job: Job,
    run: RunDir,
    checkpoint: Path | None = None,
    restarts: Restarts | None = None,
    stop: StopSignal | None = None,
) -> Iterator[tuple[Placement, Trainers, Fleet]]:
    """Trainers, at `checkpoint`, and engines of a run. They are started on entry and always stopped
    on exit. Raises WorkerDied instead of another error when one of them is gone.
    """
    placement = place(job.cfg, job.device, len(job.teachers) * job.cfg.teacher.replicas)
    if stop is not None:
        stop.arm()  # ray.init has taken the signals
    fleet: Fleet | None = None
    trainers: Trainers | None = None
    try:
        servers = f" and {len(placement.teacher_slots)} teacher server(s)" if job.teachers else ""
        log.info(
            "starting %d student worker(s)%s on %s: trainer ranks, then engines",
            len(placement.slots),
            servers,
            job.device.name,
        )
        trainers = Trainers(job.cfg, job.draft_config, placement, run.logs)
        trainers.init()
        if checkpoint is not None:
            trainers.load(checkpoint / "dcp")
        draft_path = run.root / "engine_draft"
        trainers.export(draft_path)
        settings = engine_settings(job, placement, draft_path, run.logs)
        teachers = teacher_settings(job, placement, run.logs)
        fleet = Fleet(job.cfg, placement, settings, run.logs, teachers, restarts)
        for index, started in enumerate(fleet.start()):
            log.info(
                "engine %d: ready in %.0f s, HTTP at %s", index, started["seconds"], started["url"]
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


@contextmanager
def opened(cfg: Config, resume: bool = True) -> Iterator[tuple[Job, RunDir, Console]]:
    """The checked inputs of `cfg` and its run directory, where logs/run.log is written until exit.
    ConfigError for what cannot work; nothing is started.
    """
    console, job = Console(), prepare(cfg)
    run = RunDir(cfg.trainer.run_dir)
    run.open(job.identity, resume=resume)
    with driver_log(console, run.logs / "run.log"):
        for note in job.notes:
            log.info("note: %s", note)
        yield job, run, console


def train(cfg: Config, argv: list[str]) -> None:
    """Run or continue the training described by `cfg`; a process that dies costs at most the steps
    since the last checkpoint.
    """
    trainer, config = cfg.trainer, to_yaml(cfg)
    with opened(cfg, resume=trainer.resume_mode != "disable") as (job, run, console):
        store = CheckpointStore(run.root, trainer.keep_last)
        first = resolve_resume(trainer.resume_mode, trainer.resume_from_path, store)
        at, summed_up = position_at(job, first), (run.root / "summary.json").exists()
        if first is not None and at.finished(cfg) and summed_up:
            log.info(
                "all steps of this run are done; here is its summary. Another "
                "trainer.experiment_name starts a new run."
            )
            print_summary(console, run.root)
            return
        names = trainer.logger, run.root, trainer.project_name, trainer.experiment_name
        with closing(Trackers(*names, {"config": config})) as trackers:
            run.describe(config, argv)
            with StopSignal() as stop:
                training = Training(
                    job=job,
                    run=run,
                    store=store,
                    trackers=trackers,
                    console=console,
                    restarts=Restarts(trainer.max_restarts),
                    stop=stop,
                )
                try:
                    _with_restarts(training, first, argv)
                except (Stopped, SystemExit) as error:
                    if not asked_to_stop(error):
                        raise
                    log.info("stopped; %s", _continue(store, cfg, argv))
                    return
        print_summary(console, run.root)


def _with_restarts(training: Training, first: Path | None, argv: Sequence[str]) -> None:
    """Train from `first` on. After the death of a process, train again from the newest checkpoint
    while restarts are left.
    """
    checkpoint, store, again = first, training.store, False
    while True:
        try:
            if training.stop.asked:
                raise Stopped
            training.start(checkpoint)
            return
        except RestartsExhausted:
            raise
        except WorkerDied as error:
            training.restarts.spend(str(error))
            again = True
            checkpoint = resolve_resume("auto", None, store) if store.committed else first
        except ConfigError as error:
            if not again:
                raise
            # something that the first start had is gone, such as a node
            how = _continue(store, training.job.cfg, argv)
            raise WorkerDied(f"the run cannot restart: {error}\n{how}") from error


def _continue(store: CheckpointStore, cfg: Config, argv: Sequence[str]) -> str:
    return (
        f"the newest checkpoint is {store.latest()}; continue "
        f"with:\n{shlex.join(continuing(argv, cfg.trainer.resume_mode))}"
    )


def continuing(argv: Sequence[str], resume_mode: str) -> list[str]:
    """The command that continues from this run's newest checkpoint, whatever checkpoint this
    command, with its `resume_mode`, started from.
    """
    started = ("trainer.resume_mode=", "trainer.resume_from_path=")
    kept = [argument for argument in argv if not argument.lstrip("+").startswith(started)]
    return (
        kept
        if resume_mode == "auto"
        else [*kept, "trainer.resume_mode=auto", "trainer.resume_from_path=null"]
    )


@dataclass(kw_only=True)
class Training:
    """What all starts of one run share."""

    job: Job
    run: RunDir
    store: CheckpointStore
    trackers: Trackers
    console: Console
    restarts: Restarts
    stop: StopSignal

    def start(self, checkpoint: Path | None) -> None:
        """Start all processes, train from `checkpoint` (None: from the beginning) to the end,
        export and sum up.
        """
        job, run, at = self.job, self.run, position_at(self.job, checkpoint)
        log.info(_headline(job, run, at, checkpoint))
        with running(job, run, checkpoint, self.restarts, self.stop) as parts:
            placement, trainers, fleet = parts
            size = 2 * trainers.draft_parameters  # bytes, bf16
            snapshots = SnapshotWriter(run.root, placement.on_this_node, size)
            clock = Stopwatch()
            try:
                self._loop(at, trainers, fleet, snapshots, clock).run()
                trainers.export(run.exports / "draft")
                write_summary(run.root, self._outcome(at), clock)
            finally:
                snapshots.clear()

    def _loop(
        self,
        at: Position,
        trainers: Trainers,
        fleet: Fleet,
        snapshots: SnapshotWriter,
        clock: Stopwatch,
    ) -> Loop:
        job, cfg = self.job, self.job.cfg
        rollouts = Rollouts(
            cfg=cfg,
            fleet=fleet,
            trainers=trainers,
            snapshots=snapshots,
            position=at,
            benchmarks=Benchmarks(job.benchmarks, cfg.data.max_response_length),
            clock=clock,
        )
        return Loop(
            stages=stages_of(job, at, rollouts, trainers),
            rollouts=rollouts,
            trainers=trainers,
            checkpoints=Checkpoints(
                store=self.store,
                trainers=trainers,
                position=at,
                identity=job.identity,
                clock=clock,
            ),
            reporter=StepReporter(
                trackers=self.trackers,
                console=self.console,
                samples=SampleLog(self.run.logs / "samples.log", job.decode),
                clock=clock,
                diagnostics=job.diagnostics,
            ),
            progress=at.progress,
            schedule=cfg.trainer,
            stopping=lambda: self.stop.asked,
        )

    def _outcome(self, at: Position) -> Outcome:
        cfg, progress, draft = self.job.cfg, at.progress, self.run.exports / "draft"
        return Outcome(
            results=progress.results,
            steps={**progress.steps, "optimiser": progress.version},
            weight_sync={
                "version": progress.sync.version,
                "seconds": round(progress.sync.seconds, 4),
                "bytes": progress.sync.bytes,
            },
            export=draft,
            serve=serve_command(
                cfg.target.path,
                str(draft),
                cfg.rollout.num_speculative_tokens,
                get_family(cfg.draft.family).engine_method,
            ),
        )


def stages_of(
    job: Job, at: Position, rollouts: Rollouts, trainers: Trainers
) -> tuple[Supervised, OnPolicy]:
    """The stages of a run, in their order."""
    cfg, own, steps = job.cfg, job.vocabulary, planned_steps(job.cfg, at.prompts)
    size = get_family(cfg.draft.family).block_size(
        job.draft_config, cfg.rollout.num_speculative_tokens
    )
    blocks = Blocks(size, None if own is None else frozenset(own.token_ids.tolist()))
    return (
        Supervised(cfg=cfg, blocks=blocks, rollouts=rollouts, position=at, steps=steps[SFT]),
        OnPolicy(
            cfg=cfg,
            blocks=blocks,
            rollouts=rollouts,
            trainers=trainers,
            position=at,
            steps=steps[OPD],
            reward=job.reward,
            diagnostics=job.diagnostics,
        ),
    )


def _headline(job: Job, run: RunDir, at: Position, checkpoint: Path | None) -> str:
    """What is about to run, one line a subject."""
    cfg, report, steps = job.cfg, job.train_report, planned_steps(job.cfg, at.prompts)
    servers = ", ".join(
        f"{name}: {cfg.teacher.replicas} x {path}" for name, path in job.teachers.items()
    )
    teacher = f"servers {servers}" if servers else "the trainer's own copy of the target"
    start = (
        f"resuming from {checkpoint}"
        if checkpoint
        else f"starting from {cfg.draft.path or 'random draft weights'}"
    )
    held_out = sum(map(len, job.benchmarks.values()))
    return (
        f"target {cfg.target.path}\n"
        f"draft  {cfg.draft.family}, {job.draft_config['num_hidden_layers']} layers, "
        f"block {job.diagnostics['block_size']}, K={cfg.rollout.num_speculative_tokens}; {start}\n"
        f"teacher {teacher}\n"
        f"data   {len(job.train)} prompts ({report}); {held_out} held out\n{at.given}"
        f"plan   {steps[SFT]} supervised + {steps[OPD]} OPD steps of "
        f"{cfg.data.train_batch_size} prompts, "
        f"{cfg.trainer.n_student_workers} student worker(s) on {job.device.name}\n"
        f"run    {run.root}\n"
        f"python {sys.version.split()[0]}"
    )
