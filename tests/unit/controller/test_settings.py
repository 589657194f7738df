"""What servers of a run are started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_opd.config.schema import Config
from verl_opd.controller.job import prepare
from verl_opd.controller.placement import Placement, Slot
from verl_opd.controller.settings import engine_settings, teacher_settings
from verl_opd.devices import DEVICES


def test_every_server_has_a_log_file_and_its_role_in_it(cfg: Config, tmp_path: Path):
    cfg.teacher.source, cfg.teacher.replicas = "server", 2
    slots = [Slot(index, "n", "ip", ()) for index in range(2)]
    no_group: Any = None
    placement = Placement(group=no_group, device=DEVICES["cpu"], slots=slots, teacher_slots=slots)
    job = prepare(cfg)
    engines = [made.host for made in engine_settings(job, placement, tmp_path / "d", tmp_path)]
    teachers = [made.engine.host for made in teacher_settings(job, placement, tmp_path)]
    assert [(host.role, Path(host.log_path or "").name) for host in [*engines, *teachers]] == [
        ("engine 0", "rollout_0.log"),
        ("engine 1", "rollout_1.log"),
        ("teacher 0", "teacher_0.log"),
        ("teacher 1", "teacher_1.log"),
    ]
