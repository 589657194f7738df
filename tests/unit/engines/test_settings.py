"""Environment and arguments of an engine."""

from __future__ import annotations

from typing import Any

from verl_opd.devices import DEVICES
from verl_opd.engines.settings import (
    EXTENSION,
    EngineSettings,
    Host,
    Speculation,
    engine_arguments,
    engine_environment,
)

DRAFT = Speculation(
    draft_path="/draft",
    method="dflash",
    num_speculative_tokens=2,
    target_layer_ids=(1, 3),
    mask_token_id=3,
)


def settings(host: Host | None = None, **changes: Any) -> EngineSettings:
    fields: dict[str, Any] = {"host": host or Host(), "speculation": DRAFT, **changes}
    return EngineSettings(
        model_path="/target", dtype="float32", max_model_len=64, max_num_seqs=4, **fields
    )


def test_a_cpu_engine_gets_its_cores_and_not_rays_thread_count():
    env = engine_environment(settings(Host(cpu_cores=(2, 3), kv_cache_gb=4)))
    assert env["OMP_NUM_THREADS"] is None
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in engine_environment(settings())
    assert "VLLM_CPU_KVCACHE_SPACE" not in engine_environment(settings(Host(device="cuda")))


def test_no_device_sleeps_so_deep_that_the_frozen_target_is_lost():
    """S9, E1: level 2 drops weights that nothing loads again; the target would answer garbage and
    everything would be accepted.
    """
    assert {device.name: device.sleep_level for device in DEVICES.values()} == {
        "cpu": 0,
        "cuda": 1,
        "npu": 1,
    }


def test_sleep_mode_is_on_where_the_device_has_it():
    assert "enable_sleep_mode" not in engine_arguments(settings())
    for device in ("cuda", "npu"):
        assert engine_arguments(settings(Host(device=device)))["enable_sleep_mode"] is True


def test_engine_arguments_carry_target_draft_and_extension():
    arguments = engine_arguments(
        settings(
            engine_kwargs={
                "compilation_config": '{"mode": 0}',
                "block_size": 32,
                "load_format": "safetensors",
            }
        )
    )
    assert arguments["model"] == "/target"
    assert arguments["speculative_config"] == {
        "method": "dflash",
        "model": "/draft",
        "num_speculative_tokens": 2,
    }
    assert arguments["worker_extension_cls"] == EXTENSION
    assert (arguments["compilation_config"], arguments["block_size"], arguments["load_format"]) == (
        {"mode": 0},
        32,
        "safetensors",
    )


def test_an_engine_without_a_draft_neither_speculates_nor_sleeps():
    arguments = engine_arguments(
        settings(
            Host(device="cuda"),
            speculation=None,
            gpu_memory_utilization=0.5,
            engine_kwargs={"max_logprobs": 9},
        ),
        max_logprobs=1,
        skip_tokenizer_init=True,
    )
    assert not {"speculative_config", "worker_extension_cls", "enable_sleep_mode"} & set(arguments)
    assert arguments["gpu_memory_utilization"] == 0.5
    assert arguments["skip_tokenizer_init"] is True
    assert arguments["max_logprobs"] == 9, "the user's own arguments come last"
