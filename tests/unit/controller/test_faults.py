"""Restart budget and stop signals, without Ray."""

from __future__ import annotations

import os
import signal

import pytest

from verl_opd.controller.faults import Restarts, first_line
from verl_opd.controller.run import continuing
from verl_opd.errors import RestartsExhausted
from verl_opd.signals import Stopped, StopSignal, asked_to_stop


def test_every_restart_is_logged_and_the_last_one_ends_the_run(caplog: pytest.LogCaptureFixture):
    restarts = Restarts(2)
    restarts.spend("engine 0 is lost (a)")
    restarts.spend("trainer rank 1 died (b)")
    with pytest.raises(
        RestartsExhausted, match=r"engine 1 is lost \(c\), and trainer.max_restarts=2 is used up"
    ):
        restarts.spend("engine 1 is lost (c)")
    assert caplog.messages == [
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
