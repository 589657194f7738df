import time

import pytest

from verl_opd.controller.loop import due
from verl_opd.controller.timing import Stopwatch


def test_idle_share_is_the_time_in_no_working_part():
    clock = Stopwatch()
    with clock.part("gen"):
        time.sleep(0.06)
    with clock.part("save_checkpoint"):
        time.sleep(0.02)
    lap = clock.lap()
    assert lap["timing_s/step"] >= lap["timing_s/gen"] + lap["timing_s/save_checkpoint"] - 1e-6
    assert lap["perf/idle_share"] == pytest.approx(1 - lap["timing_s/gen"] / lap["timing_s/step"])
    assert clock.lap()["timing_s/step"] < lap["timing_s/step"]
    assert clock.total["gen"] == pytest.approx(lap["timing_s/gen"])


@pytest.mark.parametrize(
    ("every", "step", "rollouts", "expected"),
    [(-1, 10, 1, False), (5, 5, 1, True), (5, 6, 1, False), (5, 10, 10, True), (25, 30, 10, True), (25, 40, 10, False), (7, 7, 10, True)],
)
def test_a_frequency_that_no_update_step_hits_exactly_still_counts(every: int, step: int, rollouts: int, expected: bool):
    assert due(every, step, rollouts) is expected
