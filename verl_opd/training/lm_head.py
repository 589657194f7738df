"""The frozen LM head on the rows that are needed, a chunk at a time: full logits of a micro-batch
never exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def _logits(rows: Tensor, weight: Tensor) -> Tensor:
    """float32 logits [m, V] of hidden rows [m, h]; the product runs in the head's dtype, as in the
    engine.
    """
    return (rows.to(weight.dtype) @ weight.T).float()


@torch.no_grad()
def label_logprobs(rows: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Log-probs [M] float32 of `labels` [M] under softmax(rows [M, h] @ weight.T [h, V])."""
    parts = []
    for part, label in zip(rows.split(chunk), labels.split(chunk), strict=True):
        logits = _logits(part, weight)
        parts.append(logits.gather(1, label.unsqueeze(1)).squeeze(1) - logits.logsumexp(1))
    return torch.cat(parts) if parts else rows.new_zeros(0, dtype=torch.float32)


@torch.no_grad()
def label_gaps(rows: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """How far below each row's most likely token its label lies, in nats [M] float32; 0 = the label
    is the greedy choice.
    """
    parts = []
    for part, label in zip(rows.split(chunk), labels.split(chunk), strict=True):
        logits = _logits(part, weight)
        parts.append(logits.amax(1) - logits.gather(1, label.unsqueeze(1)).squeeze(1))
    return torch.cat(parts) if parts else rows.new_zeros(0, dtype=torch.float32)


class _SlotLogprobs(torch.autograd.Function):
    """Log-probs of several (row, label) entries.

    The gradient of log q(label) in the hidden row is W[label] - E_q[W], so the expectation taken in
    forward is all that backward needs: logits are computed once. Each row's first label is kept out
    of the stored expectation, where q near 1 would cancel in low precision.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, index: Tensor, labels: Tensor, chunk: int
    ) -> Tensor:
        first = torch.zeros(rows.shape[0], dtype=torch.long, device=rows.device).scatter_(
            0, index, labels
        )
        values = torch.empty(index.shape[0], dtype=torch.float32, device=rows.device)
        others = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        first_prob = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
        for start in range(0, rows.shape[0], chunk):
            stop = min(start + chunk, rows.shape[0])
            log_q = _logits(rows[start:stop], weight)
            log_q.sub_(log_q.logsumexp(1, keepdim=True))
            here = ((index >= start) & (index < stop)).nonzero().squeeze(1)
            values[here] = log_q[index[here] - start, labels[here]]
            primary = first[start:stop].unsqueeze(1)
            q = log_q.exp_()
            first_prob[start:stop] = q.gather(1, primary).squeeze(1)
            others[start:stop] = (q.scatter_(1, primary, 0.0).to(weight.dtype) @ weight).float()
        ctx.save_for_backward(weight, index, labels, first, first_prob, others)
        ctx.dtype = rows.dtype
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        weight, index, labels, first, first_prob, others = ctx.saved_tensors
        grad = grad.float()
        mass = torch.zeros_like(first_prob).index_add_(0, index, grad)
        on_first = torch.zeros_like(mass).index_add_(0, index, grad * (labels == first[index]))
        out = weight[first].float() * (on_first - mass * first_prob).unsqueeze(
            1
        ) - others * mass.unsqueeze(1)
        elsewhere = (labels != first[index]).nonzero().squeeze(1)
        out.index_add_(
            0, index[elsewhere], weight[labels[elsewhere]].float() * grad[elsewhere].unsqueeze(1)
        )
        return out.to(ctx.dtype), None, None, None, None


def slot_logprobs(
    rows: Tensor, weight: Tensor, index: Tensor, labels: Tensor, chunk: int
) -> Tensor:
    """Log-probs [M] float32 of `labels` [M] at rows[index [M]] of `rows` [U, h], with gradient into
    `rows`; the head is frozen.

    Each of the U rows is scored once however many entries share it (a correction label and a
    rejected token do).
    """
    values: Tensor = _SlotLogprobs.apply(rows, weight, index, labels, chunk)  # type: ignore[no-untyped-call]
    return values


RowLoss = Callable[..., Tensor]


class _RowLoss(torch.autograd.Function):
    """A loss per row. Its gradient in the draft's logits is carried to the hidden row already in
    forward, chunk by chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, loss: RowLoss, chunk: int, *aligned: Tensor
    ) -> Tensor:
        parts = []
        slope = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        for start in range(0, rows.shape[0], chunk):
            piece = slice(start, start + chunk)
            with torch.enable_grad():
                logits = _logits(rows[piece], weight).requires_grad_()
                part = loss(logits, *(tensor[piece] for tensor in aligned))
                (gradient,) = torch.autograd.grad(part[:, 0].sum(), logits)
            parts.append(part.detach())
            slope[piece] = (gradient.to(weight.dtype) @ weight).float()
        ctx.save_for_backward(slope)
        ctx.dtype, ctx.aligned = rows.dtype, len(aligned)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (slope,) = ctx.saved_tensors
        return (slope * grad[:, :1].float()).to(ctx.dtype), None, None, None, *[None] * ctx.aligned


def row_loss(rows: Tensor, weight: Tensor, loss: RowLoss, chunk: int, *aligned: Tensor) -> Tensor:
    """loss(draft logits [m, V], rows of `aligned` [m, ...]) -> [m, c] for hidden rows [M, h]: [M,
    c] float32, gradient of column 0 into `rows`.

    The head `weight` [V, h] is frozen; the columns after the first are measurements.
    """
    if not rows.shape[0]:  # keeps its graph and its number of columns
        return loss(_logits(rows, weight), *aligned)
    values: Tensor = _RowLoss.apply(rows, weight, loss, chunk, *aligned)  # type: ignore[no-untyped-call]
    return values


def _in_chunks(part: Callable[..., Tensor], chunk: int, weight: Tensor, *rows: Tensor) -> Tensor:
    """part(weight, *rows of a chunk) over all chunks, logits recomputed in backward: they never
    exist for a whole micro-batch.
    """
    if not rows[0].shape[0]:
        return part(weight, *rows)
    pieces = zip(*(tensor.split(chunk) for tensor in rows), strict=True)
    return torch.cat([checkpoint(part, weight, *piece, use_reentrant=False) for piece in pieces])


def own_logprobs(rows: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Log-probs [M] float32 of `labels` [M] at hidden rows [M, h] under a trainable head [Vd, h];
    gradient into rows and head.
    """

    def part(weight: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        return torch.log_softmax(_logits(rows, weight), 1).gather(1, labels.unsqueeze(1)).squeeze(1)

    return _in_chunks(part, chunk, weight, rows, labels)


def own_row_loss(
    rows: Tensor, weight: Tensor, loss: RowLoss, chunk: int, *aligned: Tensor
) -> Tensor:
    """`row_loss` with a trainable head [Vd, h]: gradient into rows and head."""

    def part(weight: Tensor, rows: Tensor, *aligned: Tensor) -> Tensor:
        return loss(_logits(rows, weight), *aligned)

    return _in_chunks(part, chunk, weight, rows, *aligned)


def against_target(divergence: Callable[[Tensor, Tensor], Tensor], head: Tensor) -> RowLoss:
    """A row loss that compares with the target: divergence(draft logits [m, V], target logits [m,
    V]) of the target's hidden rows [m, h].
    """
    return lambda logits, teacher_rows: divergence(logits, _logits(teacher_rows, head)).unsqueeze(1)
