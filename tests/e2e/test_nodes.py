"""A run over two Ray nodes, one of which is lost: two raylets on this machine, each with room for
one student worker.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.e2e.conftest import ROOT, command, environment, metrics_of
from tests.e2e.test_loop import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    # Ray's own patience with a node that says nothing is about a minute
    quick = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 1000,
        "health_check_timeout_ms": 3000,
        "health_check_failure_threshold": 3,
    }
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": quick},
    )
    try:
        yield made
    finally:
        made.shutdown()


def test_a_run_over_two_nodes_stops_with_its_resume_line_when_one_is_lost(
    tiny_llama_dir: Path, folder: Path, cluster: Cluster
):
    """Trainer ranks, engines, traces and draft pushes on both nodes; a lost node costs no more than
    the steps since the last checkpoint.
    """
    second = cluster.add_node(num_cpus=1)
    overrides = [
        "trainer.nnodes=2",
        "trainer.total_training_steps=200",
        "trainer.total_epochs=999",
        "trainer.save_freq=1",
        "data.val_files={}",
    ]
    arguments = command(tiny_llama_dir, folder, *overrides, "trainer.val_before_train=false")
    joined, log, store = (
        {**environment(), "RAY_ADDRESS": cluster.address},
        folder / "log",
        folder / "run" / "checkpoints",
    )
    with log.open("w") as output:
        first = subprocess.Popen(arguments, cwd=ROOT, env=joined, stdout=output, stderr=output)
    try:
        wait_for(
            lambda: (store / "step_2").exists() or first.poll() is not None,
            300,
            "two steps on two nodes",
        )
        assert first.poll() is None, log.read_text()[-3000:]
        cluster.remove_node(second, allow_graceful=False)
        assert first.wait(240) == 1, log.read_text()[-3000:]
    finally:
        first.kill()
        first.wait()
    said = log.read_text()
    assert "is lost" in said or "died" in said
    assert re.search(
        r"the run cannot restart: .*(needs 2 CPU \(Ray has 1\)|could not reserve 2 bundles)", said
    )
    assert f"the newest checkpoint is {store.resolve()}/step_" in said
    assert "continue with:\nverl-opd train" in said
    rows = [row for row in metrics_of(folder) if "actor/distillation/loss" in row]
    assert len(rows) >= 2
    assert all(row["opd/replay_mismatch"] == 0 for row in rows)
