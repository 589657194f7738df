"""A tiny target with a draft for it, hand-made samples, and trainer ranks in processes of their
own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.drafts import build_draft, draft_config, target_config
from tests.options import loss_settings
from verl_opd.config.schema import Config
from verl_opd.drafts import get_family
from verl_opd.opd.losses import LossSettings, StreamTotals, stream_totals
from verl_opd.opd.metrics import StepMetrics
from verl_opd.opd.plan import BlockPlan, TrainItem
from verl_opd.training.trainer import DraftTrainer

BLOCK, LR = 4, 1e-3
SPEC = loss_settings(response_position_decay=0.9)


def save_models(root: Path) -> None:
    """A float32 target with logits far from uniform in `root`/target, a draft in `root`/draft."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(target_config(LlamaConfig, initializer_range=0.25)).save_pretrained(
            root / "target"
        )
    get_family("dflash").save_pretrained(
        build_draft(draft_config(BLOCK)).state_dict(), draft_config(BLOCK), root / "draft"
    )


def make_config(root: Path, **training: Any) -> Config:
    cfg = Config()
    cfg.target.path, cfg.target.dtype, cfg.draft.path = (
        str(root / "target"),
        "float32",
        str(root / "draft"),
    )
    cfg.compute.param_dtype, cfg.compute.lm_head_chunk_size = "float32", 5
    cfg.optim.grad_clip, cfg.optim.weight_decay = 1e9, 0.1
    for key, value in training.items():
        setattr(cfg.compute, key, value)
    return cfg


def make_item(
    name: str,
    prompt_len: int,
    response_len: int,
    labels: list[tuple[int, list[int]]],
    rejected: tuple[tuple[int, int, int, float], ...] = (),
) -> TrainItem:
    """labels: (anchor, supervised offsets) per block. rejected: (anchor, offset, token, target
    log-prob).
    """
    tokens = [
        (7 * i + 13 * prompt_len + 3 * response_len) % 96 for i in range(prompt_len + response_len)
    ]
    prompt, response = tuple(tokens[:prompt_len]), tuple(tokens[prompt_len:])
    anchors = tuple(sorted({anchor for anchor, _ in labels} | {anchor for anchor, *_ in rejected}))
    slots = [(anchor, offset) for anchor, offsets in labels for offset in offsets]
    plan = BlockPlan(
        block_size=BLOCK,
        anchors=anchors,
        response_block=tuple(anchors.index(anchor) for anchor, _ in slots),
        response_offset=tuple(offset for _, offset in slots),
        response_label=tuple(response[anchor + offset] for anchor, offset in slots),
        rejected_block=tuple(anchors.index(anchor) for anchor, *_ in rejected),
        rejected_offset=tuple(offset for _, offset, _, _ in rejected),
        rejected_token=tuple(token for *_, token, _ in rejected),
        rejected_logprob=tuple(logprob for *_, logprob in rejected),
    )
    return TrainItem(sample_id=name, prompt_ids=prompt, response_ids=response, plan=plan)


def make_items() -> list[TrainItem]:
    """Unequal samples: with and without rejections, a shared slot, an anchor on the prompt,
    overlapping blocks, nothing supervised.
    """
    return [
        make_item(
            "a",
            5,
            9,
            [(0, [1, 2]), (2, [1, 2, 3]), (6, [1])],
            ((0, 2, 40, -6.5), (0, 3, 41, -7.0), (6, 1, 17, -6.0), (6, 2, 5, -8.0)),
        ),
        make_item("b", 3, 14, [(-1, [1, 2, 3]), (4, [1, 2, 3]), (5, [1, 2, 3]), (12, [1])]),
        make_item("c", 8, 4, [(0, [1])], ((0, 1, 90, -7.5), (2, 3, 33, -9.5))),
        make_item("d", 2, 6, []),
    ]


def totals_of(items: list[TrainItem], spec: LossSettings = SPEC) -> StreamTotals:
    return stream_totals(
        [item.plan for item in items], [len(item.response_ids) for item in items], spec.options
    )


class ObservedTrainer(DraftTrainer):
    """Keeps the gradient of the last update, before clipping."""

    gradients: dict[str, Tensor]

    def _step(self, lr: float, metrics: StepMetrics, usable: bool) -> None:
        self.gradients = {
            name: whole(parameter.grad) for name, parameter in self.draft.named_parameters()
        }
        super()._step(lr, metrics, usable)

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(parameter) for name, parameter in self.draft.named_parameters()}


def whole(tensor: Tensor | None) -> Tensor:
    """An own full copy of a parameter or gradient; collective."""
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def make_trainer(root: Path, rank: int = 0, world: int = 1, **training: Any) -> ObservedTrainer:
    return calm(
        ObservedTrainer(make_config(root, **training), draft_config(BLOCK), rank, world, "cpu")
    )


Trainer = TypeVar("Trainer", bound=DraftTrainer)


def calm(trainer: Trainer) -> Trainer:
    """AdamW divides by the gradient's own size; where that is almost nothing, a small epsilon would
    turn rounding into whole steps.
    """
    for group in trainer.optimizer.param_groups:
        group["eps"] = 1e-5
    return trainer


@contextmanager
def process_group(store: Path, rank: int = 0, world: int = 1) -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=300),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class Ranks:
    """Runs `scenario(root, rank, world, *args)` on every rank; results by rank. A hang fails after
    `timeout` seconds.
    """

    root: Path
    timeout: float = 500.0

    def run(self, scenario: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        folder = self.root / f"{scenario.__name__}-{time.monotonic_ns()}"
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.setenv(
                "PYTHONPATH",
                os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
            )
            processes = mp.spawn(
                _rank, (scenario, self.root, folder, world, args), nprocs=world, join=False
            )
        deadline = time.monotonic() + self.timeout
        while not processes.join(timeout=1.0):
            if time.monotonic() > deadline:
                for process in processes.processes:
                    process.kill()
                pytest.fail(f"{scenario.__name__} still runs after {self.timeout:.0f} s")
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _rank(
    rank: int,
    scenario: Callable[..., Any],
    root: Path,
    folder: Path,
    world: int,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    with process_group(folder / "store", rank, world):
        torch.save(scenario(root, rank, world, *args), folder / f"{rank}.pt")
        dist.barrier()
