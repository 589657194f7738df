"""Where Ray puts student workers and what they see there: a local cluster that claims to have
accelerators.
"""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from torch.distributed import TCPStore

from verl_opd.config.schema import Config
from verl_opd.controller.placement import Placement, place, start_ray
from verl_opd.devices import DEVICES
from verl_opd.errors import ConfigError
from verl_opd.training.worker import TrainWorker


@ray.remote
class Witness:
    """Reports its environment."""

    def seen(self, *variables: str) -> list[str]:
        return [os.environ.get(variable, "") for variable in variables]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=4,
        resources={"NPU": 4},
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def placed(
    monkeypatch: pytest.MonkeyPatch, device: str, students: int, teachers: int = 0
) -> Placement:
    monkeypatch.setattr(
        "verl_opd.controller.placement.start_ray", lambda cfg, teachers=0: None
    )  # the cluster is there
    monkeypatch.setattr("verl_opd.controller.placement.ray.shutdown", lambda: None)
    cfg = Config()
    cfg.trainer.n_student_workers = students
    return place(cfg, DEVICES[device], teachers)


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_trainer_and_server_share_a_device_that_no_other_worker_has(
    device: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F6: an actor that names no device sees none, or all of them sit on the first."""
    placement = placed(monkeypatch, device, 2, teachers=1)
    variable = DEVICES[device].visible_env
    shared = [placement.actor_options(0), placement.actor_options(0)]
    options = [*shared, placement.actor_options(1), placement.teacher_options(0)]
    placement.actors.extend(Witness.options(**chosen).remote() for chosen in options)
    (trainer,), (server,), (other,), (teacher,) = ray.get(
        [actor.seen.remote(variable) for actor in placement.actors]
    )
    assert trainer == server != ""
    assert len({trainer, other, teacher}) == 3
    assert all(len(seen.split(",")) == 1 for seen in (trainer, other, teacher))
    placement.close()


def test_on_a_cpu_no_device_is_requested(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = placed(monkeypatch, "cpu", 2)
    options: dict[str, Any] = placement.actor_options(0)
    assert "num_gpus" not in options
    assert "resources" not in options
    placement.close()


def test_ranks_meet_at_a_port_that_was_never_free() -> None:
    """F7: rank 0 listens before it announces the port."""
    first = TrainWorker.__new__(TrainWorker)
    first._world = 1
    port = first.open_store("127.0.0.1")
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    client = TCPStore("127.0.0.1", port, 1, False, timedelta(seconds=10))
    client.set("word", "heard")
    assert first._store.get("word") == b"heard"


def test_more_devices_than_there_are_is_an_error_with_both_numbers(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"n_student_workers=4 and 1 teacher server\(s\) needs 5 CPU \(Ray has 4\), 5 NPU "
        r"\(Ray has 4\)",
    ):
        placed(monkeypatch, "npu", 4, teachers=1)


LATE = "The current node timed out during startup. This could happen because some of the raylet"


@pytest.mark.parametrize(("text", "tries"), [(LATE, 2), ("no space left", 1)])
def test_a_raylet_that_is_late_gets_a_second_try_and_other_errors_none(
    text: str, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        tried.append(options)
        if len(tried) == 1:
            raise Exception(text)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("verl_opd.controller.placement.clean_up_after", lambda children: None)
    stand_in = SimpleNamespace(init=init, shutdown=lambda: None)
    monkeypatch.setattr("verl_opd.controller.placement.ray", stand_in)
    if tries == 1:
        with pytest.raises(Exception, match="no space left"):
            start_ray(Config())
    else:
        start_ray(Config())
    assert len(tried) == tries


def test_ray_still_reports_a_late_raylet_by_this_text() -> None:
    from ray._private import node

    source = " ".join(inspect.getsource(node).split())
    assert LATE.partition(". ")[0] in source
