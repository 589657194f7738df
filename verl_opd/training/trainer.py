"""One optimiser step of the draft on replayed blocks. Features come in as input; nothing here cares
which target produced them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl_opd.config.schema import Config
from verl_opd.drafts import get_family
from verl_opd.opd.chains import Chains, build_chains, end_to_end
from verl_opd.opd.layout import Layout, build_layout, split_micro_batches
from verl_opd.opd.losses import (
    LossSpec,
    StreamTotals,
    combine,
    confidence_loss,
    confidence_metrics,
    loss_metrics,
    mass_metrics,
)
from verl_opd.opd.metrics import StepMetrics
from verl_opd.opd.names import BLOCK_LOSSES
from verl_opd.opd.plan import BlockPlan, TrainItem
from verl_opd.opd.replay_check import replay_metrics
from verl_opd.snapshot import DraftSnapshot, checksum
from verl_opd.targets.base import TargetBackend, TargetFeatures
from verl_opd.targets.hf import HFTarget
from verl_opd.targets.store import CachedTarget
from verl_opd.training.optim import build_optimizer
from verl_opd.training.scoring import FrozenHead, Head, TrainableHead, scoring_hidden, slot_rows
from verl_opd.training.state import load_distributed, save_distributed

_CHECKED_SLOTS = 2048  # per micro-batch and replay check


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
        target: TargetBackend | None = None,
    ):
        self.cfg, self.draft_config, self.rank, self.world_size = (
            cfg,
            dict(draft_config),
            rank,
            world_size,
        )
        self.device = torch.device(device)
        self.family = get_family(cfg.draft.family)
        frozen: TargetBackend = target or HFTarget(
            cfg.target.path,
            dtype=cfg.target.dtype,
            layer_ids=self.family.layer_ids(draft_config),
            device=self.device,
            attention=cfg.compute.attention,
            trust_remote_code=cfg.target.trust_remote_code,
        )
        cache_mb = cfg.compute.feature_cache_mb
        self._frozen = frozen  # for sequences that are read once
        self.target: TargetBackend = CachedTarget(frozen, cache_mb << 20) if cache_mb else frozen
        draft = self.family.build(draft_config, seed=cfg.trainer.seed, init_std=cfg.draft.init_std)
        if cfg.draft.path is not None:
            head = self.target.lm_head_weight
            table = self.target.embed(torch.arange(len(head), device=self.device))
            self.family.load_weights(
                draft, cfg.draft.path, {"embed_tokens.weight": table, "lm_head.weight": head}
            )
        self._has_confidence = self.family.confidence(draft) is not None
        draft.gradient_checkpointing = cfg.compute.gradient_checkpointing  # type: ignore[assignment]
        draft.to(self.device).train()
        mesh = init_device_mesh(self.device.type, (world_size,))
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, cfg.compute.param_dtype), reduce_dtype=torch.float32
        )
        for unit in [*self.family.shard_units(draft), draft]:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        self.draft = draft
        self.optimizer = build_optimizer(draft, cfg.optim)
        self._block_size = self.family.block_size(draft_config, cfg.rollout.num_speculative_tokens)

    # -- one optimiser step ------------------------------------------------------------------------

    def update(
        self,
        items: Sequence[TrainItem],
        totals: StreamTotals,
        spec: LossSpec,
        lr: float,
        check_replay: bool = False,
    ) -> StepMetrics:
        """One optimiser step on this rank's `items`; `totals` are counted over the items of all
        ranks.

        check_replay: also compare replayed slots with the engine's proposals (opd/replay_check.py);
        only while the weights are still those that drafted `items`.

        Ranks run the same number of micro-batches, so that FSDP's collectives meet; a rank that
        runs out passes a zero loss through the draft. The step is skipped, and counted in
        actor/skipped_steps, when loss or gradient are not finite on any rank, or when no rank
        supervises anything: AdamW's momentum would move the weights even then.
        """
        metrics, summed = StepMetrics(), torch.zeros((), device=self.device)
        for micro_batch in self._micro_batches(items) or [None]:
            loss = (
                self._loss(micro_batch, totals, spec, metrics, check_replay)
                if micro_batch
                else self._zero_loss()
            )
            (
                loss * self.world_size
            ).backward()  # FSDP averages over ranks; totals are global already
            summed += loss.detach()
        dist.all_reduce(
            summed
            # a token whose loss is not finite has no gradient once its value is clamped, so the
            # norm would not show it
        )
        finite = math.isfinite(float(summed))
        if (
            not finite
        ):  # no loss was measured: the step is skipped and counted; what the replay check saw stays
            metrics = metrics.only("opd/")
        elif totals.denominator(spec) <= 0:
            metrics.add_sum("actor/distillation/loss", 0.0)
        self._step(lr, metrics, usable=finite and totals.denominator(spec) > 0)
        return metrics

    @torch.no_grad()
    def score(self, items: Sequence[TrainItem]) -> dict[str, tuple[float, ...]]:
        """The draft's log-prob of every response label of this rank's `items`, by sample id;
        collective, like `update`.
        """
        scores: dict[str, tuple[float, ...]] = {}
        for micro_batch in self._micro_batches(items):
            if micro_batch is None:
                self._zero_loss()
                continue
            layout = build_layout(micro_batch, self.device, drafted=False, verified=False)
            _, hidden = self._forward(layout)
            rows = slot_rows(layout, layout.response.sample, layout.response.slot)
            values = self._head().logprobs(hidden[rows], layout.response.token)
            parts = values.split([len(item.plan.response_label) for item in micro_batch])
            scores.update(
                {
                    item.sample_id: tuple(part.tolist())
                    for item, part in zip(micro_batch, parts, strict=True)
                }
            )
        return scores

    def _micro_batches(self, items: Sequence[TrainItem]) -> list[list[TrainItem] | None]:
        """This rank's micro-batches, with None where another rank still has one: collectives have
        to meet.
        """
        own: list[list[TrainItem] | None] = [
            *split_micro_batches(items, self.cfg.compute.max_tokens_per_micro_batch)
        ]
        count = torch.tensor(len(own), device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return own + [None] * (int(count) - len(own))

    def _forward(self, layout: Layout) -> tuple[TargetFeatures, Tensor]:
        """Target features, and the draft's hidden states of all slots, flat [b*N*B, h]."""
        features = self.target.features(layout.input_ids, layout.lengths)
        return features, self._replay(features.aux[:, : layout.context_len], layout).flatten(0, 1)

    def _loss(
        self,
        items: list[TrainItem],
        totals: StreamTotals,
        spec: LossSpec,
        metrics: StepMetrics,
        check_replay: bool,
    ) -> Tensor:
        layout = build_layout(
            items, self.device, drafted=check_replay, verified=self._has_confidence
        )
        features, hidden = self._forward(layout)
        head = self._head()
        if check_replay:
            metrics.merge(self._replay_check(layout, hidden.detach(), head))
        if spec.response_loss in BLOCK_LOSSES:
            loss = self._block_loss(items, layout, hidden, features, head, totals, spec, metrics)
        else:
            values = head.values(layout, hidden, features, spec)
            loss = combine(
                values.response,
                layout.response.offset,
                values.rejected,
                layout.rejected.offset,
                totals,
                spec,
            )
            metrics.merge(loss_metrics(values.response, values.rejected, loss.detach(), spec))
            metrics.merge(mass_metrics(values.student_mass.detach(), layout.top_logprobs))
        loss = loss + self._confidence_loss(layout, hidden, totals, spec, metrics)
        return (
            loss + hidden.sum() * 0.0 + head.attached_zero()
        )  # every parameter is in the graph, also when nothing is supervised

    def _block_loss(
        self,
        items: list[TrainItem],
        layout: Layout,
        hidden: Tensor,
        features: TargetFeatures,
        head: Head,
        totals: StreamTotals,
        spec: LossSpec,
        metrics: StepMetrics,
    ) -> Tensor:
        """End-to-end total variation of whole blocks; the target also reads the rejected tokens
        (opd/chains.py).
        """
        chains = build_chains(items, layout.input_ids.shape[1], self.device)
        teacher = torch.cat((scoring_hidden(features, spec), self._branch_hidden(chains, spec)))
        tv = head.divergence(
            hidden[slot_rows(layout, chains.sample, chains.slot)], teacher[chains.row], "tv"
        )
        values, expected = end_to_end(tv, chains)
        none = tv.new_zeros(0)
        loss = combine(values, torch.ones_like(values), none, none, totals, spec)
        metrics.merge(loss_metrics(values, none, loss.detach(), spec))
        prefix = "actor/distillation/"
        metrics.add_mean(
            prefix + "e2e_expected_accept_length", float(expected.detach().sum()), chains.count
        )
        metrics.add_mean(prefix + "tv_distance", float(tv.detach().sum()), len(tv))
        metrics.add_sum(prefix + "tv_block_count", chains.count)
        metrics.add_sum(prefix + "tv_position_count", len(tv))
        metrics.add_sum(
            prefix + "tv_teacher_branch_position_count",
            float((chains.row >= layout.input_ids.numel()).sum()),
        )
        return loss

    def _confidence_loss(
        self,
        layout: Layout,
        hidden: Tensor,
        totals: StreamTotals,
        spec: LossSpec,
        metrics: StepMetrics,
    ) -> Tensor | float:
        """The confidence stream, for drafts with a confidence head; 0, still attached to the head,
        without verified proposals.
        """
        head, verified = self.family.confidence(self.draft), layout.verified
        if head is None:
            return 0.0
        logits = head(hidden[slot_rows(layout, verified.sample, verified.slot)])
        if spec.confidence_weight:
            metrics.merge(confidence_metrics(logits.detach(), verified.token))
        return confidence_loss(logits, verified.token, totals, spec)

    def _branch_hidden(self, chains: Chains, spec: LossSpec) -> Tensor:
        """Last hidden states [R*L, h] of the branches, as many at once as fit the micro-batch's
        token budget.
        """
        count, longest = chains.branch_ids.shape
        head = self.target.lm_head_weight
        at_once = max(1, self.cfg.compute.max_tokens_per_micro_batch // max(1, longest))
        parts = [
            scoring_hidden(
                self._frozen.features(
                    chains.branch_ids[i : i + at_once], chains.branch_lengths[i : i + at_once]
                ),
                spec,
            )
            for i in range(0, count, at_once)
        ]
        return torch.cat(parts) if parts else head.new_zeros(0, head.shape[1])

    def _head(self) -> Head:
        """After a replay, while FSDP holds the root's weights whole."""
        chunk, own = (
            self.cfg.compute.lm_head_chunk_size,
            self.family.own_head(self.draft, self.target.lm_head_weight),
        )
        return (
            FrozenHead(self.target.lm_head_weight, chunk)
            if own is None
            else TrainableHead(own, self.target.lm_head_weight, chunk)
        )

    def _replay_check(self, layout: Layout, hidden: Tensor, head: Head) -> StepMetrics:
        """Replayed choices against the engine's proposals, on an even share of the micro-batch's
        drafted slots.
        """
        drafted = layout.drafted
        count = len(drafted.token)
        some = (
            torch.arange(min(count, _CHECKED_SLOTS), device=self.device)
            * count
            // max(1, min(count, _CHECKED_SLOTS))
        )
        rows = slot_rows(layout, drafted.sample[some], drafted.slot[some])
        return replay_metrics(head.gaps(hidden[rows], drafted.token[some]), drafted.offset[some])

    def _replay(self, features: Tensor, layout: Layout) -> Tensor:
        """Draft hidden states [b, N*B, h] of all blocks; features [b, C, n*h] of the context."""
        return self.family.replay(
            self.draft,
            features,
            self.family.inputs(self.draft_config, self.target.embed, layout),
            layout,
        )

    def _zero_loss(self) -> Tensor:
        """Zero attached to every parameter, through the same collectives as a real micro-batch."""
        plan = BlockPlan(self._block_size, (), (), (), (), (), (), (), ())
        layout = build_layout([TrainItem("empty", (0,), (0,), plan)], self.device)
        borrowed = self.target.lm_head_weight
        no_context = borrowed.new_zeros(
            1, 0, len(self.family.layer_ids(self.draft_config)) * borrowed.shape[1]
        )
        hidden = self._replay(no_context, layout).flatten(0, 1)
        zero = hidden.sum() * 0.0 + self._head().attached_zero()
        head = self.family.confidence(self.draft)
        return zero if head is None else zero + head(hidden[:0]).sum()

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
        """The draft's weights by public name as they leave the trainer: whole, bf16, on the CPU of
        rank 0; empty on other ranks.
        """
        tensors: dict[str, Tensor] = {}
        for name, value in self.draft.named_parameters():
            narrow = value.detach().to(
                torch.bfloat16
            )  # rounded before the gather, which halves what travels
            whole = narrow.full_tensor() if isinstance(narrow, DTensor) else narrow
            if self.rank == 0:
                tensors[name] = whole.cpu().contiguous()
        return tensors

    def snapshot(self, path: str, version: int) -> DraftSnapshot | None:
        """Rank 0 writes the bf16 draft to the safetensors file `path` (temporary name, rename) and
        describes it; others return None.
        """
        tensors = self.published()
        if self.rank != 0:
            return None
        temporary = f"{path}.tmp"
        save_file(tensors, temporary)
        os.replace(temporary, path)
        return DraftSnapshot(
            version,
            path,
            {name: tuple(value.shape) for name, value in tensors.items()},
            checksum(tensors),
        )

    def export(self, directory: str) -> None:
        """Rank 0 writes an HF-format draft directory."""
        tensors = self.published()
        if self.rank == 0:
            constant = {
                name: buffer.cpu() for name, buffer in self.draft.named_buffers()
            }  # token maps
            self.family.save_pretrained({**tensors, **constant}, self.draft_config, Path(directory))
        dist.barrier()

    def save(self, directory: str) -> None:
        save_distributed(self.draft, self.optimizer, directory, self.rank)

    def load(self, directory: str) -> None:
        load_distributed(self.draft, self.optimizer, directory, self.rank)
