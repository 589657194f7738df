"""Counters and results of a run, to a checkpoint and back, also from older ones."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.fakes import result, sample
from verl_opd.controller.progress import Progress


def progress() -> Progress:
    return Progress(
        steps=Counter({"sft": 3, "opd": 2}),
        version=7,
        results={"before": [result(1.0)], "after_sft": [result(1.5)]},
        pool=[sample("a"), sample("b")],
    )


def test_a_checkpoint_carries_counters_results_and_text():
    state = json.loads(json.dumps(progress().state()))
    assert (state["sft_step"], state["opd_step"], state["version"]) == (3, 2, 7)
    assert Progress.from_state(state) == progress()


def test_steps_of_any_stage_are_kept():
    kept = Progress(steps=Counter({"sft": 0, "tune": 4}))
    state = json.loads(json.dumps(kept.state()))
    assert (state["sft_step"], state["tune_step"]) == (0, 4)
    assert dict(Progress.from_state(state).steps) == {"sft": 0, "tune": 4}


@pytest.mark.parametrize("stages", [{"sft": 3, "opd": 2}, {"sft": 0, "opd": 5}])
def test_global_steps_count_all_stages(stages: dict[str, int]):
    assert Progress(steps=Counter(stages)).global_step == 5


def test_a_checkpoint_that_calls_the_supervised_stage_warmup_is_understood():
    state = json.loads(json.dumps(progress().state()))
    state["warmup_step"] = state.pop("sft_step")
    state["results"] = {
        {"after_sft": "after_warmup"}.get(point, point): rows
        for point, rows in state["results"].items()
    }
    assert list(state["results"]) == ["before", "after_warmup"]
    assert Progress.from_state(state) == progress()
