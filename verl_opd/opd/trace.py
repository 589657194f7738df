"""What the engine did with the draft's proposals: verify steps, traces and rollout samples (plain records)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VerifyStep:
    """One verification of one drafted block.

    anchor: response position (0-based; 0 = the token sampled by prefill) of the block's first, already known token.
    drafted: the K proposed token ids; proposal j (1-based offset) stands at response position anchor + j.
    accepted: a, how many leading proposals the target accepted (0 <= a <= K).
    committed: tokens that entered the response, a + 1 (correction or bonus included) unless the response ended inside the block.
    refused_logprobs: natural-log target probability of every refused proposal drafted[a:], conditioned on the draft's own prefix.
    """

    anchor: int
    drafted: tuple[int, ...]
    accepted: int
    committed: int
    refused_logprobs: tuple[float, ...]

    @property
    def refused(self) -> tuple[int, ...]:
        return self.drafted[self.accepted :]


@dataclass(frozen=True)
class VerifyTrace:
    """The verify steps of one response, in order, plus the response positions committed by draft-free decode steps."""

    response_len: int
    steps: tuple[VerifyStep, ...]
    draft_free: tuple[int, ...] = ()


@dataclass(frozen=True)
class RolloutSample:
    """One finished response and how it was drafted.

    sample_id: stable name of the data row and epoch, "<epoch>-<row>"; draft_version: version of the draft that proposed the blocks;
    finish_reason: stop | length | abort, as the engine reports it.
    """

    sample_id: str
    data_source: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    trace: VerifyTrace
    draft_version: int
    finish_reason: str
