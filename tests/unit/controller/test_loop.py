"""The loop's own small decisions: when something is due, and how a rollout batch becomes optimiser
steps.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from verl_opd.config.schema import Config
from verl_opd.controller.loop import Loop, due
from verl_opd.controller.progress import Progress
from verl_opd.controller.updates import mini_batches
from verl_opd.opd.trace import VerifyTrace


@pytest.mark.parametrize(
    ("every", "step", "rollouts", "expected"),
    [
        (-1, 10, 1, False),
        (5, 5, 1, True),
        (5, 6, 1, False),
        (5, 10, 10, True),
        (25, 30, 10, True),
        (25, 40, 10, False),
        (7, 7, 10, True),
    ],
)
def test_a_frequency_that_no_update_step_hits_exactly_still_counts(
    every: int, step: int, rollouts: int, expected: bool
):
    assert due(every, step, rollouts) is expected


def test_one_pass_deals_the_samples_out_in_turn():
    assert mini_batches(5, 2, 1, seed=0, step=3) == [[0, 2, 4], [1, 3]]
    assert mini_batches(2, 16, 1, seed=0, step=3) == [[0], [1]]


def test_further_passes_are_whole_shuffled_and_repeatable():
    batches = mini_batches(12, 3, 3, seed=1, step=7)
    assert [len(batch) for batch in batches] == [4] * 9
    assert Counter(index for batch in batches for index in batch) == dict.fromkeys(range(12), 3)
    assert batches == mini_batches(12, 3, 3, seed=1, step=7)
    assert batches[3:6] != batches[6:]
    assert batches[3:] != mini_batches(12, 3, 3, seed=1, step=8)[3:]


class Quiet:
    """Any attribute is a context manager that does nothing."""

    def __getattr__(self, name: str) -> Any:
        @contextmanager
        def nothing(*args: Any):
            yield SimpleNamespace()

        return nothing


@pytest.mark.parametrize(
    ("warmup_done", "opd_done", "expected"),
    [(6, 4, []), (6, 2, ["after_opd"]), (3, 0, ["after_warmup", "after_opd"])],
    ids=["nothing left", "OPD made longer", "warm-up made longer"],
)
def test_a_phase_that_trains_again_is_measured_again(
    warmup_done: int, opd_done: int, expected: list[str]
):
    """A finished run continued with more steps must not report the result of the shorter one."""
    measured: list[str] = []
    results = {"before": [], "after_warmup": [], "after_opd": []}
    progress = Progress(warmup_step=warmup_done, opd_step=opd_done, results=results)  # type: ignore[arg-type]

    def validate(stage: str) -> None:
        if stage not in progress.results:
            measured.append(stage)

    cfg = Config()
    cfg.sft.steps = 6
    loop = SimpleNamespace(
        cfg=cfg,
        progress=progress,
        total_steps=4,
        clock=Quiet(),
        console=Quiet(),
        fleet=SimpleNamespace(sleep=lambda: None),
        _sync=lambda: None,
        _warmup=lambda bar: None,
        _opd=lambda bar: None,
        _validate_stage=validate,
        _save=lambda required: None,
        _snapshot=None,
        _stop_if_asked=lambda: None,
    )
    Loop.run(loop)  # type: ignore[arg-type]
    assert measured == expected


@pytest.mark.parametrize(("accumulate", "steps", "sleeps"), [(1, 4, 4), (2, 4, 2), (3, 4, 2)])
def test_engines_sleep_only_before_an_update(accumulate: int, steps: int, sleeps: int):
    """S35: a step that only collects rollouts must leave the engines awake for the next one."""
    actions: list[str] = []
    cfg = Config()
    cfg.trainer.update_accumulation_steps = accumulate
    sample = SimpleNamespace(
        prompt_ids=(1,), response_ids=(2,), trace=VerifyTrace(1, ()), finish_reason="stop"
    )
    loop = SimpleNamespace(
        cfg=cfg,
        total_steps=steps,
        progress=Progress(),
        queue=[],
        _stop_if_asked=lambda: None,
        clock=Quiet(),
        fleet=SimpleNamespace(sleep=lambda: actions.append("sleep")),
        _rollout=lambda score: actions.append("rollout") or [sample],
        _opd_updates=lambda: actions.append("update") or [],
        _sync=lambda: actions.append("sync"),
        _finish_step=lambda *args: None,
    )
    Loop._opd(loop, SimpleNamespace(advance=lambda metrics: None))  # type: ignore[arg-type]
    assert actions.count("sleep") == actions.count("update") == actions.count("sync") == sleeps
    assert actions.count("rollout") == steps
    assert actions[-3:] == ["sleep", "update", "sync"]
    assert "sleep,rollout" not in ",".join(actions)


@pytest.mark.parametrize("measured", [True, False])
def test_a_step_is_logged_before_a_checkpoint_holds_it(measured: bool):
    """A process that dies while a checkpoint is written must not take a step's measurements along:
    the step would never run again.
    """
    actions: list[str] = []
    cfg = Config()
    cfg.trainer.save_freq, cfg.trainer.test_freq = 2, 4 if measured else -1
    loop = SimpleNamespace(
        cfg=cfg,
        progress=Progress(opd_step=4),
        loader=SimpleNamespace(epoch=0),
        failed_saves=0,
        dropped=0,
        fleet=SimpleNamespace(recorder_metrics=dict),
        clock=SimpleNamespace(lap=dict),
        facts={},
        trackers=SimpleNamespace(log=lambda step, metrics: actions.append("log")),
        sample_log=SimpleNamespace(write=lambda step, shown: None),
        diagnosis=SimpleNamespace(look=lambda metrics: []),
        _validate=lambda: actions.append("validate") or [SimpleNamespace(tau=1.5, metrics=dict)],
        _save=lambda tau: actions.append(f"save {tau}"),
    )
    Loop._finish_step(loop, SimpleNamespace(advance=lambda metrics: None), [], SimpleNamespace())  # type: ignore[arg-type]
    assert actions == (["validate", "log", "save 1.5"] if measured else ["log", "save None"])
