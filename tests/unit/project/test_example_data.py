"""The example prompts: loadable rows of one narrow kind, no task twice, none of the held-out ones
in training.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

DATA = Path(__file__).parents[3] / "examples" / "data"
FILES = {"train": 622, "heldout": 48}
# Words that do not tell tasks apart.
FILLER = {
    "a",
    "an",
    "the",
    "of",
    "in",
    "to",
    "and",
    "from",
    "with",
    "its",
    "it",
    "is",
    "are",
    "that",
    "for",
    "by",
    "as",
    "given",
    "returns",
    "computes",
}


def _prompts(split: str) -> list[str]:
    rows = [
        json.loads(line)
        for line in (DATA / f"python_functions_{split}.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]
    contents = []
    for row in rows:
        assert set(row) == {"data_source", "prompt"}
        assert row["data_source"] == "python_functions"
        (message,) = row["prompt"]
        assert message["role"] == "user"
        contents.append(message["content"])
    return contents


def _task(prompt: str) -> tuple[str, ...]:
    """The words that make the task, in order; case, punctuation, filler and plural endings do not
    count.
    """
    words = re.findall(r"[a-z0-9.]+", prompt.lower().rstrip("."))
    return tuple(word.removesuffix("s") for word in words if word not in FILLER)


@pytest.mark.parametrize(("split", "rows"), FILES.items())
def test_rows_are_of_one_kind(split: str, rows: int) -> None:
    prompts = _prompts(split)
    assert len(prompts) == rows
    for prompt in prompts:
        assert re.fullmatch(r"Write a Python function that [^\s].*[^\s.]\.", prompt), prompt
        assert prompt.isascii()
        assert prompt.split() == prompt.split(" ")
        assert len(prompt) <= 110


def test_no_task_occurs_twice() -> None:
    counts = Counter(_task(prompt) for split in FILES for prompt in _prompts(split))
    assert [task for task, count in counts.items() if count > 1] == []


def test_the_comparison_sees_through_wording() -> None:
    assert _task("Write a Python function that returns the sum of two numbers.") == _task(
        "Write a Python function that computes a sum of two number."
    )
    assert _task("Write a Python function that adds two lists.") != _task(
        "Write a Python function that adds two sets."
    )
