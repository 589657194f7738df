"""Per-token loss values of a micro-batch, through the LM head of the draft: the target's frozen
one, or its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_opd.drafts.base import OwnHead
from verl_opd.opd.layout import Layout, Stream, slot_rows, target_rows
from verl_opd.opd.losses import (
    FULL_VOCABULARY,
    SINGLE_TOKEN,
    LossSettings,
    clamp_values,
    policy_loss,
    topk_forward_kl,
)
from verl_opd.opd.names import TOP_K_LOSS
from verl_opd.opd.options import LossOptions
from verl_opd.targets.base import Features
from verl_opd.targets.head import TargetHead
from verl_opd.training.lm_head import (
    RowLoss,
    against_target,
    label_gaps,
    label_logprobs,
    own_logprobs,
    own_row_loss,
    row_loss,
    slot_logprobs,
)

# losses that compare more than the label's probability
_DISTRIBUTIONS = {*FULL_VOCABULARY, TOP_K_LOSS}


@dataclass(frozen=True)
class Values:
    """Per-token loss values, float32, before clamps and weights."""

    # [Mr], parallel to the response stream
    response: Tensor
    # [Mj], parallel to the rejected stream
    rejected: Tensor
    # [Mr], the draft's probability on the teacher's top tokens; empty without forward_kl_topk
    student_mass: Tensor


def scoring_hidden(features: Features, settings: LossSettings) -> Tensor:
    """[b*S, h]; the head is linear, so scaling its input scales the logits."""
    hidden = features.last_hidden.flatten(0, 1)
    temperature = settings.teacher_temperature
    return hidden if temperature == 1.0 else hidden / temperature


class Scorer:
    """Scores draft hidden states with the draft's LM head.

    Without a head of its own, that is the target's: logits are computed once, and nothing but the
    hidden rows gets a gradient. An own head is trained, and may cover a part of the vocabulary.
    Full-vocabulary losses then compare with the target restricted to that part and normalised
    again, as EAGLE-3 does; single-token losses keep the target's own probabilities.
    """

    def __init__(self, target: TargetHead, own: OwnHead | None, chunk: int) -> None:
        self._target, self._chunk = target.weight, chunk  # [V, h]
        self._trains = own is not None
        self._weight = target.weight if own is None else own.weight  # [V or Vd, h]
        self._vocabulary = None if own is None else own.vocabulary
        # [V], -1 where the draft has no id; None when it has all
        self._ids = (
            None if self._vocabulary is None else self._vocabulary.draft_ids(len(target.weight))
        )

    def values(
        self, layout: Layout, hidden: Tensor, features: Features, settings: LossSettings
    ) -> Values:
        """Loss values of both streams from hidden states [b*N*B, h] of all slots; not for losses of
        whole blocks.
        """
        options, mass = settings.options, hidden.new_zeros(0)
        teacher = scoring_hidden(features, settings)  # [b*S, h]
        if options.response_loss in _DISTRIBUTIONS:
            (student_j,) = self._student(layout, hidden, [layout.rejected])
            values, mass = self._over_distributions(layout, hidden, teacher, options)
        else:
            student_r, student_j = self._student(layout, hidden, [layout.response, layout.rejected])
            needed = options.response_loss != "cross_entropy"
            teacher_r = self._teacher_logprobs(layout, teacher) if needed else None
            values = _single_token(layout, student_r, teacher_r, options)
        rejected = SINGLE_TOKEN[options.rejected_loss](
            student_j, layout.rejected.teacher_logprob, options.log_prob_min_clamp
        )
        return Values(values, rejected, mass)

    def divergence(self, rows: Tensor, teacher_rows: Tensor, name: str) -> Tensor:
        """The full-vocabulary loss `name` [M] float32 between hidden rows [M, h] of draft and
        target.
        """
        vocabulary, head = self._vocabulary, self._target
        head = head if vocabulary is None else head[vocabulary.token_ids]
        loss = against_target(FULL_VOCABULARY[name], head)
        return self._row_loss(rows, loss, teacher_rows)[:, 0]

    def logprobs(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Log-probs [M] float32 of `tokens` [M] at hidden rows [M, h]; without gradient."""
        return label_logprobs(rows, self._weight.detach(), self._draft_ids(tokens), self._chunk)

    def gaps(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Nats [M] by which the best token of each hidden row [M, h] beats `tokens` [M]; without
        gradient.
        """
        return label_gaps(rows, self._weight.detach(), self._draft_ids(tokens), self._chunk)

    def attached_zero(self) -> Tensor:
        """0 that depends on every weight of the draft's own head."""
        return self._weight[0, 0].float() * 0.0 if self._trains else self._weight.new_zeros(())

    def _student(self, layout: Layout, hidden: Tensor, streams: Sequence[Stream]) -> list[Tensor]:
        """The draft's log-probs [M] of every stream's tokens."""
        rows = [slot_rows(layout, stream.sample, stream.slot) for stream in streams]
        if self._trains:
            # from the last to the first: in this order the head's gradients are summed
            scored = [
                own_logprobs(hidden[row], self._weight, self._draft_ids(stream.token), self._chunk)
                for row, stream in zip(reversed(rows), reversed(streams), strict=True)
            ]
            return scored[::-1]
        used, index = torch.unique(torch.cat(rows), return_inverse=True)
        tokens = torch.cat([stream.token for stream in streams])
        logprobs = slot_logprobs(hidden[used], self._weight, index, tokens, self._chunk)
        return list(logprobs.split([len(row) for row in rows]))

    def _teacher_logprobs(self, layout: Layout, teacher: Tensor) -> Tensor:
        """The teacher's log-probs [Mr] of the response labels: as a server reported them, else
        those of the target from its hidden states [b*S, h]. Blocks may overlap, so each target row
        that is needed is scored once (its label is always the next token).
        """
        if layout.response.teacher_logprob.numel():
            return layout.response.teacher_logprob
        scored, index = torch.unique(target_rows(layout), return_inverse=True)
        labels = layout.input_ids.flatten()[scored + 1]
        return label_logprobs(teacher[scored], self._target, labels, self._chunk)[index]

    def _over_distributions(
        self, layout: Layout, hidden: Tensor, teacher: Tensor, options: LossOptions
    ) -> tuple[Tensor, Tensor]:
        """Response values [Mr], and student mass [Mr] of forward_kl_topk, else empty."""
        response = layout.response
        rows = hidden[slot_rows(layout, response.sample, response.slot)]  # [Mr, h]
        if options.response_loss != TOP_K_LOSS:
            teacher_rows = teacher[target_rows(layout)]  # [Mr, h]
            values = self.divergence(rows, teacher_rows, options.response_loss)
            return values, rows.new_zeros(0)
        top = layout.teacher_top
        # a teacher's embedding may be padded further than the target's head
        ids = torch.where(top.ids < len(self._target), top.ids, -1)  # [Mr, k]
        if self._ids is not None:
            ids = torch.where(ids >= 0, self._ids[ids.clamp(min=0)], -1)
        values, mass = self._row_loss(rows, _top_k_loss(options), ids, top.logprobs).unbind(1)
        return values, mass

    def _row_loss(self, rows: Tensor, loss: RowLoss, *aligned: Tensor) -> Tensor:
        compute = own_row_loss if self._trains else row_loss
        return compute(rows, self._weight, loss, self._chunk, *aligned)

    def _draft_ids(self, tokens: Tensor) -> Tensor:
        if self._ids is None:
            return tokens
        ids = self._ids[tokens]
        if bool((ids < 0).any()):
            raise ValueError(
                f"token {int(tokens[ids < 0][0])} is supervised and not in the draft's vocabulary"
            )
        return ids


def _single_token(
    layout: Layout, student: Tensor, teacher: Tensor | None, options: LossOptions
) -> Tensor:
    """Response values [Mr] from log-probs [Mr] of the labels; in the policy-gradient form the
    detached value, negated, is the advantage.
    """
    if teacher is None:
        return -student
    values = SINGLE_TOKEN[options.response_loss](student, teacher, options.log_prob_min_clamp)
    if not options.policy_gradient:
        return values
    advantage = layout.policy.reward - clamp_values(values.detach(), options.loss_max_clamp)
    return policy_loss(student, layout.policy.old_logprob, advantage, options.clip_ratio)


def _top_k_loss(options: LossOptions) -> RowLoss:
    """[m, 2]: the loss and the student's mass, from draft logits, top ids and top log-probs."""
    return lambda logits, ids, logprobs: torch.stack(
        topk_forward_kl(logits, ids, logprobs, options.log_prob_min_clamp), dim=1
    )
