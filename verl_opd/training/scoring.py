"""Per-token loss values of a micro-batch, through whichever LM head the draft has: the target's
frozen one, or its own.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from verl_opd.drafts.base import OwnHead
from verl_opd.opd.layout import Layout
from verl_opd.opd.losses import (
    FULL_VOCABULARY,
    SINGLE_TOKEN,
    LossSpec,
    clamp_values,
    policy_loss,
    topk_forward_kl,
)
from verl_opd.opd.names import TOP_K_LOSS
from verl_opd.targets.base import TargetFeatures
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


class Values(NamedTuple):
    """Per-token loss values, float32, before clamps and weights. student_mass: the draft's
    probability on the teacher's top tokens, per response value; empty for other losses than
    forward_kl_topk.
    """

    response: Tensor
    rejected: Tensor
    student_mass: Tensor


class Head(Protocol):
    """`hidden` [b*N*B, h] are the draft's hidden states of all slots, flat."""

    def values(
        self, layout: Layout, hidden: Tensor, features: TargetFeatures, spec: LossSpec
    ) -> Values:
        """Loss values of both streams; not for losses of whole blocks."""
        ...

    def top_k(self, rows: Tensor, layout: Layout, spec: LossSpec) -> tuple[Tensor, Tensor]:
        """forward_kl_topk of the response rows [M, h], and the draft's mass on the teacher's top
        tokens: [M] float32 each.
        """
        ...

    def divergence(self, rows: Tensor, teacher_rows: Tensor, name: str) -> Tensor:
        """The full-vocabulary loss `name` [M] float32 between hidden rows [M, h] of draft and
        target.
        """
        ...

    def logprobs(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Log-probs [M] float32 of `tokens` [M] at hidden rows [M, h]; without gradient."""
        ...

    def gaps(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Nats [M] by which the best token of each hidden row [M, h] beats `tokens` [M]; without
        gradient.
        """
        ...

    def attached_zero(self) -> Tensor:
        """0 that depends on every weight of the head."""
        ...


def slot_rows(layout: Layout, sample: Tensor, slot: Tensor) -> Tensor:
    """Rows of the flat hidden states."""
    return sample * (layout.anchors.shape[1] * layout.block_size) + slot


def _target_rows(layout: Layout) -> Tensor:
    return layout.response.sample * layout.input_ids.shape[1] + layout.response.target_row


def scoring_hidden(features: TargetFeatures, spec: LossSpec) -> Tensor:
    """[b*S, h]; the head is linear, so scaling its input scales the logits."""
    hidden = features.last_hidden.flatten(0, 1)
    return hidden if spec.teacher_temperature == 1.0 else hidden / spec.teacher_temperature


def _teacher_logprobs(layout: Layout, target_hidden: Tensor, head: Tensor, chunk: int) -> Tensor:
    """The teacher's log-probs of the response labels: as a server reported them, else those of the
    trainer's target. Blocks may overlap, so each target row is scored once (its label is always the
    next token).
    """
    if layout.response.teacher_logprob.numel():
        return layout.response.teacher_logprob
    scored, index = torch.unique(_target_rows(layout), return_inverse=True)
    return label_logprobs(
        target_hidden[scored], head, layout.input_ids.flatten()[scored + 1], chunk
    )[index]


def _single_token(
    layout: Layout, student: Tensor, teacher: Tensor | None, spec: LossSpec
) -> Tensor:
    """Response values from log-probs of the labels; in the policy-gradient form the detached value,
    negated, is the advantage.
    """
    if teacher is None:
        return -student
    values = SINGLE_TOKEN[spec.response_loss](student, teacher, spec.log_prob_min_clamp)
    if not spec.policy_gradient:
        return values
    advantage = layout.reward - clamp_values(values.detach(), spec.loss_max_clamp)
    return policy_loss(student, layout.old_logprob, advantage, spec.clip_ratio)


def _known_ids(top_ids: Tensor, rows: int) -> Tensor:
    """Top ids with -1 for tokens that the target's head of `rows` does not have: a teacher's
    embedding may be padded further.
    """
    return torch.where(top_ids < rows, top_ids, -1)


def _top_k_loss(spec: LossSpec) -> RowLoss:
    """[m, 2]: the loss and the student's mass, from draft logits, top ids and top log-probs."""
    return lambda logits, ids, logprobs: torch.stack(
        topk_forward_kl(logits, ids, logprobs, spec.log_prob_min_clamp), dim=1
    )


_DISTRIBUTIONS = {*FULL_VOCABULARY, TOP_K_LOSS}


def _over_distributions(
    head: Head, rows: Tensor, layout: Layout, target_hidden: Tensor, spec: LossSpec
) -> tuple[Tensor, Tensor]:
    """Response values and student mass of a loss that compares more than the
    label's probability.
    """
    if spec.response_loss == TOP_K_LOSS:
        return head.top_k(rows, layout, spec)
    return head.divergence(
        rows, target_hidden[_target_rows(layout)], spec.response_loss
    ), rows.new_zeros(0)


class FrozenHead:
    """The target's head: logits are computed once, and nothing but the hidden rows
    gets a gradient.
    """

    def __init__(self, weight: Tensor, chunk: int) -> None:
        self._weight, self._chunk = weight, chunk

    def values(
        self, layout: Layout, hidden: Tensor, features: TargetFeatures, spec: LossSpec
    ) -> Values:
        head, chunk, clamp = self._weight, self._chunk, spec.log_prob_min_clamp
        response, rejected = layout.response, layout.rejected
        row_r, row_j = (
            slot_rows(layout, response.sample, response.slot),
            slot_rows(layout, rejected.sample, rejected.slot),
        )
        target_hidden = scoring_hidden(features, spec)
        rejected_value = SINGLE_TOKEN[spec.rejected_loss]
        if spec.response_loss in _DISTRIBUTIONS:
            values, mass = _over_distributions(self, hidden[row_r], layout, target_hidden, spec)
            used, index = torch.unique(row_j, return_inverse=True)
            rejected_s = slot_logprobs(hidden[used], head, index, rejected.token, chunk)
            return Values(values, rejected_value(rejected_s, rejected.teacher_logprob, clamp), mass)
        used, index = torch.unique(torch.cat((row_r, row_j)), return_inverse=True)
        student = slot_logprobs(
            hidden[used], head, index, torch.cat((response.token, rejected.token)), chunk
        )
        student_r, student_j = student.split((len(row_r), len(row_j)))
        teacher = (
            None
            if spec.response_loss == "cross_entropy"
            else _teacher_logprobs(layout, target_hidden, head, chunk)
        )
        values = _single_token(layout, student_r, teacher, spec)
        return Values(
            values, rejected_value(student_j, rejected.teacher_logprob, clamp), hidden.new_zeros(0)
        )

    def top_k(self, rows: Tensor, layout: Layout, spec: LossSpec) -> tuple[Tensor, Tensor]:
        ids = _known_ids(layout.top_ids, len(self._weight))
        values, mass = row_loss(
            rows, self._weight, _top_k_loss(spec), self._chunk, ids, layout.top_logprobs
        ).unbind(1)
        return values, mass

    def divergence(self, rows: Tensor, teacher_rows: Tensor, name: str) -> Tensor:
        return row_loss(
            rows,
            self._weight,
            against_target(FULL_VOCABULARY[name], self._weight),
            self._chunk,
            teacher_rows,
        )[:, 0]

    def logprobs(self, rows: Tensor, tokens: Tensor) -> Tensor:
        return label_logprobs(rows, self._weight, tokens, self._chunk)

    def gaps(self, rows: Tensor, tokens: Tensor) -> Tensor:
        return label_gaps(rows, self._weight, tokens, self._chunk)

    def attached_zero(self) -> Tensor:
        return self._weight.new_zeros(())


class TrainableHead:
    """The draft's own head, possibly over a part of the vocabulary. Full-vocabulary losses compare
    with the target restricted to that part and normalised again, as EAGLE-3 does; single-token
    losses keep the target's own probabilities.
    """

    def __init__(self, own: OwnHead, target_head: Tensor, chunk: int) -> None:
        self._weight, self._target_head, self._chunk = own.weight, target_head, chunk
        vocabulary = own.vocabulary
        self._ids = None if vocabulary is None else vocabulary.draft_ids(target_head.shape[0])
        self._vocabulary = vocabulary

    def _draft_ids(self, tokens: Tensor) -> Tensor:
        if self._ids is None:
            return tokens
        ids = self._ids[tokens]
        if bool((ids < 0).any()):
            raise ValueError(
                f"token {int(tokens[ids < 0][0])} is supervised and not in the draft's vocabulary"
            )
        return ids

    def values(
        self, layout: Layout, hidden: Tensor, features: TargetFeatures, spec: LossSpec
    ) -> Values:
        response, rejected, clamp = layout.response, layout.rejected, spec.log_prob_min_clamp
        row_r, row_j = (
            slot_rows(layout, response.sample, response.slot),
            slot_rows(layout, rejected.sample, rejected.slot),
        )
        target_hidden = scoring_hidden(features, spec)
        student_j = own_logprobs(
            hidden[row_j], self._weight, self._draft_ids(rejected.token), self._chunk
        )
        mass = hidden.new_zeros(0)
        if spec.response_loss in _DISTRIBUTIONS:
            values, mass = _over_distributions(self, hidden[row_r], layout, target_hidden, spec)
        else:
            student_r = own_logprobs(
                hidden[row_r], self._weight, self._draft_ids(response.token), self._chunk
            )
            wants_teacher = spec.response_loss != "cross_entropy"
            teacher = (
                _teacher_logprobs(layout, target_hidden, self._target_head, self._chunk)
                if wants_teacher
                else None
            )
            values = _single_token(layout, student_r, teacher, spec)
        return Values(
            values,
            SINGLE_TOKEN[spec.rejected_loss](student_j, rejected.teacher_logprob, clamp),
            mass,
        )

    def top_k(self, rows: Tensor, layout: Layout, spec: LossSpec) -> tuple[Tensor, Tensor]:
        known = _known_ids(layout.top_ids, len(self._target_head))
        ids = (
            known
            if self._ids is None
            else torch.where(known >= 0, self._ids[known.clamp(min=0)], -1)
        )
        values, mass = own_row_loss(
            rows, self._weight, _top_k_loss(spec), self._chunk, ids, layout.top_logprobs
        ).unbind(1)
        return values, mass

    def divergence(self, rows: Tensor, teacher_rows: Tensor, name: str) -> Tensor:
        teacher = (
            self._target_head
            if self._vocabulary is None
            else self._target_head[self._vocabulary.token_ids]
        )
        return own_row_loss(
            rows,
            self._weight,
            against_target(FULL_VOCABULARY[name], teacher),
            self._chunk,
            teacher_rows,
        )[:, 0]

    def logprobs(self, rows: Tensor, tokens: Tensor) -> Tensor:
        return label_logprobs(rows, self._weight.detach(), self._draft_ids(tokens), self._chunk)

    def gaps(self, rows: Tensor, tokens: Tensor) -> Tensor:
        return label_gaps(rows, self._weight.detach(), self._draft_ids(tokens), self._chunk)

    def attached_zero(self) -> Tensor:
        return self._weight[0, 0].float() * 0.0
