"""One table of what differs between devices; everything else in the package is device-neutral."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass

from verl_opd.errors import ConfigError

_FREE_PORTS = (
    ("HCCL_HOST_SOCKET_PORT_RANGE", "auto"),
    ("HCCL_NPU_SOCKET_PORT_RANGE", "auto"),
)  # trainer and engine share a die


@dataclass(frozen=True)
class Device:
    """name: torch device type. ray_resource: what one worker asks Ray for (None = CPU only).
    visible_env: variable that masks devices; Ray sets it in every actor unless noset_env is set.
    process_group_backend: for torch.distributed. sleep_level: what `RolloutServerActor.sleep` is
    called with; level 1 keeps a host copy of the frozen target, which is never streamed again; 0 =
    pause only, memory stays. attention: implementation for the frozen target. trainer_env,
    engine_env: defaults for the environment of trainer ranks and of engines, which they set before
    they use the device. engine_must: what an engine cannot do without.
    """

    name: str
    ray_resource: str | None
    visible_env: str | None
    noset_env: str | None
    process_group_backend: str
    sleep_level: int
    attention: str
    trainer_env: tuple[tuple[str, str], ...] = ()
    engine_env: tuple[tuple[str, str], ...] = ()
    engine_must: tuple[tuple[str, str], ...] = ()


_NOSET = "RAY_EXPERIMENTAL_NOSET_"
DEVICES = {
    device.name: device
    for device in (
        Device("cpu", None, None, None, "gloo", 0, "sdpa"),
        Device(
            "cuda",
            "GPU",
            "CUDA_VISIBLE_DEVICES",
            f"{_NOSET}CUDA_VISIBLE_DEVICES",
            "cpu:gloo,cuda:nccl",
            1,
            "sdpa",
        ),
        Device(
            "npu",
            "NPU",
            "ASCEND_RT_VISIBLE_DEVICES",
            f"{_NOSET}ASCEND_RT_VISIBLE_DEVICES",
            "cpu:gloo,npu:hccl",
            1,
            "sdpa",
            trainer_env=_FREE_PORTS,
            engine_env=(*_FREE_PORTS, ("TASK_QUEUE_ENABLE", "1")),
            engine_must=(
                ("VLLM_ASCEND_ENABLE_NZ", "0"),
                ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False"),
            ),  # sleeping needs both
        ),
    )
}


def actor_environment(device: Device, role: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of an actor of `role` trainer or engine on a node with `environ`: what is set
    there, else the device's default, and what must be.
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
    """`must` in the place of what is given; of comma-separated settings (name:value) only the one
    that it names.
    """
    name, colon, _ = must.partition(":")
    others = [
        part for part in given.split(",") if colon and part and not part.startswith(f"{name}:")
    ]
    return ",".join([*others, must])


def check_isolation(device: Device, environ: Mapping[str, str]) -> None:
    """ConfigError when Ray was told to leave the mask of visible devices alone: all workers would
    then share the first one.
    """
    if device.noset_env is not None and environ.get(device.noset_env, "") not in ("", "0", "false"):
        raise ConfigError(
            f"{device.noset_env}={environ[device.noset_env]} keeps Ray from giving every worker a "
            f"{device.name} of its own: unset it, here and where "
            "the Ray nodes were started"
        )


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


def split_cores(cores: list[int], parts: int) -> list[list[int]]:
    """Disjoint equal shares of `cores`; empty shares (= do not pin) when there are fewer cores than
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
