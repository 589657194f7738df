"""One optimiser step of the draft on replayed blocks. Features are an input, so nothing here
depends on where the target runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl_opd.config.schema import Config
from verl_opd.drafts import get_family
from verl_opd.opd.layout import build_layout, split_micro_batches
from verl_opd.opd.losses import LossSettings, StreamTotals
from verl_opd.opd.metrics import StepMetrics
from verl_opd.opd.plan import BlockPlan, TrainItem
from verl_opd.snapshot import DraftSnapshot
from verl_opd.targets.base import Features, FeatureSource
from verl_opd.targets.hf import HFSource
from verl_opd.targets.store import FeatureStore
from verl_opd.training.objective import Objective, Replayed
from verl_opd.training.optim import build_optimizer
from verl_opd.training.publish import published, write_export, write_snapshot
from verl_opd.training.state import load_distributed, save_distributed


class DraftTrainer:
    """One FSDP rank. Every method but the constructor's model loading is a collective: all ranks
    call it, in the same order.

    Needs an initialised default process group. Master weights, gradients' reduction and AdamW state
    are float32; forward and backward of the draft run in compute.param_dtype.
    """

    def __init__(
        self,
        cfg: Config,
        draft_config: Mapping[str, Any],
        rank: int,
        world_size: int,
        device: str,
    ):
        self.cfg, self.draft_config = cfg, dict(draft_config)
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.family = get_family(cfg.draft.family)
        target = HFSource(
            cfg.target.path,
            dtype=cfg.target.dtype,
            layer_ids=self.family.layer_ids(draft_config),
            device=self.device,
            attention=cfg.compute.attention,
            trust_remote_code=cfg.target.trust_remote_code,
        )
        self.head = target.head
        store_bytes = cfg.compute.feature_cache_mb << 20
        self.source: FeatureSource = FeatureStore(target, store_bytes) if store_bytes else target
        draft = self._load_draft()
        self._has_confidence = self.family.confidence(draft) is not None
        self.draft = self._shard(draft)
        self.optimizer = build_optimizer(self.draft, cfg.optim)
        self.objective = Objective(self.family, self.draft, self.head, target, cfg.compute)
        self._block_size = self.family.block_size(draft_config, cfg.rollout.num_speculative_tokens)

    def _load_draft(self) -> nn.Module:
        cfg, head = self.cfg, self.head
        seed, init_std = cfg.trainer.seed, cfg.draft.init_std
        draft = self.family.build(self.draft_config, seed=seed, init_std=init_std)
        if cfg.draft.path is not None:
            # a file may repeat the target's tables, without rows that only pad the embedding
            embedding = head.embedding[: len(head.weight)]  # [V, h]
            frozen = {"embed_tokens.weight": embedding, "lm_head.weight": head.weight}
            self.family.load_weights(draft, cfg.draft.path, frozen)
        return draft

    def _shard(self, draft: nn.Module) -> nn.Module:
        compute = self.cfg.compute
        draft.gradient_checkpointing = compute.gradient_checkpointing  # type: ignore[assignment]
        draft.to(self.device).train()
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, compute.param_dtype), reduce_dtype=torch.float32
        )
        for unit in [*self.family.shard_units(draft), draft]:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        return draft

    # -- one optimiser step ------------------------------------------------------------------------

    def update(
        self,
        items: Sequence[TrainItem],
        totals: StreamTotals,
        settings: LossSettings,
        lr: float,
        check_replay: bool = False,
    ) -> StepMetrics:
        """One optimiser step on this rank's `items`; `totals` are counted over the items of all
        ranks.

        check_replay: also compare replayed slots with the engine's proposals (opd/replay_check.py);
        only while the weights are still those that drafted `items`.

        The step is skipped, and counted in actor/skipped_steps, when loss or gradient are not
        finite on any rank, or when no rank supervises anything: AdamW's momentum would move the
        weights even then.
        """
        metrics, summed = StepMetrics(), torch.zeros((), device=self.device)
        for micro_batch in self._micro_batches(items):
            batch = self._forward(micro_batch, check_replay)
            loss = self.objective.loss(batch, totals, settings, metrics, check_replay)
            # FSDP averages over ranks; totals are global already
            (loss * self.world_size).backward()
            summed += loss.detach()
        # a token whose loss is not finite has no gradient once its value is clamped, so the norm
        # would not show it
        dist.all_reduce(summed)
        finite, supervised = math.isfinite(float(summed)), totals.denominator(settings.options) > 0
        if not finite:
            # no loss was measured; what the replay check saw stays
            metrics = metrics.only("opd/")
        elif not supervised:
            metrics.add_sum("actor/distillation/loss", 0.0)
        self._step(lr, metrics, usable=finite and supervised)
        return metrics

    @torch.no_grad()
    def score(self, items: Sequence[TrainItem]) -> dict[str, tuple[float, ...]]:
        """The draft's log-prob of every response label of this rank's `items`, by sample id;
        collective, like `update`.
        """
        scores: dict[str, tuple[float, ...]] = {}
        for micro_batch in self._micro_batches(items):
            batch = self._forward(micro_batch)
            if micro_batch:
                values = self.objective.label_logprobs(batch)
                names = [item.sample_id for item in micro_batch]
                scores.update(zip(names, values, strict=True))
        return scores

    def _micro_batches(self, items: Sequence[TrainItem]) -> list[list[TrainItem]]:
        """This rank's micro-batches, at least one. Ranks run the same number of them, so that
        FSDP's collectives meet: one that runs out of items has empty ones.
        """
        own = split_micro_batches(items, self.cfg.compute.max_tokens_per_micro_batch)
        count = torch.tensor(max(1, len(own)), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return own + [[] for _ in range(int(count) - len(own))]

    def _forward(self, items: list[TrainItem], check_replay: bool = False) -> Replayed:
        """Target features and the draft's hidden states of a micro-batch. An empty one passes
        through the same collectives; the target does not run for it.
        """
        layout = build_layout(
            items or [self._nothing()],
            self.device,
            drafted=check_replay,
            verified=self._has_confidence,
        )
        features = (
            self.source.features(layout.input_ids, layout.lengths) if items else self._no_features()
        )
        context = features.aux[:, : layout.context_len]  # [b, C, n*h]
        inputs = self.family.inputs(self.draft_config, self.head.embed, layout)
        hidden = self.family.replay(self.draft, context, inputs, layout)  # [b, N*B, h]
        return Replayed(items, layout, features, hidden.flatten(0, 1))

    def _nothing(self) -> TrainItem:
        """An item without a block."""
        plan = BlockPlan(block_size=self._block_size, anchors=())
        return TrainItem(sample_id="empty", prompt_ids=(0,), response_ids=(0,), plan=plan)

    def _no_features(self) -> Features:
        """Features of one sequence of length 0."""
        count, hidden = len(self.family.layer_ids(self.draft_config)), self.head.weight.shape[1]
        zeros = self.head.weight.new_zeros
        return Features(aux=zeros(1, 0, count * hidden), last_hidden=zeros(1, 0, hidden))

    def _step(self, lr: float, metrics: StepMetrics, usable: bool) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.cfg.optim.grad_clip)
        total = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        finite = math.isfinite(total)
        usable = usable and finite
        if usable:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.rank == 0:  # the same on every rank: report it once
            metrics.add_mean("actor/grad_norm", total if finite else 0.0, float(finite))
            metrics.add_mean("actor/lr", lr, 1)
            metrics.add_sum("actor/skipped_steps", float(not usable))
            metrics.add_sum("actor/updates", 1.0)

    # -- what leaves the trainer -------------------------------------------------------------------

    def published(self) -> dict[str, Tensor]:
        return published(self.draft)

    def snapshot(self, path: str, version: int) -> DraftSnapshot | None:
        return write_snapshot(self.draft, path, version)

    def export(self, directory: str) -> None:
        write_export(self.family, self.draft, self.draft_config, directory)

    def save(self, directory: str) -> None:
        save_distributed(self.draft, self.optimizer, directory, self.rank)

    def load(self, directory: str) -> None:
        load_distributed(self.draft, self.optimizer, directory, self.rank)
