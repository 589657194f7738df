"""What the recorder, the loader and the phases rely on inside engines, held against real engine
sources, read and not imported.

vLLM as installed here, and the vllm-ascend 0.21.0rc1 wheel from the package index: a hook whose
place moved fails a test; without the index the tests are skipped.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from verl_opd.ascend.limits import MAX_QUERY
from verl_opd.devices import DEVICES

ASCEND = "vllm-ascend==0.21.0rc1"


@dataclass
class Class:
    """bases: as written. methods: name -> argument names without self. attributes: whatever is read
    or written on self.
    """

    bases: list[str]
    methods: dict[str, list[str]] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)


class Source:
    """One file of an engine."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text()
        self.tree = ast.parse(self.text)

    def function(self, name: str) -> ast.FunctionDef:
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef) and node.name == name
        ]
        assert found, f"no function {name}"
        return found[0]

    def cls(self, name: str) -> Class:
        nodes = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ClassDef) and node.name == name
        ]
        assert nodes, f"no class {name}"
        found = Class([ast.unparse(base) for base in nodes[0].bases])
        for node in nodes[0].body:
            if isinstance(node, ast.FunctionDef):
                found.methods[node.name] = [argument.arg for argument in node.args.args][1:]
        found.attributes = {
            node.attr
            for node in ast.walk(nodes[0])
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
        return found

    def body(self, cls: str, method: str) -> str:
        (node,) = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ClassDef) and node.name == cls
        ]
        return next(
            ast.unparse(item)
            for item in node.body
            if isinstance(item, ast.FunctionDef) and item.name == method
        )


@pytest.fixture(scope="module")
def vllm() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def ascend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ascend")
    where = [
        "--no-deps",
        "--pre",
        "--only-binary",
        ":all:",
        "--python-version",
        "3.11",
        "--platform",
        "manylinux_2_24_x86_64",
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        *where,
        "--dest",
        str(folder),
        ASCEND,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        pytest.skip(
            f"the package index does not give {ASCEND}: {' '.join(done.stderr.split())[-200:]}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".py")])
    return folder / "vllm_ascend"


# what attach, _v1_inputs, _discarded, _drafter_probe and _live_requests read of a V1 runner
RUNNER = {
    "input_batch",
    "requests",
    "drafter",
    "speculative_config",
    "use_async_scheduling",
    "parallel_config",
}


def test_the_v1_sampler_is_where_the_recorder_hooks_in(vllm: Path) -> None:
    """F1, S6: `_sample(logits, spec_decode_metadata)`, -1 after the accepted tokens, chunked
    prompts in a mask.
    """
    source = Source(vllm / "v1" / "worker" / "gpu_model_runner.py")
    runner = source.cls("GPUModelRunner")
    assert runner.methods["_sample"] == ["logits", "spec_decode_metadata"]
    assert {"propose_draft_token_ids", "get_model"} <= runner.methods.keys()
    assert runner.attributes >= RUNNER | {"discard_request_mask"}
    assert re.search(
        r"PLACEHOLDER_TOKEN_ID.*= -1", Source(vllm / "v1" / "sample" / "rejection_sampler.py").text
    )


def test_the_v2_sampler_is_where_the_recorder_hooks_in(vllm: Path) -> None:
    runner = Source(vllm / "v1" / "worker" / "gpu" / "model_runner.py").cls("GPUModelRunner")
    assert runner.methods["sample"] == ["hidden_states", "input_batch", "grammar_output"]
    assert "_sample" not in runner.methods
    assert runner.attributes >= {"rejection_sampler", "speculator", "req_states", "sampler"}
    batch = Source(vllm / "v1" / "worker" / "gpu" / "input_batch.py").text
    for name in (
        "req_ids",
        "num_reqs",
        "idx_mapping",
        "num_draft_tokens_per_req",
        "logits_indices",
        "cu_num_logits_np",
        "input_ids",
    ):
        assert f"{name}:" in batch, name


def test_metadata_of_a_verify_step_names_its_rows(vllm: Path) -> None:
    source = Source(vllm / "v1" / "spec_decode" / "metadata.py").text
    for name in ("draft_token_ids", "num_draft_tokens", "target_logits_indices"):
        assert f"{name}:" in source, name


def test_drafts_are_loaded_and_fused_as_the_loader_expects(vllm: Path) -> None:
    """S1, E7: names get "model." in front, the fused copy is rebuilt under these names."""
    models = vllm / "model_executor" / "models"
    dflash = Source(models / "qwen3_dflash.py")
    assert "self.model._build_fused_kv_buffers()" in dflash.body(
        "DFlashQwen3ForCausalLM", "load_weights"
    )
    assert '"model." + name' in dflash.text
    assert dflash.cls("DFlashQwen3Model").attributes >= {
        "_fused_kv_weight",
        "_k_norm_weights",
        "_build_fused_kv_buffers",
    }
    assert "layers.0" in Source(models / "llama_eagle3.py").text


def test_the_front_end_has_the_calls_of_the_phases(vllm: Path) -> None:
    engine = Source(vllm / "v1" / "engine" / "async_llm.py").cls("AsyncLLM")
    text = Source(vllm / "v1" / "engine" / "async_llm.py")
    names = {node.name for node in ast.walk(text.tree) if isinstance(node, ast.AsyncFunctionDef)}
    assert names >= {"sleep", "wake_up", "reset_prefix_cache", "collective_rpc", "generate"}
    assert {"errored", "dead_error", "shutdown"} <= engine.methods.keys()


def test_the_ascend_runner_is_hooked_at_the_same_place(ascend: Path) -> None:
    """The subclass overrides `_sample`, so wrapping its base would see nothing: the recorder wraps
    the class that owns it.
    """
    runner = Source(ascend / "worker" / "model_runner_v1.py").cls("NPUModelRunner")
    assert runner.bases == ["GPUModelRunner"]
    assert runner.methods["_sample"] == ["logits", "spec_decode_metadata"]
    assert {"propose_draft_token_ids", "get_model"} <= runner.methods.keys()
    assert runner.attributes >= {
        "drafter",
        "input_batch",
        "requests",
        "use_async_scheduling",
        "ascend_config",
    }
    assert runner.attributes >= {"discard_request_mask"} or runner.attributes >= {
        "discard_request_indices",
        "num_discarded_requests",
    }


def test_the_ascend_sampler_pads_as_vllm_does(ascend: Path) -> None:
    source = Source(ascend / "sample" / "rejection_sampler.py").text
    assert "output_token_ids.fill_(PLACEHOLDER_TOKEN_ID)" in source
    assert "(batch_size, max_spec_len + 1)" in source


def test_lossy_modes_of_ascend_have_the_names_that_are_checked(ascend: Path) -> None:
    config = Source(ascend / "ascend_config.py")
    assert config.cls("AscendConfig").attributes >= {
        "enable_reduce_sample",
        "rejection_sampler_config",
        "weight_nz_mode",
    }
    assert config.cls("RejectionSamplerConfig").attributes >= {
        "enable_block_verify",
        "enable_entropy_verify",
    }


def test_ascend_sleeps_on_the_conditions_that_are_set(ascend: Path) -> None:
    """Level 2 keeps the target's buffers only; waking rejects the NZ layout; the allocator rejects
    expandable segments.
    """
    worker = Source(ascend / "worker" / "worker.py")
    assert worker.cls("NPUWorker").methods["sleep"] == ["level"]
    assert worker.cls("NPUWorker").methods["wake_up"] == ["tags"]
    assert "weight_nz_mode" in worker.body("NPUWorker", "wake_up")
    assert "named_buffers" in worker.body("NPUWorker", "sleep")
    assert "VLLM_ASCEND_ENABLE_NZ" in Source(ascend / "envs.py").text
    assert (
        '"expandable_segments:True" not in conf'
        in Source(ascend / "device_allocator" / "camem.py").text
    )
    must = dict(DEVICES["npu"].engine_must)
    assert must == {
        "VLLM_ASCEND_ENABLE_NZ": "0",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",
    }
    assert DEVICES["npu"].sleep_level == 1


def test_the_attention_kernel_takes_as_many_queries_as_are_allowed(ascend: Path) -> None:
    assert (
        f"self.decode_threshold <= {MAX_QUERY}"
        in Source(ascend / "attention" / "attention_v1.py").text
    )


def test_ascend_drafts_dflash_through_a_proposer_with_a_model(ascend: Path) -> None:
    proposer = Source(ascend / "spec_decode" / "dflash_proposer.py")
    assert any(
        isinstance(node, ast.ClassDef) and node.name == "AscendDflashProposer"
        for node in ast.walk(proposer.tree)
    )
    assert "num_query_per_req = 1 + self.num_speculative_tokens" in proposer.text, (
        "a block is as long as K, whatever the draft was trained with"
    )
    assert (
        "model"
        in Source(ascend / "spec_decode" / "llm_base_proposer.py")
        .cls("AscendSpecDecodeBaseProposer")
        .attributes
    )
