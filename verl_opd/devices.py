"""One table of what differs between devices; everything else in the package is device-neutral."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_opd.errors import ConfigError

_NOSET = "RAY_EXPERIMENTAL_NOSET_"
# trainer and engine share a die
_FREE_PORTS = (("HCCL_HOST_SOCKET_PORT_RANGE", "auto"), ("HCCL_NPU_SOCKET_PORT_RANGE", "auto"))


@dataclass(frozen=True, kw_only=True)
class Device:
    """A kind of device: everything in which it differs from others."""

    # torch device type
    name: str
    # what one worker requests from Ray; None = the host itself, its cores and its memory
    ray_resource: str | None = None
    # variable that masks devices; Ray sets it in every actor unless noset_env is set
    visible_env: str | None = None
    # backend for torch.distributed
    process_group_backend: str
    # level of an engine's sleep: 1 keeps a host copy of the frozen target, which is never streamed
    # again; 0 = pause only, memory stays
    sleep_level: int = 1
    # whether vLLM's V2 model runner works here; V1 works everywhere
    v2_runner: bool = True
    # the vendor's software with versions and limits of its own to check: a room of this package
    stack: str | None = None
    # (variable, default) pairs that trainer ranks set before they use the device
    trainer_env: tuple[tuple[str, str], ...] = ()
    # the same for engines
    engine_env: tuple[tuple[str, str], ...] = ()
    # (variable, value) pairs without which an engine does not work
    engine_must: tuple[tuple[str, str], ...] = ()

    @property
    def on_host(self) -> bool:
        """Trainer and engine work with the host's memory and are pinned to its cores."""
        return self.ray_resource is None

    @property
    def sleeps(self) -> bool:
        """An engine releases device memory while the trainer works."""
        return self.sleep_level > 0

    @property
    def noset_env(self) -> str | None:
        """Variable that keeps Ray from setting visible_env."""
        return f"{_NOSET}{self.visible_env}" if self.visible_env else None

    def bundle(self, share: float = 1.0) -> dict[str, float]:
        """`share` of a device, as an entry of Ray's resources."""
        return {self.ray_resource: share} if self.ray_resource else {}

    def actor_options(self, share: float) -> dict[str, Any]:
        """`share` of a device, as options of a Ray actor; GPU is a resource of Ray's own."""
        if self.ray_resource == "GPU":
            return {"num_gpus": share}
        return {"resources": self.bundle(share)} if self.ray_resource else {}


DEVICES = {
    device.name: device
    for device in (
        Device(name="cpu", process_group_backend="gloo", sleep_level=0, v2_runner=False),
        Device(
            name="cuda",
            ray_resource="GPU",
            visible_env="CUDA_VISIBLE_DEVICES",
            process_group_backend="cpu:gloo,cuda:nccl",
        ),
        Device(
            name="npu",
            ray_resource="NPU",
            visible_env="ASCEND_RT_VISIBLE_DEVICES",
            process_group_backend="cpu:gloo,npu:hccl",
            stack="ascend",
            trainer_env=_FREE_PORTS,
            engine_env=(*_FREE_PORTS, ("TASK_QUEUE_ENABLE", "1")),
            # sleeping needs both
            engine_must=(
                ("VLLM_ASCEND_ENABLE_NZ", "0"),
                ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False"),
            ),
        ),
    )
}


def actor_environment(device: Device, role: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of an actor of `role` trainer or engine on a node with `environ`: the node's value
    or else the device's default, and for engines the values that they cannot work without.
    """
    chosen = {
        name: environ.get(name, value)
        for name, value in (device.trainer_env if role == "trainer" else device.engine_env)
    }
    return {
        **chosen,
        **{
            name: _with_must(environ.get(name, ""), value)
            for name, value in device.engine_must
            if role == "engine"
        },
    }


def _with_must(given: str, must: str) -> str:
    """`must` instead of `given`; where the value is a list of name:value settings separated by
    commas, only the setting of that name is replaced.
    """
    name, colon, _ = must.partition(":")
    others = [
        part for part in given.split(",") if colon and part and not part.startswith(f"{name}:")
    ]
    return ",".join([*others, must])


def check_isolation(device: Device, environ: Mapping[str, str]) -> None:
    """ConfigError when a variable keeps Ray from masking devices: all workers would then share the
    first one.
    """
    if device.noset_env is not None and environ.get(device.noset_env, "") not in ("", "0", "false"):
        raise ConfigError(
            f"{device.noset_env}={environ[device.noset_env]} keeps Ray from giving every worker a "
            f"{device.name} of its own: unset it, here and where the Ray nodes were started"
        )


def resolve_device(name: str) -> Device:
    """The row of `cpu`, `cuda` or `npu`; `auto` means the kind that this machine has."""
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


def split_cores(cores: list[int], parts: int) -> list[list[int]]:
    """Disjoint equal shares of `cores`; empty shares (do not pin) when there are fewer cores than
    parts.

    >>> split_cores([0, 1, 2, 3, 4], 2)
    [[0, 1], [2, 3]]
    """
    share = len(cores) // parts
    return [cores[i * share : (i + 1) * share] for i in range(parts)]


def available_cores() -> list[int]:
    """Core ids this process may run on."""
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )
