"""The ready-made wandb workspace: it can be built, and shows nothing that no run logs."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.wandb_workspace import PANELS, workspace
from tests.docs import undocumented

ROOT = Path(__file__).parents[3]
METRICS = [
    metric for panels in PANELS.values() for metrics in panels.values() for metric in metrics
]


def test_every_panel_shows_what_runs_log() -> None:
    """Names are those of docs/metrics.md; a pattern stands for one of the names that it matches."""
    assert (
        undocumented({metric.replace("pos_*", "pos_1").replace("*", "gsm8k") for metric in METRICS})
        == set()
    )


def test_the_workspace_holds_all_panels_over_the_same_axis() -> None:
    made = workspace("team", "project")
    assert [section.name for section in made.sections] == list(PANELS)
    panels = [panel for section in made.sections for panel in section.panels]
    assert len(panels) == sum(map(len, PANELS.values()))
    assert {panel.x for panel in panels} == {"training/global_step"}
    (by_pattern, *_) = panels
    assert re.match(by_pattern.metric_regex, "test_rollout/gsm8k/vllm_spec_accept_length")
    assert not re.match(by_pattern.metric_regex, "test_rollout/gsm8k/response_length")


def test_the_page_about_the_dashboard_explains_every_panel() -> None:
    page = (ROOT / "docs" / "dashboard.md").read_text()
    for panels in PANELS.values():
        for title in panels:
            assert title in page, title
