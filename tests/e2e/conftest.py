"""The whole loop on tiny models, driven as a user drives it: through the command line, in processes
of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import MASK_TOKEN_ID

ROOT = Path(__file__).parents[2]


def write_prompts(path: Path, texts: Sequence[str]) -> Path:
    path.write_text(
        "".join(
            json.dumps({"data_source": "tiny", "prompt": [{"role": "user", "content": text}]})
            + "\n"
            for text in texts
        )
    )
    return path


def command(target: Path, folder: Path, *overrides: str) -> list[str]:
    """`verl-opd train` on a tiny recipe written to `folder`."""
    recipe = folder / "tiny.yaml"
    recipe.write_text(
        f"""
target: {{path: {target}, dtype: float32}}
draft: {{num_hidden_layers: 2, mask_token_id: {MASK_TOKEN_ID}, target_layer_ids: [0, 2, 5]}}
data:
  train_files: [{folder / "train.jsonl"}]
  val_files: {{tiny: {folder / "val.jsonl"}}}
  train_batch_size: 4
  max_prompt_length: 64
  max_response_length: 24
rollout: {{num_speculative_tokens: 3, max_num_seqs: 8, kv_cache_gb: 1}}
compute: {{param_dtype: float32}}
trainer:
  {{run_dir: {folder / "run"}, device: cpu, n_student_workers: 2, total_training_steps: 3,
    logger: [jsonl]}}
"""
    )
    return [sys.executable, "-m", "verl_opd.cli", "train", str(recipe), *overrides]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "", "COLUMNS": "200"}


def run(arguments: Sequence[str], timeout: float = 600, **variables: str) -> str:
    env = {**environment(), **variables}
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=env, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_prompts(
        tmp_path / "train.jsonl",
        [
            f"say {word}"
            for word in ("one", "two", "three", "four", "five", "six", "seven", "eight")
        ],
    )
    write_prompts(tmp_path / "val.jsonl", ["say nine", "say ten"])
    return tmp_path
