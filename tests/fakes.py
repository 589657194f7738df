"""Stand-ins for the members of a Loop. Each is a subclass of what it stands for, so that mypy
compares their methods, and notes its calls in one common list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console as RichConsole

from verl_opd.config.schema import Config
from verl_opd.controller.benchmarks import Benchmarks
from verl_opd.controller.checkpoints import Checkpoints
from verl_opd.controller.loop import Loop
from verl_opd.controller.progress import Progress
from verl_opd.controller.rollouts import Rollouts
from verl_opd.controller.stages import Collected, Update
from verl_opd.controller.trainers import Trainers
from verl_opd.data.prompts import Prompt
from verl_opd.opd.losses import LossSettings, StreamTotals
from verl_opd.opd.metrics import StepMetrics
from verl_opd.opd.options import LossOptions
from verl_opd.opd.plan import BlockPlan, TrainItem
from verl_opd.opd.trace import RolloutSample, VerifyTrace
from verl_opd.report.acceptance import BenchmarkResult
from verl_opd.report.console import StageBar
from verl_opd.report.step_report import FinishedStep, StepReporter
from verl_opd.report.timing import Stopwatch


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
