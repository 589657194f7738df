import time

import pytest

from verl_opd.report.timing import Stopwatch


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
