"""Fixtures of the tests that run the training step in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training import process_group, save_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny target and DFlash draft of tests/training.py."""
    root = tmp_path_factory.mktemp("models")
    save_models(root)
    return root


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one rank."""
    with process_group(tmp_path_factory.mktemp("group") / "store"):
        yield
