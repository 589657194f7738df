"""Draft, optimiser and RNG through torch.distributed.checkpoint: sharded on disk, loadable on
another number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from verl_opd.errors import CheckpointError


class _Training(Stateful):
    def __init__(self, draft: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.draft, self.optimizer = draft, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.draft, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.draft,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


def save_distributed(
    draft: nn.Module, optimizer: torch.optim.Optimizer, directory: str, rank: int
) -> None:
    """Write float32 master weights, AdamW moments and each rank's torch RNG state to `directory`;
    collective. CheckpointError when one cannot.
    """
    try:
        dcp.save(
            {"training": _Training(draft, optimizer), f"rng_{rank}": torch.get_rng_state()},
            checkpoint_id=directory,
        )
    except CheckpointException as error:  # not an Exception: it would end a Ray worker
        raise _reason(error) from error


def load_distributed(
    draft: nn.Module, optimizer: torch.optim.Optimizer, directory: str, rank: int
) -> None:
    """Restore what `save_distributed` wrote; a rank that did not exist then keeps its own RNG.
    Collective. CheckpointError when one cannot.
    """
    try:
        dcp.load({"training": _Training(draft, optimizer)}, checkpoint_id=directory)
        known = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
        if f"rng_{rank}" in known:
            rng = {f"rng_{rank}": torch.get_rng_state()}
            dcp.load(rng, checkpoint_id=directory, no_dist=True)
            torch.set_rng_state(rng[f"rng_{rank}"])
    except CheckpointException as error:
        raise _reason(error) from error


def _reason(error: CheckpointException) -> CheckpointError:
    """What happened on each rank, without its traceback."""
    return CheckpointError(
        "; ".join(
            f"rank {rank}: {type(failure[0]).__name__}: {failure[0]}"
            for rank, failure in error.failures.items()
        )
    )
