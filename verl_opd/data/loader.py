"""Batches of a data set in an order that depends only on seed and epoch, so that a resumed run
continues it exactly.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from verl_opd.errors import ConfigError


class Named(Protocol):
    """A dataclass whose sample_id names the row that it comes from."""

    @property
    def sample_id(self) -> str: ...


T = TypeVar("T", bound=Named)


class Loader(Generic[T]):
    """Endless batches of `batch_size` items (prompts, conversations), epoch after epoch; items at
    the end of an epoch that do not fill a batch are left out.

    `epoch`: of the batch returned last, from 0. `size_key`: the configuration key that sets
    batch_size. ConfigError when the set is smaller than one batch.
    """

    def __init__(
        self,
        items: Sequence[T],
        batch_size: int,
        shuffle: bool,
        seed: int,
        size_key: str = "data.train_batch_size",
    ) -> None:
        if batch_size > len(items):
            raise ConfigError(
                f"{size_key}={batch_size} is larger than the training set of {len(items)} rows: "
                "lower it"
            )
        self._items = list(items)
        self._digest = _digest(items)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._batch = 0  # index in the epoch of the next batch
        self.epoch = 0
        self._order = self._epoch_order()

    @property
    def batches_per_epoch(self) -> int:
        return len(self._items) // self._batch_size

    def next_batch(self) -> list[T]:
        """The next items; their sample_id becomes "<epoch>-<row>"."""
        if self._batch == self.batches_per_epoch:
            self.epoch += 1
            self._batch = 0
            self._order = self._epoch_order()
        first = self._batch * self._batch_size
        self._batch += 1
        chosen = [self._items[i] for i in self._order[first : first + self._batch_size]]
        return [replace(item, sample_id=f"{self.epoch}-{item.sample_id}") for item in chosen]  # type: ignore[type-var]

    def state(self) -> dict[str, Any]:
        """Position and what the order depends on; plain values, for a checkpoint."""
        return {"epoch": self.epoch, "batch": self._batch, **self._order_inputs()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. ConfigError when data, batch size or seed differ, which
        would change the order.
        """
        for key, now in self._order_inputs().items():
            if state.get(key) != now:
                raise ConfigError(
                    f"the checkpoint was written with other data settings ({key} was "
                    f"{state.get(key)!r}, is {now!r}): restore them to resume, or start a new run "
                    "from the exported draft with draft.path"
                )
        self.epoch, self._batch = state["epoch"], state["batch"]
        self._order = self._epoch_order()

    def _order_inputs(self) -> dict[str, Any]:
        return {
            "rows": len(self._items),
            "rows_sha256": self._digest,
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self._items)))
        if self._shuffle:
            random.Random(f"{self._seed}/{self.epoch}").shuffle(order)
        return order


def _digest(items: Iterable[Any]) -> str:
    """Digest of every field of every item (dataclasses); token ids are hashed as numbers, which is
    much faster than as text.
    """
    digest = hashlib.sha256()
    for item in items:
        for field in fields(item):
            value = getattr(item, field.name)
            ids = isinstance(value, tuple) and bool(value) and isinstance(value[0], int)
            digest.update(
                np.asarray(value, dtype=np.int64).tobytes() if ids else repr(value).encode()
            )
            digest.update(b"\n")
    return digest.hexdigest()[:16]
