"""From replayed blocks to the loss that the draft is trained with, and its measurements.

Everything here is one rank's share of a micro-batch. No collectives, no optimiser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verl_opd.config.schema import ComputeConfig
from verl_opd.drafts.base import DraftFamily
from verl_opd.errors import ConfigError
from verl_opd.opd.chains import Chains, build_chains, end_to_end
from verl_opd.opd.layout import Layout, slot_rows
from verl_opd.opd.losses import LossSettings, StreamTotals, combine, confidence_loss
from verl_opd.opd.measures import (
    block_metrics,
    confidence_metrics,
    loss_metrics,
    mass_metrics,
)
from verl_opd.opd.metrics import StepMetrics
from verl_opd.opd.names import BLOCK_LOSSES
from verl_opd.opd.plan import TrainItem
from verl_opd.opd.replay_check import replay_metrics
from verl_opd.targets.base import Features, FeatureSource
from verl_opd.targets.head import TargetHead
from verl_opd.training.scoring import Scorer, scoring_hidden

_CHECKED_SLOTS = 2048  # per micro-batch and replay check


@dataclass(frozen=True)
class Replayed:
    """A micro-batch after the forward pass of target and draft."""

    # one a sample
    items: Sequence[TrainItem]
    layout: Layout
    features: Features
    # [b*N*B, h], the draft's hidden states of all slots
    hidden: Tensor


@dataclass(frozen=True)
class Objective:
    """Turns a replayed micro-batch into its part of the loss."""

    family: DraftFamily
    # sharded by FSDP2
    draft: nn.Module
    head: TargetHead
    # where the features of branches come from; each is read once, so not through a store
    branches: FeatureSource
    compute: ComputeConfig

    def loss(
        self,
        batch: Replayed,
        totals: StreamTotals,
        settings: LossSettings,
        metrics: StepMetrics,
        check_replay: bool,
    ) -> Tensor:
        """A scalar with every parameter in its graph, also when nothing is supervised; what it
        measures goes into `metrics`. An empty micro-batch measures nothing and has a loss of 0.
        """
        scorer = self._scorer()
        if not batch.items:
            return self._zero(batch.hidden, scorer)
        if check_replay:
            metrics.merge(_replay_check(batch, scorer))
        whole_blocks = settings.options.response_loss in BLOCK_LOSSES
        part = self._block_loss if whole_blocks else self._token_loss
        loss = part(batch, scorer, totals, settings, metrics)
        loss = loss + self._confidence_loss(batch, totals, settings, metrics)
        return loss + batch.hidden.sum() * 0.0 + scorer.attached_zero()

    def _zero(self, hidden: Tensor, scorer: Scorer) -> Tensor:
        """Zero attached to every parameter."""
        zero = hidden.sum() * 0.0 + scorer.attached_zero()
        confidence = self.family.confidence(self.draft)
        return zero if confidence is None else zero + confidence(hidden[:0]).sum()

    def label_logprobs(self, batch: Replayed) -> list[tuple[float, ...]]:
        """The draft's log-prob of every response label, by item of the micro-batch."""
        response = batch.layout.response
        rows = slot_rows(batch.layout, response.sample, response.slot)
        values = self._scorer().logprobs(batch.hidden[rows], response.token)
        parts = values.split([len(item.plan.response_label) for item in batch.items])
        return [tuple(part.tolist()) for part in parts]

    def _scorer(self) -> Scorer:
        """After a replay, while FSDP holds the root's weights whole."""
        own = self.family.own_head(self.draft, self.head.weight)
        return Scorer(self.head, own, self.compute.lm_head_chunk_size)

    def _token_loss(
        self,
        batch: Replayed,
        scorer: Scorer,
        totals: StreamTotals,
        settings: LossSettings,
        metrics: StepMetrics,
    ) -> Tensor:
        """Both streams, token by token."""
        layout, options = batch.layout, settings.options
        values = scorer.values(layout, batch.hidden, batch.features, settings)
        loss = combine(
            values.response,
            layout.response.offset,
            values.rejected,
            layout.rejected.offset,
            totals,
            options,
        )
        metrics.merge(loss_metrics(values.response, values.rejected, loss.detach(), options))
        metrics.merge(mass_metrics(values.student_mass.detach(), layout.teacher_top.logprobs))
        return loss

    def _block_loss(
        self,
        batch: Replayed,
        scorer: Scorer,
        totals: StreamTotals,
        settings: LossSettings,
        metrics: StepMetrics,
    ) -> Tensor:
        """End-to-end total variation of whole blocks; the target also reads the rejected tokens
        (opd/chains.py).
        """
        layout, options = batch.layout, settings.options
        chains = build_chains(batch.items, layout.input_ids.shape[1], layout.input_ids.device)
        # [b*S + R*L, h]
        teacher = torch.cat(
            (scoring_hidden(batch.features, settings), self._branch_hidden(chains, settings))
        )
        rows = batch.hidden[slot_rows(layout, chains.sample, chains.slot)]  # [M, h]
        tv = scorer.divergence(rows, teacher[chains.row], "tv")  # [M]
        values, expected = end_to_end(tv, chains)  # [count] each
        none = tv.new_zeros(0)
        loss = combine(values, torch.ones_like(values), none, none, totals, options)
        metrics.merge(loss_metrics(values, none, loss.detach(), options))
        in_branches = int((chains.row >= layout.input_ids.numel()).sum())
        metrics.merge(block_metrics(expected, tv, in_branches))
        return loss

    def _branch_hidden(self, chains: Chains, settings: LossSettings) -> Tensor:
        """Last hidden states [R*L, h] of the branches, as many at once as fit the micro-batch's
        token budget.
        """
        if not self.branches.reads_branches:
            raise ConfigError(
                f"opd.response_loss={settings.options.response_loss} needs the target's features "
                "of rejected tokens, which this feature source does not provide: use another loss"
            )
        count, longest = chains.branch_ids.shape
        at_once = max(1, self.compute.max_tokens_per_micro_batch // max(1, longest))
        parts = [self.head.weight.new_zeros(0, self.head.weight.shape[1])]
        for start in range(0, count, at_once):
            some = slice(start, start + at_once)
            read = self.branches.features(chains.branch_ids[some], chains.branch_lengths[some])
            parts.append(scoring_hidden(read, settings))
        return torch.cat(parts)

    def _confidence_loss(
        self, batch: Replayed, totals: StreamTotals, settings: LossSettings, metrics: StepMetrics
    ) -> Tensor | float:
        """The confidence stream, for drafts with a confidence head; 0, still attached to the head,
        without verified proposals.
        """
        head, verified = self.family.confidence(self.draft), batch.layout.verified
        if head is None:
            return 0.0
        rows = slot_rows(batch.layout, verified.sample, verified.slot)
        logits = head(batch.hidden[rows])  # [M]
        if settings.options.confidence_weight:
            prefix = self.family.confidence_prefix
            metrics.merge(confidence_metrics(logits.detach(), verified.token, prefix))
        return confidence_loss(logits, verified.token, totals, settings.options)


def _replay_check(batch: Replayed, scorer: Scorer) -> StepMetrics:
    """Replayed choices against the engine's proposals, on an even share of the micro-batch's
    drafted slots.
    """
    drafted, device = batch.layout.drafted, batch.hidden.device
    count = len(drafted.token)
    checked = min(count, _CHECKED_SLOTS)
    some = torch.arange(checked, device=device) * count // max(1, checked)
    rows = slot_rows(batch.layout, drafted.sample[some], drafted.slot[some])
    gaps = scorer.gaps(batch.hidden.detach()[rows], drafted.token[some])
    return replay_metrics(gaps, drafted.offset[some])
