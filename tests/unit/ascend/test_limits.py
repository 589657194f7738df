"""What an NPU does not support is an error before anything starts, with the numbers and what to set
instead.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from verl_opd.ascend.limits import check_npu
from verl_opd.config.schema import Config
from verl_opd.devices import DEVICES, actor_environment, check_isolation
from verl_opd.engines.settings import EngineSettings, Host, engine_environment
from verl_opd.errors import ConfigError
from verl_opd.training.worker import TrainWorker

LAYERS = 36
PIECEWISE = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [8, 16, 32, 64]}


def config(tokens: int = 7, seqs: int = 64, eager: bool = False, **engine: Any) -> Config:
    cfg = Config()
    cfg.rollout.num_speculative_tokens, cfg.rollout.max_num_seqs, cfg.rollout.enforce_eager = (
        tokens,
        seqs,
        eager,
    )
    cfg.rollout.engine_kwargs = engine
    return cfg


@pytest.mark.parametrize(
    ("cfg", "environ"),
    [
        (config(compilation_config=PIECEWISE), {}),
        (
            config(
                compilation_config='{"cudagraph_mode": "PIECEWISE", '
                '"cudagraph_capture_sizes": [8, 16, 32, 64]}'
            ),
            {"TASK_QUEUE_ENABLE": "1"},
        ),
        (
            config(
                compilation_config={
                    "cudagraph_mode": "FULL_DECODE_ONLY",
                    "cudagraph_capture_sizes": [8, 16, 64],
                }
            ),
            {"VLLM_PLUGINS": "x,ascend"},
        ),
        (
            config(compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"}),
            {"VLLM_ASCEND_ENABLE_NZ": "0"},
        ),
        (config(compilation_config={"cudagraph_mode": "NONE"}), {"VLLM_ASCEND_ENABLE_NZ": "1"}),
        (config(cudagraph_capture_sizes=[8, 16, 32, 64]), {}),
        (config(max_cudagraph_capture_size=64, compilation_config={"cudagraph_mode": None}), {}),
        (config(15, 128, True), {"TASK_QUEUE_ENABLE": "2", "ASCEND_LAUNCH_BLOCKING": "1"}),
        (
            config(
                15, 256, True, max_num_batched_tokens=16384, additional_config={"weight_nz_mode": 0}
            ),
            {},
        ),
    ],
)
def test_what_works_passes(cfg: Config, environ: dict[str, str]) -> None:
    check_npu(cfg, LAYERS, environ)


@pytest.mark.parametrize(
    ("cfg", "environ", "reason"),
    [
        (
            config(16, 8, True),
            {},
            r"num_speculative_tokens=16 .* attention kernel takes 16 query tokens and 1 \+ K = 17; "
            r"use at most 15",
        ),
        (
            config(7, 257, True),
            {},
            r"max_num_seqs=257 x \(1 \+ K\) = 2056 tokens exceed "
            r"rollout\.engine_kwargs\.max_num_batched_tokens=2048",
        ),
        (
            config(),
            {},
            r"51 captured sizes x 36 pieces need about 1836 streams, .* about 900 \(error 207005",
        ),
        (
            config(compilation_config={"cudagraph_mode": "piecewise"}),
            {},
            "51 captured sizes x 36 pieces",
        ),
        (config(max_cudagraph_capture_size=200), {}, "28 captured sizes x 36 pieces"),
        (
            config(
                compilation_config={
                    "cudagraph_mode": "full_decode_only",
                    "cudagraph_capture_sizes": [7, 9],
                }
            ),
            {},
            r"cudagraph_mode=FULL_DECODE_ONLY captures whole decode steps, .* \[7, 9\] are not",
        ),
        (
            config(compilation_config=PIECEWISE, cudagraph_capture_sizes=[8]),
            {},
            "cudagraph_capture_sizes is also set in compilation_config",
        ),
        (
            config(compilation_config=3),
            {},
            r"rollout\.engine_kwargs\.compilation_config=3 is not a mapping",
        ),
        (
            config(eager=True, additional_config=[1]),
            {},
            r"rollout\.engine_kwargs\.additional_config=\[1\] is not a mapping",
        ),
        (
            config(eager=True, additional_config="{"),
            {},
            r"rollout\.engine_kwargs\.additional_config='\{' is not valid JSON",
        ),
        (
            config(
                compilation_config={**PIECEWISE, "cudagraph_capture_sizes": list(range(8, 248, 8))}
            ),
            {},
            "30 captured sizes x 36 pieces",
        ),
        (
            config(
                compilation_config={
                    "cudagraph_mode": "FULL_DECODE_ONLY",
                    "cudagraph_capture_sizes": [4, 8, 12],
                }
            ),
            {},
            r"multiples of 1 \+ K = 8; \[4, 12\] are not",
        ),
        (
            config(compilation_config="{"),
            {},
            r"rollout\.engine_kwargs\.compilation_config='\{' is not valid JSON",
        ),
        (
            config(compilation_config=PIECEWISE),
            {"TASK_QUEUE_ENABLE": "2"},
            r"TASK_QUEUE_ENABLE=2 .* use 1, or set rollout\.enforce_eager",
        ),
        (
            config(compilation_config=PIECEWISE),
            {"ASCEND_LAUNCH_BLOCKING": "1"},
            "ASCEND_LAUNCH_BLOCKING=1 .* unset it",
        ),
        (config(eager=True), {"VLLM_PLUGINS": "mine"}, "VLLM_PLUGINS=mine .* add ascend"),
        (
            config(eager=True, additional_config='{"weight_nz_mode": 2}'),
            {},
            "weight_nz_mode=2: engines that sleep need 0",
        ),
    ],
)
def test_what_does_not_is_named_with_its_remedy(
    cfg: Config, environ: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_npu(cfg, LAYERS, environ)


def test_rays_mask_of_devices_must_not_be_switched_off() -> None:
    check_isolation(DEVICES["npu"], {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"})
    check_isolation(DEVICES["cpu"], {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"})
    with pytest.raises(
        ConfigError,
        match="RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1 keeps Ray from giving every "
        "worker a npu",
    ):
        check_isolation(DEVICES["npu"], {"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"})


def test_each_role_gets_the_environment_its_device_needs() -> None:
    """Trainer and engine share a die: ports that do not collide; an engine that sleeps: no NZ
    layout, no expandable segments. What a node sets counts.
    """
    node = {
        "HCCL_HOST_SOCKET_PORT_RANGE": "60000-60050",
        "PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:32,expandable_segments:True",
        "VLLM_ASCEND_ENABLE_NZ": "1",
    }
    trainer, engine = (
        actor_environment(DEVICES["npu"], role, node) for role in ("trainer", "engine")
    )
    ports = {"HCCL_HOST_SOCKET_PORT_RANGE": "60000-60050", "HCCL_NPU_SOCKET_PORT_RANGE": "auto"}
    assert trainer == ports
    assert engine == {
        **ports,
        "TASK_QUEUE_ENABLE": "1",
        "VLLM_ASCEND_ENABLE_NZ": "0",
        "PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:32,expandable_segments:False",
    }
    assert (
        actor_environment(DEVICES["npu"], "engine", {})["PYTORCH_NPU_ALLOC_CONF"]
        == "expandable_segments:False"
    )


def test_engines_and_ranks_set_it_before_they_use_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = EngineSettings(
        model_path="t",
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=4,
        host=Host(device="npu"),
    )
    assert engine_environment(settings)["VLLM_ASCEND_ENABLE_NZ"] == "0"
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in ("redirect_output", "open_log"):
        monkeypatch.setattr(f"verl_opd.training.worker.{name}", lambda path: None)
    cfg = Config()
    cfg.trainer.device, cfg.compute.num_threads = "npu", torch.get_num_threads()
    TrainWorker(cfg, {}, 0, 1, (), "log")
    assert os.environ["HCCL_NPU_SOCKET_PORT_RANGE"] == "auto"


def test_only_an_npu_needs_variables() -> None:
    for name in ("cpu", "cuda"):
        assert (
            actor_environment(DEVICES[name], "trainer", {})
            == actor_environment(DEVICES[name], "engine", {})
            == {}
        )
    assert DEVICES["npu"].process_group_backend == "cpu:gloo,npu:hccl"
