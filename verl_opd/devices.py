"""One table of what differs between devices; everything else in the package is device-neutral."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from verl_opd.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """name: torch device type. ray_resource: what one worker asks Ray for (None = CPU only). visible_env: variable that masks devices.
    process_group_backend: for torch.distributed. sleep_level: what `RolloutServer.sleep` is called with; level 1 keeps a host copy of the
    frozen target, which is never streamed again; 0 = pause only, memory stays. attention: implementation for the frozen target."""

    name: str
    ray_resource: str | None
    visible_env: str | None
    process_group_backend: str
    sleep_level: int
    attention: str


DEVICES = {
    device.name: device
    for device in (
        Device("cpu", None, None, "gloo", 0, "sdpa"),
        Device("cuda", "GPU", "CUDA_VISIBLE_DEVICES", "cpu:gloo,cuda:nccl", 1, "sdpa"),
        Device("npu", "NPU", "ASCEND_RT_VISIBLE_DEVICES", "cpu:gloo,npu:hccl", 1, "sdpa"),
    )
}


def resolve_device(name: str) -> Device:
    """The device row for `cpu`, `cuda`, `npu`, or for `auto` whatever this machine has."""
    if name == "auto":
        name = _detect()
    if name not in DEVICES:
        raise ConfigError(f"trainer.device={name!r} is not one of auto, {', '.join(DEVICES)}")
    return DEVICES[name]


def _detect() -> str:
    if importlib.util.find_spec("torch_npu") is not None:
        return "npu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def process_group_backend(device_type: str) -> str:
    """torch.distributed backend string for a torch device type."""
    return DEVICES[device_type].process_group_backend


def split_cores(cores: list[int], parts: int) -> list[list[int]]:
    """Disjoint equal shares of `cores`; empty shares (= do not pin) when there are fewer cores than parts.

    >>> split_cores([0, 1, 2, 3, 4], 2)
    [[0, 1], [2, 3]]
    """
    share = len(cores) // parts
    return [cores[i * share : (i + 1) * share] for i in range(parts)]


def available_cores() -> list[int]:
    """Core ids this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
