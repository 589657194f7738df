"""Where the recorder and the drafting switch attach to a live V1 model runner (vLLM v1/worker/gpu_model_runner.py and its subclasses)."""

from __future__ import annotations

from typing import Any

from verl_opd.rollout.engine.recorder import StepInputs, VerifyRecorder

_LOSSY = ("synthetic", "block")


def owner_of(runner: Any, name: str) -> type | None:
    """The class in the runner's MRO that defines `name`: a subclass may override it, and only that one is called."""
    return next((cls for cls in type(runner).__mro__ if name in cls.__dict__), None)


def attach_recorder(runner: Any, recorder: VerifyRecorder) -> str:
    """Wrap the runner's `_sample(logits, spec_decode_metadata)` on this instance; returns the qualified name of what was wrapped.

    RuntimeError when the runner has no such seam, or verifies in a lossy mode whose steps would not be what the target alone would say.
    """
    owner = owner_of(runner, "_sample")
    if owner is None:
        raise RuntimeError(f"{type(runner).__name__} has no _sample: its verify steps cannot be recorded (V1 model runners can)")
    method = getattr(getattr(runner, "speculative_config", None), "rejection_sample_method", None)
    if method in _LOSSY:
        raise RuntimeError(
            f"speculative_config.rejection_sample_method={method!r} is lossy: recorded steps would be off the target's distribution"
        )
    inner = runner._sample

    def sample(logits: Any, spec_decode_metadata: Any) -> Any:
        output = inner(logits, spec_decode_metadata)
        recorder.observe(lambda: _inputs(runner, logits, spec_decode_metadata, output))
        return output

    runner._sample = sample
    return f"{owner.__name__}._sample"


def _inputs(runner: Any, logits: Any, metadata: Any, output: Any) -> StepInputs:
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
    )


class DraftingSwitch:
    """Turns proposals off and on. Off, the engine decodes the target alone, at its own speed.

    Only with synchronous scheduling: an asynchronous scheduler has already reserved the proposals' slots. Switch with no request in flight and
    reset the prefix cache afterwards, because the draft's context KV is not written while it is off.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._inner = runner.propose_draft_token_ids
        self.possible = not getattr(runner, "use_async_scheduling", True)
        self.enabled = True
        if self.possible:
            runner.propose_draft_token_ids = self._propose

    def _propose(self, *args: Any, **kwargs: Any) -> Any:
        if self.enabled:
            return self._inner(*args, **kwargs)
        self._runner._draft_probs = None
        return [[] for _ in self._runner.input_batch.req_ids]

    def set(self, enabled: bool) -> bool:
        """Whether the switch now stands as asked."""
        if self.possible:
            self.enabled = enabled
        return self.enabled == enabled
