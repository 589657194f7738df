"""Create a wandb workspace with the panels of docs/dashboard.md in the project that runs log to.

    python scripts/wandb_workspace.py --entity my-team [--project verl-opd]

Needs pip install 'verl-opd[wandb]' and wandb login.
"""

from __future__ import annotations

import argparse

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws

STEP = "training/global_step"
# section -> panel title -> metrics; "*" stands for every benchmark or position
PANELS: dict[str, dict[str, list[str]]] = {
    "Is the draft getting better?": {
        "tau on held-out prompts": ["test_rollout/*/vllm_spec_accept_length"],
        "tau while training": ["opd/rollout/accept_length/mean"],
        "accepted at position k": ["rollout/accept_rate_pos_*"],
        "share of proposals accepted": ["rollout/spec_accept_rate"],
    },
    "Is it learning the right thing?": {
        "loss": ["actor/distillation/loss"],
        "committed and rejected tokens": [
            "actor/distillation/non_rejected_token_loss",
            "actor/distillation/rejected_draft_loss",
        ],
        "supervised share of response tokens": ["actor/distillation/opd_effective_token_ratio"],
        "rejected tokens at the clamp": ["actor/distillation/rejected_draft_loss_clamp_fraction"],
        "gradient norm": ["actor/grad_norm"],
        "learning rate": ["actor/lr"],
    },
    "Is everything consistent?": {
        "replay check": ["opd/replay_mismatch", "opd/replay_mismatch_raw"],
        "version in the engines, and of the draft": [
            "opd/weight_sync/version",
            "training/update_step",
        ],
        "samples without a verify step": ["opd/rollout/empty_reject_ratio"],
        "recorder": ["opd/recorder/errors", "opd/recorder/broken_traces"],
        "skipped, dropped, failed": [
            "actor/skipped_steps",
            "data/dropped_samples",
            "training/failed_checkpoints",
        ],
        "restarted": [
            "rollout/engine_restarts",
            "rollout/teacher_restarts",
            "rollout/agent_restarts",
            "rollout/rerun_samples",
        ],
    },
    "What does it cost?": {
        "seconds of a step": [
            "timing_s/gen",
            "timing_s/update_actor",
            "timing_s/update_weights",
            "timing_s/testing",
            "timing_s/save_checkpoint",
        ],
        "idle share": ["perf/idle_share"],
        "tokens per second": ["perf/throughput"],
        "response length": ["response_length/mean", "response_length/max"],
        "responses cut short": ["data/truncated_share"],
    },
}


def panel(title: str, metrics: list[str]) -> wr.LinePlot:
    patterns = [metric for metric in metrics if "*" in metric]
    if patterns:
        (pattern,) = patterns
        return wr.LinePlot(
            title=title,
            x=STEP,
            metric_regex="^" + pattern.replace(".", r"\.").replace("*", "[^/]+") + "$",
        )
    return wr.LinePlot(title=title, x=STEP, y=metrics)


def workspace(entity: str, project: str) -> ws.Workspace:
    sections = [
        ws.Section(
            name=name,
            panels=[panel(title, metrics) for title, metrics in panels.items()],
            is_open=True,
        )
        for name, panels in PANELS.items()
    ]
    return ws.Workspace(entity=entity, project=project, name="verl-opd", sections=sections)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entity", required=True)
    parser.add_argument("--project", default="verl-opd")
    options = parser.parse_args()
    print(workspace(options.entity, options.project).save().url)


if __name__ == "__main__":
    main()
