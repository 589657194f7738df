"""Batches of prompts in an order that depends only on seed and epoch, and that a resumed run continues exactly."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl_opd.data.prompts import Prompt
from verl_opd.errors import ConfigError


class PromptLoader:
    """Endless batches of `batch_size` prompts, epoch after epoch; the rest that fills no batch is left out of its epoch.

    `epoch` is that of the batch returned last, from 0. ConfigError when the set is smaller than one batch.
    """

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, shuffle: bool, seed: int) -> None:
        if batch_size > len(prompts):
            raise ConfigError(f"data.train_batch_size={batch_size} is larger than the training set of {len(prompts)} prompts: lower it")
        self._prompts = list(prompts)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._batch = 0  # index in the epoch of the next batch
        self.epoch = 0
        self._order = self._epoch_order()

    @property
    def batches_per_epoch(self) -> int:
        return len(self._prompts) // self._batch_size

    def next_batch(self) -> list[Prompt]:
        """The next prompts; their sample_id becomes "<epoch>-<row>"."""
        if self._batch == self.batches_per_epoch:
            self.epoch += 1
            self._batch = 0
            self._order = self._epoch_order()
        first = self._batch * self._batch_size
        self._batch += 1
        chosen = [self._prompts[i] for i in self._order[first : first + self._batch_size]]
        return [replace(prompt, sample_id=f"{self.epoch}-{prompt.sample_id}") for prompt in chosen]

    def state(self) -> dict[str, Any]:
        """Position and what the order depends on; plain values, for a checkpoint."""
        return {"epoch": self.epoch, "batch": self._batch, **self._order_inputs()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. ConfigError when data, batch size or seed differ, because the order would be another."""
        for key, now in self._order_inputs().items():
            if state[key] != now:
                raise ConfigError(
                    f"the checkpoint was written with other data settings ({key} was {state[key]!r}, is {now!r}): "
                    "restore them to resume, or start a new run from the exported draft with draft.path"
                )
        self.epoch, self._batch = state["epoch"], state["batch"]
        self._order = self._epoch_order()

    def _order_inputs(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(f"{prompt.sample_id}:{prompt.prompt_ids}\n".encode())
        return {
            "prompts": len(self._prompts),
            "prompts_sha256": digest.hexdigest()[:16],
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}/{self.epoch}").shuffle(order)
        return order
