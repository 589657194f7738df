"""From a verify trace to training blocks: which anchors are replayed, which slots are supervised
with what.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from verl_opd.opd.metrics import StepMetrics
from verl_opd.opd.names import CONVENTIONS, RESPONSE_SPANS
from verl_opd.opd.options import AnchorOptions
from verl_opd.opd.trace import Rejection, RolloutSample, TeacherScores, boundaries, rejections


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """The blocks of one sample that the draft replays, and what is supervised in them.

    Slot (block n, offset j) predicts response position anchors[n] + j; see layout.py for tensor
    indices. Each of the two streams is a set of flat parallel tuples, one entry per supervised
    slot.
    """

    # B: 1 anchor slot + B-1 proposal slots
    block_size: int
    # response position per block (-1 = last prompt token), unique, ascending; N entries
    anchors: tuple[int, ...]

    # response stream, committed tokens: index into anchors
    response_block: tuple[int, ...] = ()
    # 1-based place in the block, 1..B-1
    response_offset: tuple[int, ...] = ()
    # the response's token there
    response_label: tuple[int, ...] = ()

    # rejected stream, rejected proposals: index into anchors
    rejected_block: tuple[int, ...] = ()
    # 1-based place in the block, 1..B-1
    rejected_offset: tuple[int, ...] = ()
    # what the draft proposed there
    rejected_token: tuple[int, ...] = ()
    # the target's, as the engine recorded it
    rejected_logprob: tuple[float, ...] = ()

    # per anchor, what the engine proposed, accepted or not; empty for a block it did not draft
    drafted: tuple[tuple[int, ...], ...] = ()
    # per anchor, how many proposals the target accepted and the response holds
    accepted: tuple[int, ...] = ()
    # per anchor, whether the response ended there, before a proposal was rejected
    ended: tuple[bool, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainItem:
    """What a training rank needs of one sample: token ids and its blocks."""

    # as RolloutSample.sample_id
    sample_id: str
    # token ids [P]
    prompt_ids: tuple[int, ...]
    # token ids [R]
    response_ids: tuple[int, ...]
    plan: BlockPlan
    # policy-gradient form: log-prob of every plan.response_label under the draft of the rollout
    old_logprobs: tuple[float, ...] = ()
    # policy-gradient form: the sample's part of the advantage
    reward: float = 0.0
    # a server's scores of the response, which then replace those of the trainer's target
    teacher: TeacherScores | None = None


def item_rng(seed: int, step: int, key: str) -> np.random.Generator:
    """A generator that depends only on its arguments, so that a resumed or differently split run
    draws the same.
    """
    return np.random.default_rng([seed, step, zlib.crc32(key.encode())])


def plan_opd(
    sample: RolloutSample,
    options: AnchorOptions,
    *,
    block_size: int,
    seed: int,
    autoregressive: bool,
) -> BlockPlan:
    """The blocks of one on-policy sample.

    Under the convention exact there is one block per verify step, anchored where the engine
    anchored it. Under draft_opd each segment starts at the previous segment's last token, the first
    one at the last prompt token (anchor -1). Labels of a segment reach to the end of the verify
    step: accepted proposals and the correction; a bonus token has no slot. Rejections keep their
    blocks even where the response anchor is left out. seed: of random anchors.

    autoregressive: a slot reads the proposal before it (DraftFamily.autoregressive). After the
    first rejected proposal the chain has left the response, so the response has no correct labels
    there: a drafted block's labels end with the correction, under every response_span.
    """
    if options.response_span not in RESPONSE_SPANS:
        raise ValueError(
            f"response_span={options.response_span!r} is not one of {', '.join(RESPONSE_SPANS)}"
        )
    steps, last = sample.trace.steps, len(sample.response_ids) - 1
    reaches = {step.anchor: step.accepted + 1 for step in steps} if autoregressive else {}
    spans = []
    for anchor, end in _chosen_segments(sample, options, block_size, seed):
        reach = end if options.response_span == "segment" else last
        spans.append((anchor, min(reach - anchor, block_size - 1, reaches.get(anchor, block_size))))
    return _assemble(
        block_size,
        sample.response_ids,
        spans,
        _chosen_rejections(sample, options, block_size),
        drafted={step.anchor: step.drafted[: block_size - 1] for step in steps},
        # when the response ends inside a step, the target has also verified proposals past the end;
        # a rollout never reaches those states
        accepted={
            step.anchor: min(step.accepted, step.committed, block_size - 1) for step in steps
        },
        ended={step.anchor for step in steps if step.committed <= step.accepted},
    )


def _chosen_segments(
    sample: RolloutSample, options: AnchorOptions, block_size: int, seed: int
) -> list[tuple[int, int]]:
    """(anchor, last supervised position) of the segments that stay."""
    pairs = _strided(_segments(sample, options.convention), options.response_anchor_stride)
    pairs = _subsample(pairs, options.max_response_anchors)
    if not options.random_anchors:
        return pairs
    first = 0 if options.convention == "exact" else -1
    return _scatter(sample, pairs, block_size, first, seed)


def _chosen_rejections(
    sample: RolloutSample, options: AnchorOptions, block_size: int
) -> list[Rejection]:
    rejected = [item for item in rejections(sample.trace) if item.offset < block_size]
    if options.rejected_first_only:
        rejected = list({item.anchor: item for item in reversed(rejected)}.values())[::-1]
    return rejected[: options.max_rejected_tokens or None]


def _segments(sample: RolloutSample, convention: str) -> list[tuple[int, int]]:
    """(anchor, last supervised position) of every segment."""
    length, trace = len(sample.response_ids), sample.trace
    if convention == "exact":
        return [(step.anchor, step.anchor + step.committed) for step in trace.steps]
    if convention == "draft_opd":
        ends = sorted({end for end in boundaries(trace) if 0 <= end < length})
        if ends and ends[-1] < length - 1:
            ends.append(length - 1)
        return list(zip([-1, *ends], ends, strict=False))
    raise ValueError(f"convention={convention!r} is not one of {', '.join(CONVENTIONS)}")


def _strided(pairs: list[tuple[int, int]], stride: int) -> list[tuple[int, int]]:
    return [pair for i, pair in enumerate(pairs) if i % stride == 0 or i == len(pairs) - 1]


def _scatter(
    sample: RolloutSample, pairs: Sequence[tuple[int, int]], block_size: int, first: int, seed: int
) -> list[tuple[int, int]]:
    """The segments of `pairs`, as long as their block has slots, shuffled and moved apart by random
    gaps; disjoint as before.

    The draw depends on seed and token ids alone (Draft-OPD's ablation), so any split of a batch
    gives the same anchors.
    """
    lengths = [min(end - anchor, block_size - 1) for anchor, end in pairs]
    ids = sample.prompt_ids + sample.response_ids
    rng = item_rng(
        seed, sum(position * token for position, token in enumerate(ids, start=1)), "anchors"
    )
    free = len(sample.response_ids) - 1 - first - sum(lengths)
    gaps = rng.multinomial(free, [1 / (len(lengths) + 1)] * (len(lengths) + 1)).tolist()
    cursor, moved = first, []
    for gap, index in zip(gaps, rng.permutation(len(lengths)), strict=False):
        cursor += gap
        moved.append((cursor, cursor + lengths[index]))
        cursor += lengths[index]
    return moved


def plan_sft(
    sample: RolloutSample, *, block_size: int, anchors_per_sample: int, rng: np.random.Generator
) -> BlockPlan:
    """Whole blocks at up to `anchors_per_sample` distinct uniform anchors in 0..R-2, every slot
    supervised by the response; no rejections.

    In given text, anchors and labels are generated tokens, and a block's labels end with its turn:
    no engine drafts across one.
    """
    ends = _run_ends(sample)
    candidates = np.array([anchor for anchor, end in enumerate(ends) if end > anchor], dtype=int)
    if not len(candidates):
        return BlockPlan(block_size=block_size, anchors=())
    chosen = rng.choice(
        len(candidates), size=min(anchors_per_sample, len(candidates)), replace=False
    )
    anchors = [int(candidates[i]) for i in sorted(chosen)]
    spans = [(anchor, min(block_size - 1, ends[anchor] - anchor)) for anchor in anchors]
    return _assemble(block_size, sample.response_ids, spans)


def _run_ends(sample: RolloutSample) -> list[int]:
    """Per response position, the last one of the run of generated tokens that it belongs to; -1
    outside of them.
    """
    mask = (
        sample.supervised if sample.supervised is not None else (True,) * len(sample.response_ids)
    )
    ends = [-1] * len(mask)
    for position in range(len(mask) - 1, -1, -1):
        if mask[position]:
            following = ends[position + 1] if position + 1 < len(mask) else -1
            ends[position] = max(following, position)
    return ends


def _subsample(pairs: list[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    count = len(pairs)
    if limit <= 0 or count <= limit:
        return pairs
    if limit == 1:
        return pairs[-1:]
    return [pairs[i * (count - 1) // (limit - 1)] for i in range(limit)]


def _assemble(
    block_size: int,
    response_ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    rejected: Sequence[Rejection] = (),
    drafted: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    accepted: Mapping[int, int] = MappingProxyType({}),
    ended: Set[int] = frozenset(),
) -> BlockPlan:
    """A plan from spans (anchor, number of supervised offsets, at least 1) and rejections; every
    block has one of them, or both. drafted, accepted: by anchor; ended: anchors.
    """
    anchors = tuple(sorted({anchor for anchor, _ in spans} | {item.anchor for item in rejected}))
    index = {anchor: position for position, anchor in enumerate(anchors)}
    slots = [(anchor, offset) for anchor, reach in spans for offset in range(1, reach + 1)]
    return BlockPlan(
        block_size=block_size,
        anchors=anchors,
        response_block=tuple(index[anchor] for anchor, _ in slots),
        response_offset=tuple(offset for _, offset in slots),
        response_label=tuple(response_ids[anchor + offset] for anchor, offset in slots),
        rejected_block=tuple(index[item.anchor] for item in rejected),
        rejected_offset=tuple(item.offset for item in rejected),
        rejected_token=tuple(item.token for item in rejected),
        rejected_logprob=tuple(item.logprob for item in rejected),
        drafted=tuple(drafted.get(anchor, ()) for anchor in anchors),
        accepted=tuple(accepted.get(anchor, 0) for anchor in anchors),
        ended=tuple(anchor in ended for anchor in anchors),
    )


def verified_proposals(plan: BlockPlan) -> list[tuple[int, int, bool]]:
    """(block, 1-based offset, whether it was accepted) of every proposal that the target verified:
    the accepted ones and the first rejected one.

    Later proposals of the block are left out: after a rejected proposal the target never verified
    them, and after the end of the response a rollout never reaches them.
    """
    return [
        (block, offset, offset <= accepted)
        for block, (tokens, accepted, ended) in enumerate(
            zip(plan.drafted, plan.accepted, plan.ended, strict=True)
        )
        for offset in range(1, min(accepted + (not ended), len(tokens)) + 1)
    ]


def restrict_labels(plan: BlockPlan, proposable: Set[int] | None) -> BlockPlan:
    """`plan` without the response labels that a draft with a smaller vocabulary cannot propose;
    None = it can propose all.
    """
    if proposable is None:
        return plan
    keep = [i for i, label in enumerate(plan.response_label) if label in proposable]
    return replace(
        plan,
        response_block=tuple(plan.response_block[i] for i in keep),
        response_offset=tuple(plan.response_offset[i] for i in keep),
        response_label=tuple(plan.response_label[i] for i in keep),
    )


def plan_counts(plan: BlockPlan, sample: RolloutSample) -> StepMetrics:
    """Anchor-plan counters of one sample under their dashboard names."""
    metrics, length = StepMetrics(), len(sample.response_ids)
    # Whole blocks overlap: a response token counts once, however many blocks supervise it.
    slots = zip(plan.response_block, plan.response_offset, strict=True)
    supervised = len({plan.anchors[block] + offset for block, offset in slots})
    prefix = "actor/distillation/opd_"
    metrics.add_sum(prefix + "sample_count", 1)
    metrics.add_sum(prefix + "skipped_sample_count", float(length > 0 and supervised == 0))
    metrics.add_mean(prefix + "skipped_sample_ratio", float(length > 0 and supervised == 0), 1)
    metrics.add_sum(prefix + "valid_anchor_count", len(set(plan.response_block)))
    metrics.add_sum(prefix + "effective_token_count", supervised)
    metrics.add_sum(prefix + "target_token_count", length)
    metrics.add_mean(prefix + "effective_token_ratio", supervised, length)
    metrics.add_sum(prefix + "rejected_draft_token_count", len(plan.rejected_block))
    metrics.add_mean("data/supervised_share", supervised, length)
    metrics.add_sum("perf/total_num_tokens", len(sample.prompt_ids) + length)
    if sample.trace.steps:
        metrics.add_sum(prefix + "total_reject_count", len(boundaries(sample.trace)))
    elif not sample.trace.draft_free:
        metrics.add_sum(prefix + "empty_reject_sample_count", float(length > 0))
    return metrics
