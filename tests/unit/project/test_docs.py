"""docs/metrics.md defines every metric that the code logs; docs/known_faults.md names tests that
exist.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs import documented, undocumented
from tests.options import planned
from tests.rollouts import make_sample, worked_sample
from verl_opd.opd.plan import plan_counts
from verl_opd.report.acceptance import BenchmarkResult, rollout_metrics


def test_names_are_read_from_the_tables() -> None:
    assert len(documented()) > 60
    assert (
        undocumented(
            [
                "response_length/max",
                "rollout/accept_rate_pos_12",
                "test_rollout/mbpp/truncated_share",
                "timing_s/step",
            ]
        )
        == set()
    )
    assert (
        undocumented(["rollout/accept_rate_pos_", "made/up", "test_rollout/a/b/truncated_share"])
        != set()
    )


def test_rollout_validation_and_plan_metrics_are_defined() -> None:
    samples = [worked_sample(), make_sample([], (10, 11)), make_sample([(0, [], [])], (10, 11))]
    names = set(rollout_metrics(samples, 8).finish()) | set(
        BenchmarkResult.of("mbpp", samples).metrics()
    )
    for sample in samples:
        names |= set(plan_counts(planned(sample, block_size=4), sample).finish())
    assert undocumented(names) == set()


def test_every_known_fault_names_tests_that_exist() -> None:
    root = Path(__file__).parents[3]
    defined = {
        name
        for file in (root / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    page = (root / "docs" / "known_faults.md").read_text()
    assert set(re.findall(r"`(test_\w+)`", page)) <= defined
    rows = [line for line in page.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)]
    assert len(rows) > 60
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.split("|")[-2])
        assert named, f"no test: {row}"
