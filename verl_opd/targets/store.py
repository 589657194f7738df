"""Keeps the features of sequences that training uses again, so that the frozen target runs once per
sequence.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from verl_opd.targets.base import Features, FeatureSource


class FeatureStore:
    """A FeatureSource in front of another one. Sequences are found by their token ids; the least
    recently used go first beyond `max_bytes`.

    A frozen target gives the same features every time, so nothing ever has to be invalidated.
    """

    def __init__(self, source: FeatureSource, max_bytes: int) -> None:
        self._source, self._max_bytes, self._bytes = source, max_bytes, 0
        # token ids -> (aux [L, n*h], last hidden state [L, h]) of a sequence of L tokens
        self._rows: OrderedDict[bytes, tuple[Tensor, Tensor]] = OrderedDict()
        self.reads_branches = source.reads_branches
        self.hits = self.misses = 0

    def features(self, input_ids: Tensor, lengths: Tensor) -> Features:
        counts = lengths.tolist()
        keys = [
            row[:count].cpu().numpy().tobytes()
            for row, count in zip(input_ids, counts, strict=True)
        ]
        missing = [i for i, key in enumerate(keys) if key not in self._rows]
        self.misses += len(missing)
        self.hits += len(keys) - len(missing)
        fresh: dict[bytes, tuple[Tensor, Tensor]] = {}
        if missing:
            index = torch.tensor(missing, device=input_ids.device)
            computed = self._source.features(input_ids[index], lengths[index])
            for row, i in enumerate(missing):
                fresh[keys[i]] = (
                    computed.aux[row, : counts[i]].clone(),
                    computed.last_hidden[row, : counts[i]].clone(),
                )
        rows = [fresh.get(key) or self._rows[key] for key in keys]
        self._keep(fresh, keys)
        length = input_ids.shape[1]
        return Features(
            _pad([aux for aux, _ in rows], length), _pad([last for _, last in rows], length)
        )

    def _keep(self, fresh: dict[bytes, tuple[Tensor, Tensor]], used: list[bytes]) -> None:
        for key, row in fresh.items():
            self._rows[key] = row
            self._bytes += _size(row)
        for key in used:
            self._rows.move_to_end(key)
        while self._bytes > self._max_bytes and self._rows:
            _, row = self._rows.popitem(last=False)
            self._bytes -= _size(row)


def _size(row: tuple[Tensor, Tensor]) -> int:
    return sum(part.numel() * part.element_size() for part in row)


def _pad(rows: list[Tensor], length: int) -> Tensor:
    out = rows[0].new_zeros(len(rows), length, rows[0].shape[-1])
    for index, row in enumerate(rows):
        out[index, : row.shape[0]] = row
    return out
