"""`verl-opd plan`: where the processes of a run would be placed, in which environments, and how
much memory they take. Starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from verl_opd.ascend.limits import check_npu
from verl_opd.commands.memory import (
    Sizes,
    device_memory,
    engine_lines,
    estimate,
    parameter_count,
    sizes_of,
    teacher_lines,
    trainer_lines,
)
from verl_opd.config.load import to_yaml
from verl_opd.config.schema import Config
from verl_opd.config.teacher import teacher_models
from verl_opd.devices import Device, actor_environment, resolve_device
from verl_opd.drafts.resolve import draft_config_of
from verl_opd.errors import ConfigError, HubUnreachable
from verl_opd.report.console import Console


def plan(cfg: Config) -> None:
    """Print configuration, placement, environments and memory. Nothing is started; where the models
    cannot be read, only memory is left out.
    """
    from transformers import AutoConfig

    print(to_yaml(cfg))
    device, console = resolve_device(cfg.trainer.device), Console()
    sizes, why_not, parameters = None, "", dict[str, int]()
    trust = cfg.target.trust_remote_code
    try:
        target = AutoConfig.from_pretrained(cfg.target.path, trust_remote_code=trust)
        if device.stack == "ascend":
            check_npu(cfg, target.num_hidden_layers, os.environ)
        sizes = sizes_of(cfg, target, draft_config_of(cfg, target, weights=False))
        models = {
            name: AutoConfig.from_pretrained(path, trust_remote_code=trust)
            for name, path in teacher_models(cfg).items()
        }
        parameters = {name: parameter_count(model) for name, model in models.items()}
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError) and not isinstance(error, HubUnreachable):
            raise
        why_not = " ".join(str(error).split())[:200]
    print_placement(console, cfg, device)
    print_environments(console, cfg, device)
    if sizes is None:
        console.print(f"memory: not estimated ({why_not})")
    else:
        print_memory(console, cfg, device, sizes, parameters)


def print_placement(console: Console, cfg: Config, device: Device) -> None:
    """One row for each device or bundle of cores that the run reserves."""
    unit = f"{device.ray_resource} bundle" if device.ray_resource else "bundle"
    rows = [
        [f"{unit} {i}", f"trainer rank {i}, engine {i}"]
        for i in range(cfg.trainer.n_student_workers)
    ]
    names = [name for name in teacher_models(cfg) for _ in range(cfg.teacher.replicas)]
    rows += [
        [f"teacher {unit} {i}", f"teacher server {i} ({name})"] for i, name in enumerate(names)
    ]
    console.table(f"placement over {cfg.trainer.nnodes} node(s)", ["where", "what"], rows)


def print_environments(console: Console, cfg: Config, device: Device) -> None:
    """Variables that trainer ranks and engines set, where the device needs any."""
    environ = {**os.environ, **cfg.ray.runtime_env.get("env_vars", {})}  # what actors inherit
    variables = [
        [role, *item]
        for role in ("trainer", "engine")
        for item in actor_environment(device, role, environ).items()
    ]
    if variables:
        console.table("environment of the actors", ["role", "variable", "value"], variables)


def print_memory(
    console: Console, cfg: Config, device: Device, sizes: Sizes, parameters: Mapping[str, int]
) -> None:
    """The parts of the estimate and its peaks. `parameters`: of each teacher model, by name."""
    memory = device_memory(device)
    teachers = teacher_lines(cfg, device, memory, parameters)
    parts = {
        "trainer rank": trainer_lines(cfg, sizes),
        "engine": engine_lines(cfg, sizes, device, memory),
        "teachers": teachers,
    }
    console.table(
        "memory of one student worker, and of teachers, GB",
        ["process", "what", "memory" if device.on_host else "device", "host"],
        [
            [process, line.what, f"{line.device:.2f}", f"{line.host:.2f}"]
            for process, lines in parts.items()
            for line in lines
        ],
    )
    peak = estimate(cfg, sizes, device, memory, teachers)
    if device.on_host:
        console.print(
            f"peak of the run: about {peak.total:.1f} GB, {cfg.trainer.n_student_workers} student "
            f"worker(s) of {peak.training:.1f} GB"
        )
        return
    known = (
        f"of {memory:.0f} GB" if memory else "(no device here: the engine's share is not counted)"
    )
    console.print(
        f"peak of one device {known}: about {peak.rollout:.1f} GB rolling out, "
        f"{peak.training:.1f} GB training; host: {peak.host:.1f} GB a student worker"
    )
    if memory and max(peak.rollout, peak.training) > memory:
        console.print(
            "note: that is more than a device has; lower rollout.gpu_memory_utilization, "
            "compute.max_tokens_per_micro_batch or opd.max_response_anchors, or set "
            "compute.gradient_checkpointing=true (now "
            f"{str(cfg.compute.gradient_checkpointing).lower()})"
        )
