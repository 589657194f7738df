"""The Ray actor around one DraftTrainer rank."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ray

from verl_opd.config.schema import Config
from verl_opd.devices import actor_environment, resolve_device
from verl_opd.logs import open_log
from verl_opd.opd.losses import LossSettings, StreamTotals
from verl_opd.opd.metrics import StepMetrics
from verl_opd.opd.plan import TrainItem
from verl_opd.process import redirect_output
from verl_opd.snapshot import DraftSnapshot

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_PATIENCE = timedelta(minutes=30)


class TrainWorker:
    """One FSDP rank in a process of its own; methods as in DraftTrainer, each a collective over all
    ranks.
    """

    def __init__(
        self,
        cfg: Config,
        draft_config: dict[str, Any],
        rank: int,
        world_size: int,
        cores: Sequence[int],
        log_path: str,
    ) -> None:
        redirect_output(log_path)
        open_log(f"trainer rank {rank}")
        self._cfg, self._draft_config, self._rank, self._world = cfg, draft_config, rank, world_size
        self._store: Any = None
        self._device = resolve_device(cfg.trainer.device)
        os.environ.update(actor_environment(self._device, "trainer", os.environ))
        threads = cfg.compute.num_threads or len(cores) or 1
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if self._device.on_host and cores:
            os.sched_setaffinity(0, set(cores))
        import torch

        torch.set_num_threads(threads)

    def open_store(self, address: str) -> int:
        """Open the store through which the ranks meet; returns its port. On loopback when `address`
        is, else on all interfaces: the address under which other nodes reach this one may not
        belong to an interface of it. Only on rank 0.

        The port is bound before its number is passed on: no other process can take it in between.
        """
        from torch.distributed import TCPStore

        listener = socket.create_server(
            (address if address == LOOPBACK else "", 0), backlog=self._world
        )
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            address,
            port,
            self._world,
            True,
            _PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return port

    def init(self, address: str, port: int) -> dict[str, Any]:
        """Join the process group of the store at `address` and build models and optimiser; returns
        parameter counts.
        """
        import torch.distributed as dist

        from verl_opd.training.trainer import DraftTrainer

        if self._store is None:
            self._store = dist.TCPStore(address, port, self._world, False, _PATIENCE)
        dist.init_process_group(
            self._device.process_group_backend,
            store=self._store,
            rank=self._rank,
            world_size=self._world,
            timeout=_PATIENCE,
        )
        self._trainer = DraftTrainer(
            self._cfg, self._draft_config, self._rank, self._world, self._device.name
        )
        count = sum(parameter.numel() for parameter in self._trainer.draft.parameters())
        log.info("rank %d of %d trains a draft of %d parameters", self._rank, self._world, count)
        return {"draft_parameters": count}

    def ping(self) -> None:
        """Answers between two methods, for as long as this process lives."""

    def update(
        self,
        items: list[TrainItem],
        totals: StreamTotals,
        settings: LossSettings,
        lr: float,
        check_replay: bool = False,
    ) -> StepMetrics:
        return self._trainer.update(items, totals, settings, lr, check_replay)

    def score(self, items: list[TrainItem]) -> dict[str, tuple[float, ...]]:
        return self._trainer.score(items)

    def snapshot(self, path: str, version: int) -> DraftSnapshot | None:
        return self._trainer.snapshot(path, version)

    def save(self, directory: str) -> None:
        self._trainer.save(directory)

    def load(self, directory: str) -> None:
        self._trainer.load(directory)

    def export(self, directory: str) -> None:
        self._trainer.export(directory)


# TrainWorker as a Ray actor.
TrainWorkerActor: Any = ray.remote(TrainWorker)
