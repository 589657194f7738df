"""Where the recorder and the drafting switch attach to a live model runner. Features of the runner
decide between V1 and V2.

V1 (vLLM v1/worker/gpu_model_runner.py, its CPU subclass, vllm-ascend's NPUModelRunner):
`_sample(logits, spec_decode_metadata)` pads rows with -1. V2 (vLLM v1/worker/gpu/model_runner.py):
`sample(hidden_states, input_batch, grammar_output)` computes logits inside and leaves garbage after
the tokens that `num_sampled` counts.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from verl_opd.engines.worker.recorder import StepInputs, VerifyRecorder

_LOSSY = ("synthetic", "block")
_LOSSY_ASCEND = ("enable_block_verify", "enable_entropy_verify")


class Switch(Protocol):
    def set(self, enabled: bool) -> bool:
        """Turn proposals on or off; whether that worked."""
        ...


def owner_of(runner: Any, name: str) -> type:
    """The class in the runner's MRO that defines `name`: only the first one is called.
    RuntimeError when there is none.
    """
    for cls in type(runner).__mro__:
        if name in cls.__dict__:
            return cls
    raise RuntimeError(
        f"{type(runner).__name__} has no {name}: its verify steps cannot be recorded"
    )


def reject_lossy(runner: Any) -> None:
    """RuntimeError for verification modes whose steps do not follow the target's distribution, or
    whose logits hold only a part of a row.
    """
    method = getattr(getattr(runner, "speculative_config", None), "rejection_sample_method", None)
    if method in _LOSSY:
        raise RuntimeError(
            f"speculative_config.rejection_sample_method={method!r} is lossy: recorded steps would "
            "not follow the target's distribution; remove it"
        )
    ascend = getattr(runner, "ascend_config", None)
    modes = getattr(ascend, "rejection_sampler_config", None)
    on = [name for name in _LOSSY_ASCEND if getattr(modes, name, False)]
    if on:
        raise RuntimeError(
            f"rejection_sampler_config.{on[0]} is lossy: recorded steps would not follow the "
            "target's distribution; switch it off"
        )
    if getattr(ascend, "enable_reduce_sample", False):
        raise RuntimeError(
            "enable_reduce_sample leaves logits split over tensor-parallel ranks: target log-probs "
            "would be wrong; switch it off"
        )
    if getattr(runner, "batch_sharder", None) is not None:
        raise RuntimeError(
            "sampling is split over tensor-parallel ranks (batch_sharder): each recorder would see "
            "only a part of the requests; switch it off"
        )


class DraftingSwitch:
    """Wraps a V1 runner's `propose_draft_token_ids`: turns proposals off and on, and remembers
    whether the last step had any.

    While off, the engine decodes the target alone, at the target's speed. This needs synchronous
    scheduling: an asynchronous scheduler has already reserved the proposals' slots. Switch with no
    request in flight and reset the prefix cache afterwards, because the draft's context KV is not
    written while drafting is off.
    """

    def __init__(self, runner: Any) -> None:
        self.owner = owner_of(runner, "propose_draft_token_ids")
        self._runner = runner
        self._inner = runner.propose_draft_token_ids
        self._can_stop = not getattr(runner, "use_async_scheduling", True)
        self._enabled = True
        self._proposed = False
        runner.propose_draft_token_ids = self._propose

    def _propose(self, *args: Any, **kwargs: Any) -> Any:
        if self._enabled:
            self._proposed = True
            return self._inner(*args, **kwargs)
        return [[] for _ in self._runner.input_batch.req_ids]

    def set(self, enabled: bool) -> bool:
        if self._can_stop:
            self._enabled = enabled
        return self._enabled == enabled

    def take_proposed(self) -> bool:
        """Whether the drafter ran since the last call. Near max_model_len the runner skips it and
        lets the scheduler verify zeros.
        """
        proposed, self._proposed = self._proposed, False
        return proposed


class AlwaysDrafting:
    """A V2 runner schedules asynchronously: its proposals cannot be stopped between
    two rollouts.
    """

    def set(self, enabled: bool) -> bool:
        return enabled


def attach(runner: Any, recorder: VerifyRecorder) -> tuple[str, Switch]:
    """Hook the recorder into the sampler of this live runner; returns (qualified name of the
    wrapped method, switch). RuntimeError when the runner has no such method, or verifies in a way
    that cannot be recorded.
    """
    reject_lossy(runner)
    if any("_sample" in cls.__dict__ for cls in type(runner).__mro__):
        return _attach_v1(runner, recorder)
    return _attach_v2(runner, recorder)


def _attach_v1(runner: Any, recorder: VerifyRecorder) -> tuple[str, Switch]:
    switch = DraftingSwitch(runner)
    owner, inner = owner_of(runner, "_sample"), runner._sample

    def sample(logits: Any, spec_decode_metadata: Any) -> Any:
        output = inner(logits, spec_decode_metadata)
        from_draft = switch.take_proposed()
        recorder.observe(
            lambda: _v1_inputs(runner, logits, spec_decode_metadata, output, from_draft)
        )
        return output

    runner._sample = sample
    return f"{owner.__name__}._sample", switch


def _v1_inputs(
    runner: Any, logits: Any, metadata: Any, output: Any, from_draft: bool
) -> StepInputs:
    batch = runner.input_batch
    count = batch.num_reqs
    sampling = batch.sampling_metadata
    sampled = output.sampled_token_ids
    drafted = metadata is not None
    return StepInputs(
        req_ids=batch.req_ids[:count],
        num_drafts=list(metadata.num_draft_tokens)[:count] if drafted else [0] * count,
        draft_ids=metadata.draft_token_ids if drafted else sampled.new_zeros(0),
        sampled=sampled[:count],
        logits=logits,
        target_rows=metadata.target_logits_indices if drafted else sampled.new_zeros(0),
        discarded=_discarded(runner, count),
        temperature=None if sampling.all_greedy else sampling.temperature,
        from_draft=from_draft,
    )


def _discarded(runner: Any, count: int) -> list[bool]:
    """Rows of prompt chunks that are not the last, from a mask or from vllm-ascend's older list of
    indices.
    """
    mask = getattr(runner, "discard_request_mask", None)
    if mask is not None:
        flags: list[bool] = mask.np[:count].tolist()
        return flags
    indices = set(runner.discard_request_indices.np[: runner.num_discarded_requests].tolist())
    return [row in indices for row in range(count)]


class _KeepsLogits:
    """Wraps V2's rejection sampler and keeps the raw logits of the step. The sampler does not
    change them: it copies before processing.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.logits: Tensor | None = None

    def __call__(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.logits = logits
        return self._inner(logits, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _attach_v2(runner: Any, recorder: VerifyRecorder) -> tuple[str, Switch]:
    owner, inner = owner_of(runner, "sample"), runner.sample
    sampler = getattr(runner, "rejection_sampler", None)
    if sampler is None:
        raise RuntimeError(
            f"{type(runner).__name__} has no rejection_sampler: it was started without a "
            "speculative_config"
        )
    if getattr(sampler, "enable_adaptive_verification", False):
        raise RuntimeError(
            "adaptive verification compacts logits rows, which the recorder does not support: "
            "switch it off"
        )
    keeper = runner.rejection_sampler = _KeepsLogits(sampler)

    def sample(hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        keeper.logits = None
        result = inner(hidden_states, input_batch, grammar_output)
        recorder.observe(
            lambda: _v2_inputs(runner, input_batch, keeper.logits, result[0], result[1])
        )
        return result

    runner.sample = sample
    return f"{owner.__name__}.sample", AlwaysDrafting()


def _v2_inputs(
    runner: Any, batch: Any, logits: Tensor | None, output: Any, num_sampled: Tensor
) -> StepInputs:
    """Request r owns logits rows cu[r]..cu[r+1]-1; row cu[r]+j verifies the token that row
    cu[r]+j+1 was computed from.
    """
    count, sampled = batch.num_reqs, output.sampled_token_ids
    per_request = batch.num_draft_tokens_per_req
    drafts = (
        [0] * count
        if logits is None or per_request is None
        else [int(n) for n in per_request[:count]]
    )
    first = [int(start) for start in batch.cu_num_logits_np[:count]]
    rows = [start + j for start, n in zip(first, drafts, strict=True) for j in range(n)]
    target_rows = torch.tensor(rows, dtype=torch.long, device=sampled.device)  # [P]
    columns = torch.arange(sampled.shape[1], device=sampled.device)  # [width]
    temperature = runner.sampler.sampling_states.temperature.gpu[batch.idx_mapping[:count]]  # [R]
    return StepInputs(
        req_ids=batch.req_ids[:count],
        num_drafts=drafts,
        draft_ids=batch.input_ids[batch.logits_indices[target_rows + 1]],
        sampled=sampled[:count].masked_fill(columns >= num_sampled[:count].unsqueeze(1), -1),
        logits=sampled.new_zeros(0, 1) if logits is None else logits,
        target_rows=target_rows,
        discarded=[bool(n) for n in (num_sampled[:count] == 0).tolist()],
        temperature=temperature,
    )
