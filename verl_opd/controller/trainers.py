"""The training side of a run as one object: FSDP ranks that move in lock step."""

from __future__ import annotations

import heapq
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from verl_opd.config.schema import Config
from verl_opd.controller.faults import death, first_line
from verl_opd.controller.placement import Placement
from verl_opd.errors import CheckpointError, ConfigError
from verl_opd.opd.layout import cost
from verl_opd.opd.losses import LossSettings, StreamTotals
from verl_opd.opd.metrics import StepMetrics
from verl_opd.opd.plan import TrainItem
from verl_opd.snapshot import DraftSnapshot
from verl_opd.training.worker import LOOPBACK, TrainWorkerActor


def balance(items: Sequence[TrainItem], ranks: int) -> list[list[TrainItem]]:
    """Shares of about equal cost: longest first, each to the rank with the least so far.
    Deterministic; a share may be empty.
    """
    shares: list[list[TrainItem]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for item in sorted(items, key=lambda item: (-cost(item), item.sample_id)):
        total, rank = heapq.heappop(load)
        shares[rank].append(item)
        heapq.heappush(load, (total + cost(item), rank))
    return shares


class Trainers:
    """All FSDP ranks of a run; every method is a collective and returns when all ranks are done."""

    def __init__(
        self, cfg: Config, draft_config: dict[str, Any], placement: Placement, logs: Path
    ) -> None:
        world = len(placement.slots)
        nodes = {slot.node_id for slot in placement.slots}
        self._address = placement.slots[0].node_ip if len(nodes) > 1 else LOOPBACK
        self._ranks = [
            TrainWorkerActor.options(**placement.actor_options(slot.index)).remote(
                cfg,
                draft_config,
                slot.index,
                world,
                slot.cores,
                str(logs / f"train_{slot.index}.log"),
            )
            for slot in placement.slots
        ]
        placement.actors.extend(self._ranks)

    def init(self) -> list[dict[str, Any]]:
        """Build models and optimiser on every rank; parameter counts of each rank."""
        try:
            port = ray.get(self._ranks[0].open_store.remote(self._address))
            reports: list[dict[str, Any]] = self._all("init", self._address, port)
        except ray.exceptions.RayTaskError as error:
            # a draft or target does not load: an error of the user, without a remote traceback
            if isinstance(error.cause, ConfigError):
                raise error.cause from None
            raise
        self.draft_parameters: int = reports[0]["draft_parameters"]
        return reports

    def update(
        self,
        items: Sequence[TrainItem],
        totals: StreamTotals,
        settings: LossSettings,
        lr: float,
        check_replay: bool = False,
    ) -> list[StepMetrics]:
        """One optimiser step over `items`, split over the ranks; measurements of each rank."""
        shares = balance(items, len(self._ranks))
        parts: list[StepMetrics] = ray.get(
            [
                rank.update.remote(share, totals, settings, lr, check_replay)
                for rank, share in zip(self._ranks, shares, strict=True)
            ]
        )
        return parts

    def score(self, items: Sequence[TrainItem]) -> dict[str, tuple[float, ...]]:
        """The current draft's log-prob of every response label, by sample id."""
        shares = balance(items, len(self._ranks))
        parts = ray.get(
            [rank.score.remote(share) for rank, share in zip(self._ranks, shares, strict=True)]
        )
        return {name: values for part in parts for name, values in part.items()}

    def snapshot(self, path: Path, version: int) -> DraftSnapshot:
        snapshot: DraftSnapshot = self._all("snapshot", str(path), version)[0]
        return snapshot

    def save(self, directory: Path) -> None:
        """Write a distributed checkpoint; CheckpointError when a rank cannot."""
        self._written("save", directory)

    def load(self, directory: Path) -> None:
        self._all("load", str(directory))

    def export(self, directory: Path) -> None:
        """Write the draft as engines read it; CheckpointError when rank 0 cannot."""
        self._written("export", directory)

    def _written(self, method: str, directory: Path) -> None:
        try:
            self._all(method, str(directory))
        except ray.exceptions.RayTaskError as error:
            # torch does not report a full disk
            free = shutil.disk_usage(directory.parent).free / 1e6
            raise CheckpointError(
                f"{directory} was not written ({free:.0f} MB left on this disk): "
                f"{first_line(error.cause)}"
            ) from error

    def deaths(self) -> list[str]:
        """Ranks that are gone, and how they ended."""
        return [
            f"trainer rank {index} died ({how})"
            for index, rank in enumerate(self._ranks)
            if (how := death(rank))
        ]

    def _all(self, method: str, *args: Any) -> list[Any]:
        results: list[Any] = ray.get([getattr(rank, method).remote(*args) for rank in self._ranks])
        return results
