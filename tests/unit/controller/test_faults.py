"""Restart budget, stop signals and the watchdog over tokens; without Ray or an engine."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from verl_opd.config.schema import Config
from verl_opd.controller.faults import Restarts, Stopped, StopSignal, asked_to_stop, first_line
from verl_opd.controller.loop import Loop
from verl_opd.controller.progress import Progress
from verl_opd.controller.run import continuing
from verl_opd.errors import CheckpointError, ConfigError, RolloutError, WorkerDied
from verl_opd.rollout.server import EngineSettings, RolloutServer


def test_every_restart_is_said_and_the_last_one_ends_the_run():
    told: list[str] = []
    restarts = Restarts(2, told.append)
    restarts.spend("engine 0 is lost (a)")
    restarts.spend("trainer rank 1 died (b)")
    with pytest.raises(
        WorkerDied, match=r"engine 1 is lost \(c\), and trainer.max_restarts=2 are used up"
    ):
        restarts.spend("engine 1 is lost (c)")
    assert told == [
        "engine 0 is lost (a): starting again, 1 of 2 restarts left",
        "trainer rank 1 died (b): starting again, 0 of 2 restarts left",
    ]


@pytest.mark.parametrize(
    ("error", "stop"),
    [
        (Stopped(), True),
        (SystemExit(signal.SIGTERM), True),
        (SystemExit(15), True),
        (SystemExit(1), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_rays_own_answer_to_sigterm_while_it_starts_is_a_stop_too(error: BaseException, stop: bool):
    assert asked_to_stop(error) is stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_interrupts(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
):
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.asked
        os.kill(os.getpid(), number)
        assert stop.asked
        assert f"{number.name}: finishing this step" in capfd.readouterr().err
        signal.signal(number, signal.SIG_IGN)  # as ray.init may
        stop.arm()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def stub_loop(**attributes: Any) -> Any:
    told: list[str] = []
    console = SimpleNamespace(say=told.append)
    return SimpleNamespace(
        cfg=Config(),
        progress=Progress(opd_step=7),
        console=console,
        failed_saves=0,
        told=told,
        **attributes,
    )


def test_stopping_writes_a_checkpoint_first():
    saved: list[bool] = []
    loop = stub_loop(stopping=lambda: True, _save=lambda required: saved.append(required))
    with pytest.raises(Stopped):
        Loop._stop_if_asked(loop)
    assert saved == [True]


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        ConfigError("disk full"),
        CheckpointError("step_7 was not written"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_is_said_and_training_goes_on_unless_it_is_the_last(
    error: Exception,
):
    def write(tau: float | None) -> None:
        raise error

    loop = stub_loop(_write=write)
    Loop._save(loop)
    assert loop.failed_saves == 1
    assert str(error) in loop.told[0]
    with pytest.raises(type(error)):
        Loop._save(loop, required=True)


def engine(stall_timeout: float) -> RolloutServer:
    settings = EngineSettings(
        "t", "float32", "d", "dflash", 3, (0,), 3, 64, 4, stall_timeout=stall_timeout
    )
    return RolloutServer(settings)


def test_a_hanging_engine_is_noticed_by_its_tokens_and_a_slow_one_is_not():
    async def scenario() -> None:
        live = engine(0.2)
        live._engine = SimpleNamespace(errored=False)

        async def slow() -> str:
            for _ in range(8):  # longer than the limit in all, and always moving
                await asyncio.sleep(0.05)
                live._progress.moved()
            return "done"

        assert await live._watched(slow(), "a") == "done"
        assert await live.failure() == ""
        with pytest.raises(
            RolloutError,
            match=r"request b: the engine hangs, no token for anybody in "
            r"rollout.stall_timeout=0.2 s",
        ):
            await live._watched(asyncio.sleep(30), "b")
        assert "stall_timeout" in await live.failure()

    asyncio.run(scenario())


def test_a_call_into_a_dead_or_hanging_core_ends():
    """A core that is killed between a response and the collection of its trace never answers, and
    says so nowhere else.
    """

    async def scenario() -> None:
        dead = engine(60)
        dead._engine = SimpleNamespace(
            errored=False, collective_rpc=lambda method, args: asyncio.sleep(30)
        )
        call = asyncio.ensure_future(dead._rpc("opd_pop_traces", ["a"]))
        await asyncio.sleep(0.05)
        dead._engine.errored = True
        with pytest.raises(RolloutError, match="opd_pop_traces: the engine core died"):
            await call
        hanging = engine(0.1)
        hanging._engine = SimpleNamespace(
            errored=False, collective_rpc=lambda method, args: asyncio.sleep(30)
        )
        with pytest.raises(
            RolloutError, match=r"no answer to opd_stats in rollout.stall_timeout=0.1 s"
        ):
            await hanging._rpc("opd_stats")
        assert "no answer to opd_stats" in await hanging.failure()

    asyncio.run(scenario())


def test_whoever_asks_for_a_trace_while_a_core_dies_gets_an_answer():
    """The second request finishes while the traces of the first are collected, and the core dies in
    between.
    """

    async def scenario() -> None:
        dying = engine(60)
        dying._engine = SimpleNamespace(
            errored=False, collective_rpc=lambda method, args: asyncio.sleep(30)
        )
        first = asyncio.ensure_future(dying._pop("a"))
        await asyncio.sleep(0.05)
        second = asyncio.ensure_future(dying._pop("b"))
        await asyncio.sleep(0.05)
        dying._engine.errored = True
        answers = await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 10)
        assert [str(answer) for answer in answers] == ["opd_pop_traces: the engine core died"] * 2

    asyncio.run(scenario())


def test_the_first_request_after_a_pause_is_given_its_time():
    async def scenario() -> None:
        live = engine(0.3)
        await asyncio.sleep(0.4)
        live._in_flight = 1
        assert await live._watched(asyncio.sleep(0.1, "done"), "a") == "done"

    asyncio.run(scenario())


def test_the_line_that_continues_a_run_does_not_start_from_the_old_checkpoint_again():
    plain = ["verl-opd", "train", "quickstart", "optim.lr=1e-4"]
    newest = ["trainer.resume_mode=auto", "trainer.resume_from_path=null"]
    assert continuing(plain, "auto") == plain
    pinned = [
        *plain,
        "++trainer.resume_mode=path",
        "trainer.resume_from_path=runs/a/b/checkpoints/step_10",
    ]
    assert continuing(pinned, "path") == [*plain, *newest]
    assert continuing(plain, "path") == [*plain, *newest], "set by the recipe"


def test_first_line_of_an_error_without_text():
    assert first_line(ValueError()) == "ValueError"
    assert first_line(ValueError("a\nb")) == "a"
