"""The order of batches: a function of seed and epoch, continued exactly by a resumed run."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from verl_opd.data.loader import Loader
from verl_opd.data.prompts import Prompt
from verl_opd.errors import ConfigError


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), "made_up", (i, i + 1), ()) for i in range(count)]


def _ids(loader: Loader, batches: int) -> list[list[str]]:
    return [[prompt.sample_id for prompt in loader.next_batch()] for _ in range(batches)]


def test_batches_without_shuffle() -> None:
    loader = Loader(_prompts(5), 2, False, 0)
    assert loader.batches_per_epoch == 2
    assert _ids(loader, 3) == [["0-0", "0-1"], ["0-2", "0-3"], ["1-0", "1-1"]]


def test_epoch_is_that_of_the_last_batch() -> None:
    loader = Loader(_prompts(5), 2, True, 0)
    epochs = []
    for _ in range(5):
        loader.next_batch()
        epochs.append(loader.epoch)
    assert epochs == [0, 0, 1, 1, 2]


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    loader = Loader(_prompts(12), 4, True, 1)
    epochs = [[name.split("-")[1] for batch in _ids(loader, 3) for name in batch] for _ in range(3)]
    assert all(Counter(epoch) == Counter(str(i) for i in range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != [str(i) for i in range(12)]


def test_order_depends_on_seed_and_epoch_only() -> None:
    assert _ids(Loader(_prompts(12), 4, True, 1), 9) == _ids(Loader(_prompts(12), 4, True, 1), 9)
    assert _ids(Loader(_prompts(12), 4, True, 1), 3) != _ids(Loader(_prompts(12), 4, True, 2), 3)


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 5, 6, 9])
def test_resume_continues_the_same_order(taken: int) -> None:
    """Three batches an epoch, so 3, 6 and 9 are saved exactly between epochs."""
    whole = _ids(Loader(_prompts(13), 4, True, 3), 10)
    first = Loader(_prompts(13), 4, True, 3)
    head = _ids(first, taken)
    state = json.loads(json.dumps(first.state()))
    second = Loader(_prompts(13), 4, True, 3)
    second.load_state(state)
    assert second.epoch == first.epoch
    assert head + _ids(second, 10 - taken) == whole


def test_taking_the_state_changes_nothing() -> None:
    loader = Loader(_prompts(8), 2, True, 3)
    expected = _ids(Loader(_prompts(8), 2, True, 3), 6)
    seen = []
    for _ in range(6):
        loader.state()
        seen += _ids(loader, 1)
    assert seen == expected


@pytest.mark.parametrize(
    ("loader", "key"),
    [
        (Loader(_prompts(9), 4, True, 3), "rows was 8, is 9"),
        (Loader([*_prompts(7), Prompt("7", "made_up", (99,), ())], 4, True, 3), "rows_sha256"),
        (Loader(_prompts(8), 2, True, 3), "batch_size was 4, is 2"),
        (Loader(_prompts(8), 4, False, 3), "shuffle was True, is False"),
        (Loader(_prompts(8), 4, True, 5), "seed was 3, is 5"),
    ],
)
def test_other_data_cannot_be_resumed(loader: Loader, key: str) -> None:
    state = Loader(_prompts(8), 4, True, 3).state()
    with pytest.raises(ConfigError, match=key):
        loader.load_state(state)


def test_batch_larger_than_the_set() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.train_batch_size=6 is larger than the training set of 5 rows"
    ):
        Loader(_prompts(5), 6, True, 0)
