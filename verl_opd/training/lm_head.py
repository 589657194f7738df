"""The frozen LM head on the rows that are needed, a chunk at a time: full logits of a micro-batch never exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def _logits(rows: Tensor, weight: Tensor) -> Tensor:
    """float32 logits [m, V] of hidden rows [m, h]; the product runs in the head's dtype, as in the engine."""
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
    """How far below each row's most likely token its label lies, in nats [M] float32; 0 = the label is the greedy choice."""
    parts = []
    for part, label in zip(rows.split(chunk), labels.split(chunk), strict=True):
        logits = _logits(part, weight)
        parts.append(logits.amax(1) - logits.gather(1, label.unsqueeze(1)).squeeze(1))
    return torch.cat(parts) if parts else rows.new_zeros(0, dtype=torch.float32)


class _SlotLogprobs(torch.autograd.Function):
    """Log-probs of several (row, label) entries.

    The gradient of log q(label) in the hidden row is W[label] - E_q[W], so the expectation taken in forward is all that backward needs: logits
    are computed once. Each row's first label is kept out of the stored expectation, where q near 1 would cancel in low precision.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, index: Tensor, labels: Tensor, chunk: int) -> Tensor:
        first = torch.zeros(rows.shape[0], dtype=torch.long, device=rows.device).scatter_(0, index, labels)
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
        out = weight[first].float() * (on_first - mass * first_prob).unsqueeze(1) - others * mass.unsqueeze(1)
        elsewhere = (labels != first[index]).nonzero().squeeze(1)
        out.index_add_(0, index[elsewhere], weight[labels[elsewhere]].float() * grad[elsewhere].unsqueeze(1))
        return out.to(ctx.dtype), None, None, None, None


def slot_logprobs(rows: Tensor, weight: Tensor, index: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Log-probs [M] float32 of `labels` [M] at rows[index [M]] of `rows` [U, h], with gradient into `rows`; the head is frozen.

    Each of the U rows is scored once however many entries share it (a correction label and a refused token do).
    """
    values: Tensor = _SlotLogprobs.apply(rows, weight, index, labels, chunk)  # type: ignore[no-untyped-call]
    return values


class _RowDivergence(torch.autograd.Function):
    """A divergence per row. Its gradient in the draft's logits is carried to the hidden row already in forward, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, teacher_rows: Tensor, weight: Tensor, divergence: Callable[[Tensor, Tensor], Tensor], chunk: int
    ) -> Tensor:
        values = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
        slope = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        for start in range(0, rows.shape[0], chunk):
            stop = start + chunk
            with torch.enable_grad():
                logits = _logits(rows[start:stop], weight).requires_grad_()
                part = divergence(logits, _logits(teacher_rows[start:stop], weight))
                (gradient,) = torch.autograd.grad(part.sum(), logits)
            values[start:stop] = part.detach()
            slope[start:stop] = (gradient.to(weight.dtype) @ weight).float()
        ctx.save_for_backward(slope)
        ctx.dtype = rows.dtype
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        (slope,) = ctx.saved_tensors
        return (slope * grad.float().unsqueeze(1)).to(ctx.dtype), None, None, None, None


def row_divergence(
    rows: Tensor, teacher_rows: Tensor, weight: Tensor, divergence: Callable[[Tensor, Tensor], Tensor], chunk: int
) -> Tensor:
    """divergence(draft logits [m, V], target logits [m, V]) -> [m] for hidden rows [M, h] of both: [M] float32, gradient into `rows` only."""
    values: Tensor = _RowDivergence.apply(rows, teacher_rows, weight, divergence, chunk)  # type: ignore[no-untyped-call]
    return values


def _in_chunks(part: Callable[..., Tensor], chunk: int, weight: Tensor, *rows: Tensor) -> Tensor:
    """part(weight, *rows of a chunk) over all chunks, logits recomputed in backward: they never exist for a whole micro-batch."""
    pieces = zip(*(tensor.split(chunk) for tensor in rows), strict=True)
    values = [checkpoint(part, weight, *piece, use_reentrant=False) for piece in pieces]
    return torch.cat(values) if rows[0].shape[0] else rows[0].sum(-1).float()


def own_logprobs(rows: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Log-probs [M] float32 of `labels` [M] at hidden rows [M, h] under a trainable head [Vd, h]; gradient into rows and head."""

    def part(weight: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        return torch.log_softmax(_logits(rows, weight), 1).gather(1, labels.unsqueeze(1)).squeeze(1)

    return _in_chunks(part, chunk, weight, rows, labels)


def own_row_divergence(
    rows: Tensor, weight: Tensor, teacher_rows: Tensor, teacher_weight: Tensor, divergence: Callable[[Tensor, Tensor], Tensor], chunk: int
) -> Tensor:
    """divergence(draft logits, target logits) [M] float32 between a trainable head [Vd, h] and the frozen one restricted to the same tokens."""

    def part(weight: Tensor, rows: Tensor, teacher_rows: Tensor) -> Tensor:
        return divergence(_logits(rows, weight), _logits(teacher_rows, teacher_weight))

    return _in_chunks(part, chunk, weight, rows, teacher_rows)
