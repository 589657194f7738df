"""Fixtures that several test folders share."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.tiny import save_tiny_llama, save_tiny_qwen3


@pytest.fixture(scope="session", autouse=True)
def level_of_messages() -> None:
    """What the package logs from WARNING up reaches `caplog`, although engines that a test starts
    raise the level of the root logger.
    """
    logging.getLogger("verl_opd").setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def tiny_qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Qwen3 target (tests/tiny.py) in HF format."""
    return save_tiny_qwen3(tmp_path_factory.mktemp("tiny_qwen3"))


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Llama target (tests/tiny.py) in HF format."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))
