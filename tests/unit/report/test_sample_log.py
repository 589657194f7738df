"""samples.log: the response can be read off the marked text, and so can every guess."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given

from tests.rollouts import UNHURRIED, Rollout, make_sample, rollouts, worked_sample
from verl_opd.report.sample_log import SampleLog, marked


def decode(ids: Sequence[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


def test_the_worked_example() -> None:
    expected = "<10>[{<11>}<902><903>]<12>[{<13><14><15>}]<16>[{}<931><932><933>]<17>"
    assert marked(worked_sample(), decode) == expected


def test_an_end_inside_an_accepted_prefix_shows_what_was_kept() -> None:
    sample = make_sample([(3, [11, 12, 13], [])], (10, 11, 12))
    assert marked(sample, decode) == "<10>[{<11><12>}]"


def test_a_response_without_verify_steps_is_plain() -> None:
    assert marked(make_sample([(0, [], [])], (10, 11)), decode) == "<10><11>"


@given(rollouts())
@UNHURRIED
def test_the_response_is_what_stands_outside_brackets_and_inside_braces(rollout: Rollout) -> None:
    text = marked(rollout.sample, decode)
    assert re.sub(r"\[\{([^}]*)\}[^]]*\]", r"\1", text) == decode(rollout.sample.response_ids)
    rejected = "".join(re.findall(r"\}([^]]*)\]", text))
    assert rejected == "".join(decode(step.rejected) for step in rollout.sample.trace.steps)


def test_one_entry_a_step(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples.log", decode)
    log.write(3, worked_sample())
    log.write(4, worked_sample())
    text = (tmp_path / "samples.log").read_text()
    assert re.findall(
        r"== step (\d+), sample 0-0, draft version 0, 8 tokens, 3 verify steps", text
    ) == ["3", "4"]
    assert "<1><2><3><4><5>\n--\n<10>[{<11>}" in text
