"""From a verify trace to training blocks: which anchors are replayed, which slots are supervised with what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockPlan:
    """The blocks of one sample that the draft replays, and what is supervised in them.

    block_size: B = 1 anchor slot + B-1 proposal slots. anchors: response position per block (-1 = last prompt token), unique, ascending.
    The two streams are flat parallel tuples, one entry per supervised slot; `*_block` indexes anchors, `*_offset` is 1-based (1..B-1).
    Slot (block n, offset j) predicts response position anchors[n] + j; see layout.py for tensor indices.
    response_*: committed tokens (label = the response token there). refused_*: refused proposals with the engine's target log-prob.
    """

    block_size: int
    anchors: tuple[int, ...]
    response_block: tuple[int, ...]
    response_offset: tuple[int, ...]
    response_label: tuple[int, ...]
    refused_block: tuple[int, ...]
    refused_offset: tuple[int, ...]
    refused_token: tuple[int, ...]
    refused_logprob: tuple[float, ...]


@dataclass(frozen=True)
class TrainItem:
    """What a training rank needs of one sample: token ids and its blocks."""

    sample_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    plan: BlockPlan
