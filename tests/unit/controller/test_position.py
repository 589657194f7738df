"""How many steps a run has, and when all of them are done."""

from __future__ import annotations

from collections import Counter

import pytest

from verl_opd.config.schema import Config
from verl_opd.controller.position import Position, planned_steps
from verl_opd.controller.progress import Progress
from verl_opd.data.loader import Loader
from verl_opd.data.prompts import Prompt


def prompts() -> Loader[Prompt]:
    return Loader([Prompt(str(i), "t", (1,), ()) for i in range(6)], 2, False, 0)


def test_on_policy_steps_are_named_or_follow_from_epochs():
    cfg = Config()
    cfg.sft.steps, cfg.trainer.total_epochs = 4, 2
    assert list(planned_steps(cfg, prompts()).items()) == [("sft", 4), ("opd", 6)]
    cfg.trainer.total_training_steps = 0
    assert planned_steps(cfg, prompts()) == {"sft": 4, "opd": 0}


@pytest.mark.parametrize(
    ("sft", "opd", "done"), [(2, 3, True), (1, 3, False), (2, 2, False), (5, 4, True)]
)
def test_a_run_is_finished_when_every_stage_is(sft: int, opd: int, done: bool):
    cfg = Config()
    cfg.sft.steps, cfg.trainer.total_training_steps = 2, 3
    at = Position(prompts(), Progress(steps=Counter({"sft": sft, "opd": opd})))
    assert at.finished(cfg) is done
