import torch

from verl_opd.targets.base import Features
from verl_opd.targets.store import FeatureStore


class Counting:
    """Features that name their token; counts the rows it is asked for."""

    reads_branches = True

    def __init__(self) -> None:
        self.rows = 0

    def features(self, input_ids, lengths):
        self.rows += input_ids.shape[0]
        wide = input_ids.unsqueeze(-1).float()
        return Features(wide.expand(-1, -1, 4).clone(), wide.expand(-1, -1, 2).clone())


def batch(*rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows]), torch.tensor(
        [len(row) for row in rows]
    )


def test_a_sequence_is_computed_once_whatever_it_is_batched_and_padded_with():
    inner = Counting()
    cached = FeatureStore(inner, 1 << 20)
    cached.features(*batch([5, 6], [7, 8, 9]))
    again = cached.features(*batch([1, 1, 1, 1], [5, 6]))
    assert inner.rows == 3
    assert (cached.hits, cached.misses) == (1, 3)
    assert again.aux[1, :2, 0].tolist() == [5.0, 6.0]
    assert again.aux.shape == (2, 4, 4)
    assert again.last_hidden[0, :, 0].tolist() == [1.0] * 4


def test_a_prefix_is_another_sequence():
    inner = Counting()
    cached = FeatureStore(inner, 1 << 20)
    cached.features(*batch([5, 6, 7]))
    cached.features(*batch([5, 6]))
    assert inner.rows == 2


def test_the_least_recently_used_leaves_first_and_the_bound_holds():
    inner = Counting()
    cached = FeatureStore(inner, 2 * 2 * (4 + 2) * 4)  # two sequences of two tokens
    for row in ([1, 1], [2, 2], [1, 1], [3, 3]):
        cached.features(*batch(row))
    assert inner.rows == 3
    cached.features(*batch([1, 1]))
    assert inner.rows == 3
    cached.features(*batch([2, 2]))
    assert inner.rows == 4


def test_a_batch_larger_than_the_bound_is_still_answered():
    cached = FeatureStore(Counting(), 0)
    assert cached.features(*batch([1, 2], [3])).aux[1, 0, 0] == 3.0
