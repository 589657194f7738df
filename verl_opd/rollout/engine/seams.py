"""Where the recorder and the drafting switch attach to a live V1 model runner (vLLM v1/worker/gpu_model_runner.py and its subclasses)."""

from __future__ import annotations

from typing import Any

from verl_opd.rollout.engine.recorder import StepInputs, VerifyRecorder

_LOSSY = ("synthetic", "block")


def owner_of(runner: Any, name: str) -> type:
    """The class in the runner's MRO that defines `name`: a subclass may override it, and only that one is called. RuntimeError without any."""
    for cls in type(runner).__mro__:
        if name in cls.__dict__:
            return cls
    raise RuntimeError(f"{type(runner).__name__} has no {name}: its verify steps cannot be recorded (V1 model runners can)")


class DraftingSwitch:
    """Wraps the runner's `propose_draft_token_ids`: turns proposals off and on, and knows whether the last step had any.

    Off, the engine decodes the target alone, at its own speed. Only with synchronous scheduling: an asynchronous scheduler has already reserved the
    proposals' slots. Switch with no request in flight and reset the prefix cache afterwards, because the draft's context KV is not written while
    it is off.
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
        """Whether the switch now stands as asked."""
        if self._can_stop:
            self._enabled = enabled
        return self._enabled == enabled

    def take_proposed(self) -> bool:
        """Whether the drafter ran since the last call. Near max_model_len the runner skips it and lets the scheduler verify zeros."""
        proposed, self._proposed = self._proposed, False
        return proposed


def attach_recorder(runner: Any, recorder: VerifyRecorder, switch: DraftingSwitch) -> str:
    """Wrap the runner's `_sample(logits, spec_decode_metadata)` on this instance; returns the qualified name of what was wrapped.

    RuntimeError when the runner has no such seam, or verifies in a lossy mode whose steps would not be what the target alone would say.
    """
    owner = owner_of(runner, "_sample")
    method = getattr(getattr(runner, "speculative_config", None), "rejection_sample_method", None)
    if method in _LOSSY:
        raise RuntimeError(
            f"speculative_config.rejection_sample_method={method!r} is lossy: recorded steps would be off the target's distribution"
        )
    inner = runner._sample

    def sample(logits: Any, spec_decode_metadata: Any) -> Any:
        output = inner(logits, spec_decode_metadata)
        from_draft = switch.take_proposed()
        recorder.observe(lambda: _inputs(runner, logits, spec_decode_metadata, output, from_draft))
        return output

    runner._sample = sample
    return f"{owner.__name__}._sample"


def _inputs(runner: Any, logits: Any, metadata: Any, output: Any, from_draft: bool) -> StepInputs:
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
        discarded=runner.discard_request_mask.np[:count].tolist(),
        temperature=None if sampling.all_greedy else sampling.temperature,
        from_draft=from_draft,
    )
