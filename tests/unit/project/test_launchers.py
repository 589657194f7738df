"""Every launcher of examples/, run as a user runs it, without starting anything (DRY_RUN=1)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
LAUNCHERS = sorted(path.name for path in (ROOT / "examples").glob("*.sh") if path.name != "lib.sh")
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "DRY_RUN": "1",
    "PYTHON": sys.executable,
    "PYTHONPATH": str(ROOT),
    "COLUMNS": "160",
}
NEEDED = {
    "multi_node.sh": {"RAY_ADDRESS": "10.0.0.1:6379", "RUN_DIR": "/shared/run", "NNODES": "2"}
}


@pytest.fixture(scope="module")
def dry_runs(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path
) -> dict[str, subprocess.CompletedProcess[str]]:
    """All launchers at once, each with a prompt file and with trainer.seed=7 as an override of the
    caller's.
    """
    folder = tmp_path_factory.mktemp("launchers")
    prompts, chats = folder / "prompts.jsonl", folder / "chats.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    chats.write_text(
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n'
    )
    started = {}
    for name in LAUNCHERS:
        files = {"TRAIN_FILES": str(prompts), "SFT_FILES": str(chats)}
        command = [str(ROOT / "examples" / name), "trainer.seed=7"]
        if "cpu" in name:
            files["MODEL_PATH"] = str(tiny_llama_dir)
            command.append("draft.target_layer_ids=[0,2,5]")
        env = {**os.environ, **OFFLINE, **files, **NEEDED.get(name, {})}
        started[name] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
    return {
        name: subprocess.CompletedProcess(name, *_finish(process))
        for name, process in started.items()
    }


def _finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def config_of(done: subprocess.CompletedProcess[str]) -> dict:
    return yaml.safe_load(done.stdout.split("\nplacement over")[0])


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_dry_run_shows_configuration_and_placement(
    name: str, dry_runs: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    done = dry_runs[name]
    assert done.returncode == 0, done.stderr
    cfg = config_of(done)
    assert cfg["trainer"]["seed"] == 7, "overrides of the caller pass through"
    assert done.stdout.count("trainer rank ") >= cfg["trainer"]["n_student_workers"]
    assert ("environment of the actors" in done.stdout) == (cfg["trainer"]["device"] == "npu")


def test_the_16_card_node_is_laid_out_as_published(
    dry_runs: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    cfg = config_of(dry_runs["npu_16card_a3.sh"])
    assert (
        cfg["trainer"]["n_student_workers"],
        cfg["teacher"]["replicas"],
        cfg["data"]["train_batch_size"],
    ) == (14, 2, 28)
    assert (cfg["rollout"]["num_speculative_tokens"], cfg["draft"]["block_size"]) == (7, 8)
    assert (
        cfg["opd"]["max_response_anchors"],
        cfg["compute"]["attention"],
        cfg["compute"]["gradient_checkpointing"],
    ) == (
        186,
        "sdpa",
        True,
    )
    assert cfg["rollout"]["engine_kwargs"]["compilation_config"] == {
        "cudagraph_mode": "PIECEWISE",
        "cudagraph_capture_sizes": [8, 16, 32, 64],
    }
    text = dry_runs["npu_16card_a3.sh"].stdout
    assert "NPU bundle 13" in text
    assert "teacher server 1 (default)" in text
    assert "expandable_segments:False" in text


def test_the_names_that_users_know_reach_their_keys(tmp_path: Path) -> None:
    """Upper-case variables, a JSON value with commas and quotes among them."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    names = {
        "TRAIN_FILES": f"{prompts},{prompts}",
        "STUDENT_WORLD_SIZE": "6",
        "TEACHER_WORLD_SIZE": "1",
        "TRAIN_PROMPT_BSZ": "12",
        "NUM_SPECULATIVE_TOKENS": "3",
        "DRAFT_BLOCK_SIZE": "4",
        "MAX_PROMPT": "100",
        "MAX_RESPONSE_LENGTH": "200",
        "LR": "1e-5",
        "DFLASH_MAX_RESPONSE_ANCHORS": "9",
        "ROLLOUT_ENFORCE_EAGER": "False",
        "GRADIENT_CHECKPOINTING": "False",
        "VLLM_COMPILATION_CONFIG": '{"cudagraph_mode": "PIECEWISE", '
        '"cudagraph_capture_sizes": [4, 8]}',
    }
    done = subprocess.run(
        [str(ROOT / "examples" / "npu_8card_a2.sh")],
        env={**os.environ, **OFFLINE, **names},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cfg = config_of(done)
    assert cfg["data"]["train_files"] == [str(prompts)] * 2
    assert (
        cfg["trainer"]["n_student_workers"],
        cfg["teacher"]["replicas"],
        cfg["data"]["train_batch_size"],
    ) == (6, 1, 12)
    assert (cfg["rollout"]["num_speculative_tokens"], cfg["draft"]["block_size"]) == (3, 4)
    assert (
        cfg["data"]["max_prompt_length"],
        cfg["data"]["max_response_length"],
        cfg["optim"]["lr"],
    ) == (100, 200, 1e-5)
    assert (cfg["opd"]["max_response_anchors"], cfg["rollout"]["enforce_eager"]) == (9, False)
    assert cfg["compute"]["gradient_checkpointing"] is False
    assert cfg["rollout"]["engine_kwargs"]["compilation_config"] == names["VLLM_COMPILATION_CONFIG"]


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "RUN_DIR"])
def test_several_nodes_need_to_know_where_to_meet(name: str) -> None:
    env = {**os.environ, **OFFLINE, **NEEDED["multi_node.sh"]}
    env.pop(name)
    done = subprocess.run(
        [str(ROOT / "examples" / "multi_node.sh")],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert name in done.stderr


def test_launchers_end_nothing_and_hold_no_path() -> None:
    """L1: a launcher that ends every Python process of the machine, or knows one
    cluster's folders.
    """
    for path in (ROOT / "examples").glob("*.sh"):
        text = path.read_text()
        assert not any(
            word in text for word in ("kill", "ray stop", "/home/", "/mnt/", "/data/")
        ), path.name
