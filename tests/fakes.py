"""Stand-ins for the members of a Loop, and for the actors of a Fleet. The former are subclasses of
what they stand for, so that mypy compares their methods. All note their calls in one common list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
from rich.console import Console as RichConsole

from verl_opd.config.schema import Config
from verl_opd.controller.benchmarks import Benchmarks
from verl_opd.controller.checkpoints import Checkpoints
from verl_opd.controller.fleet import Fleet
from verl_opd.controller.loop import Loop
from verl_opd.controller.placement import Placement
from verl_opd.controller.progress import Progress
from verl_opd.controller.rollouts import Rollouts
from verl_opd.controller.stages import Collected, Update
from verl_opd.controller.trainers import Trainers
from verl_opd.data.prompts import Prompt
from verl_opd.devices import DEVICES
from verl_opd.engines.settings import EngineSettings
from verl_opd.opd.losses import LossSettings, StreamTotals
from verl_opd.opd.metrics import StepMetrics
from verl_opd.opd.options import LossOptions
from verl_opd.opd.plan import BlockPlan, TrainItem
from verl_opd.opd.trace import RolloutSample, VerifyTrace
from verl_opd.report.acceptance import BenchmarkResult
from verl_opd.report.console import StageBar
from verl_opd.report.step_report import FinishedStep, StepReporter
from verl_opd.report.timing import Stopwatch
from verl_opd.rollout.teacher import TeacherSettings


def sample(name: str = "a") -> RolloutSample:
    return RolloutSample(
        sample_id=name,
        data_source="t",
        prompt_ids=(1,),
        response_ids=(2, 3),
        trace=VerifyTrace(2, ()),
        draft_version=0,
        finish_reason="stop",
    )


def result(tau: float | None = 1.5, name: str = "b") -> BenchmarkResult:
    return BenchmarkResult(
        benchmark=name,
        tau=tau,
        by_position=(0.5,),
        verify_steps=4,
        response_length=2.0,
        truncated_share=0.0,
        samples=1,
    )


EMPTY = BlockPlan(
    block_size=2,
    anchors=(),
    response_block=(),
    response_offset=(),
    response_label=(),
    rejected_block=(),
    rejected_offset=(),
    rejected_token=(),
    rejected_logprob=(),
)


class FakeStage:
    """A stage of `steps`, collected `together` at a time; one update without labels each time."""

    def __init__(
        self,
        actions: list[str],
        name: str,
        steps: int,
        on_policy: bool = True,
        together: int = 1,
        check: Callable[[Sequence[StepMetrics]], None] | None = None,
    ) -> None:
        self.name, self.steps, self.on_policy = name, steps, on_policy
        self._actions, self._together, self._check = actions, together, check

    def collect(self, step: int, tick: Callable[[], None]) -> Collected:
        end = min((step // self._together + 1) * self._together, self.steps)
        for number in range(step, end):
            self._actions.append(f"collect {self.name} {number}")
            if number < end - 1:
                tick()
        return Collected([[sample(f"{self.name} {end}")]], [], end - step)

    def updates(self, step: int, collected: Collected) -> Iterator[Update]:
        self._actions.append(f"updates {self.name} {step}")
        (only,) = collected.samples
        item = TrainItem(
            sample_id=only.sample_id,
            prompt_ids=only.prompt_ids,
            response_ids=only.response_ids,
            plan=EMPTY,
        )
        yield Update(
            samples=[only],
            items=[item],
            loss=LossSettings(LossOptions(confidence_weight=0.0)),
            lr=1e-3 * (step + 1),
            check=self._check,
        )

    def finish(self) -> None:
        self._actions.append(f"finish {self.name}")


class FakeTrainers(Trainers):
    """Two ranks whose losses add up to 2."""

    draft_parameters = 10

    def __init__(self, actions: list[str]) -> None:
        self._actions = actions

    def update(
        self,
        items: Sequence[TrainItem],
        totals: StreamTotals,
        settings: LossSettings,
        lr: float,
        check_replay: bool = False,
    ) -> list[StepMetrics]:
        self._actions.append("train, check" if check_replay else "train")
        ranks = [StepMetrics(), StepMetrics()]
        ranks[0].add_sum("actor/distillation/loss", 0.5)
        ranks[1].add_sum("actor/distillation/loss", 1.5)
        return ranks

    def save(self, directory: Path) -> None:
        self._actions.append(f"write {directory.name}")

    def export(self, directory: Path) -> None:
        self._actions.append(f"write {directory.name}")


class FakeRollouts(Rollouts):
    """One benchmark, if any, whose accept length is 1.5."""

    def __init__(self, actions: list[str], benchmarks: bool = True) -> None:
        prompts = {"b": [Prompt("a", "t", (1,), ())]} if benchmarks else {}
        self.benchmarks, self._actions = Benchmarks(prompts, 2), actions

    def next_batch(self, *, drafting: bool = True, score: bool = False) -> list[RolloutSample]:
        self._actions.append(f"roll out, drafting {drafting}, score {score}")
        return [sample()]

    def measure(self) -> list[BenchmarkResult]:
        self._actions.append("measure")
        return [result()]

    def prove_target(self) -> None:
        self._actions.append("prove")

    def sleep(self) -> None:
        self._actions.append("sleep")

    def sync(self) -> None:
        self._actions.append("sync")

    def metrics(self) -> dict[str, float]:
        return {"training/epoch": 0}


class FakeCheckpoints(Checkpoints):
    """Writes nothing."""

    def __init__(self, actions: list[str]) -> None:
        self._actions = actions

    def save(self, tau: float | None = None, required: bool = False) -> None:
        self._actions.append(f"save, tau {tau}" + (", required" if required else ""))

    def metrics(self) -> dict[str, float]:
        return {"training/failed_checkpoints": 0}


class FakeBar(StageBar):
    def __init__(self, actions: list[str]) -> None:
        super().__init__(RichConsole(quiet=True), "", 0, 0, None)
        self._actions = actions

    def advance(self, metrics: object) -> None:
        self._actions.append("advance")


class FakeReporter(StepReporter):
    """Keeps the steps it is given."""

    def __init__(self, actions: list[str]) -> None:
        self.clock, self._actions = Stopwatch(), actions
        self.steps: list[FinishedStep] = []

    def stage(self, name: str, steps: int, done: int) -> AbstractContextManager[StageBar]:
        return nullcontext(FakeBar(self._actions))

    def step(self, bar: StageBar, step: FinishedStep) -> None:
        self._actions.append(f"report {step.number}")
        self.steps.append(step)

    def benchmarks(self, step: int, point: str, results: Sequence[BenchmarkResult]) -> None:
        self._actions.append(f"report {point}")


def fake_loop(
    actions: list[str],
    *stages: FakeStage,
    cfg: Config | None = None,
    progress: Progress | None = None,
    benchmarks: bool = True,
    stopping: Callable[[], bool] = lambda: False,
) -> Loop:
    """A Loop over `stages` in which everything else is made up."""
    return Loop(
        stages=stages,
        rollouts=FakeRollouts(actions, benchmarks),
        trainers=FakeTrainers(actions),
        checkpoints=FakeCheckpoints(actions),
        reporter=FakeReporter(actions),
        progress=progress or Progress(),
        schedule=(cfg or Config()).trainer,
        stopping=stopping,
    )


@dataclass
class FakeMethod:
    """A method of an actor: a call is noted as (actor, method, arguments) and answered at once."""

    actor: FakeActor
    name: str

    def remote(self, *args: Any) -> Any:
        self.actor.calls.append((self.actor.name, self.name, *args))
        answer = self.actor.answers.get(self.name)
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass(eq=False)
class FakeActor:
    """An actor handle that answers from a table."""

    name: str
    calls: list[tuple[Any, ...]]
    answers: dict[str, Any]  # by method
    made_with: tuple[Any, ...] = ()  # arguments of its constructor

    def __getattr__(self, method: str) -> FakeMethod:
        return FakeMethod(self, method)


@dataclass
class FakeActorClass:
    """Makes actors "engine 0", "engine 1", ...; those that replace others are numbered on."""

    kind: str
    calls: list[tuple[Any, ...]]
    answers: dict[str, Any]
    made: list[FakeActor] = field(default_factory=list)

    def options(self, **options: Any) -> FakeActorClass:
        return self

    def remote(self, *args: Any) -> FakeActor:
        name = f"{self.kind} {len(self.made)}"
        self.made.append(FakeActor(name, self.calls, dict(self.answers), args))
        return self.made[-1]


class FakeRay:
    """Ray for a Fleet of fake actors, whose answers need no waiting."""

    exceptions = ray.exceptions

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls

    def get(self, answer: Any, timeout: float | None = None) -> Any:
        return answer

    def kill(self, actor: FakeActor, no_restart: bool) -> None:
        self._calls.append((actor.name, "kill"))


class FakePlacement(Placement):
    """A CPU without Ray."""

    def __init__(self) -> None:
        self.device, self.actors = DEVICES["cpu"], []

    def lost_nodes(self) -> list[str]:
        return []

    def actor_options(self, index: int) -> dict[str, Any]:
        return {}

    def teacher_options(self, index: int) -> dict[str, Any]:
        return {}


@dataclass
class FakeActors:
    """The actors of a fleet; a server fails as long as `reasons` name it."""

    calls: list[tuple[Any, ...]]
    engines: FakeActorClass
    teachers: FakeActorClass
    agents: FakeActorClass
    placement: FakePlacement = field(default_factory=FakePlacement)
    reasons: dict[str, str] = field(default_factory=dict)  # name of a server -> why it failed


def fake_fleet(
    monkeypatch: pytest.MonkeyPatch, engines: int = 1, teachers: Sequence[str] = ()
) -> tuple[Fleet, FakeActors]:
    """A started Fleet with an agent loop per engine and a server per name of `teachers`; its
    actors, whose calls from now on are noted.
    """
    calls: list[tuple[Any, ...]] = []
    started = {"start": {"seconds": 1.0, "url": "u"}, "target_checksum": "t", "set_drafting": True}
    actors = FakeActors(
        calls,
        FakeActorClass("engine", calls, started),
        FakeActorClass("teacher", calls, started),
        FakeActorClass("agent", calls, {}),
    )
    for name, value in {
        "ray": FakeRay(calls),
        "driver_options": dict,
        "failure": lambda server: actors.reasons.get(server.name, ""),
        "push_draft": lambda servers, snapshot, first=0: calls.append(
            ("push", [server.name for server in servers], snapshot, first)
        ),
        "RolloutServerActor": actors.engines,
        "TeacherServerActor": actors.teachers,
        "AgentLoopWorkerActor": actors.agents,
        "RouterActor": FakeActorClass("router", calls, {}),
    }.items():
        monkeypatch.setattr(f"verl_opd.controller.fleet.{name}", value)
    settings = EngineSettings(model_path="t", dtype="float32", max_model_len=8, max_num_seqs=1)
    cfg = Config()
    cfg.trainer.n_student_workers = engines
    fleet = Fleet(
        cfg,
        actors.placement,
        [settings] * engines,
        Path("logs"),
        [TeacherSettings(name, settings) for name in teachers],
    )
    fleet.start()
    calls.clear()
    return fleet, actors
