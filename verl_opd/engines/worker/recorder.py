"""Records every verify step at the sampler, per request. Nothing in this module may raise into the
engine.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# vLLM's input processor turns a caller's request id into "<id>-<8 hex characters>".
_SUFFIX = re.compile(r"^(?P<base>.+)-[0-9a-f]{8}$")
_DUMMY = ("_dummy", "dummy")
_STALE_SECONDS = 60.0  # how long the trace of a finished request waits to be collected
# a few rows stay in a CPU's cache; a GPU needs more per launch
_ROWS_AT_ONCE = 64 if torch.cuda.is_available() else 2


@dataclass
class _Step:
    """What one step adds to one request."""

    accepted: int  # leading proposals that the target accepted
    drafted: list[int]  # proposed token ids, at most K
    # float32 [rejected], still on the device: target log-probs of the rejected proposals
    logprobs: Tensor | None


@dataclass
class _Request:
    """What is recorded of one request."""

    steps: list[_Step] = field(default_factory=list)  # in the order of decoding
    touched: float = field(default_factory=lambda: time.monotonic())  # of its last step


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """One sampler call over R requests with P proposals in all, in the form of the V1 runner
    (vLLM's SpecDecodeMetadata).
    """

    req_ids: Sequence[str]  # [R] internal ids
    num_drafts: Sequence[int]  # [R] proposals per request, P in all
    draft_ids: Tensor  # int [P] proposed token ids, request after request
    sampled: Tensor  # int [R, width]: accepted proposals, one target token, then -1
    logits: Tensor  # [L, V] raw target logits
    target_rows: Tensor  # int [P] row of `logits` that verifies each proposal
    discarded: Sequence[bool]  # [R] whether the token is dropped (a prompt chunk, not the last)
    temperature: Tensor | None  # float [R]; None when all requests are greedy
    # False near max_model_len, where the runner verifies placeholders instead of proposals
    from_draft: bool = True


def accepted_count(row: Sequence[int], drafts: Sequence[int]) -> int:
    """How many leading proposals a sampled row accepts.

    Bounded by two counts: tokens before the -1 padding minus the target's own, and the prefix that
    equals the proposals. Engines that pad give the first. Samplers that fill whole rows give only
    the second, which is wrong alone where a recovered token equals a rejected proposal.
    """
    valid = sum(token != -1 for token in row)
    matching = 0
    while matching < len(drafts) and matching < len(row) and row[matching] == drafts[matching]:
        matching += 1
    return max(0, min(valid - 1, matching))


def target_logprobs(
    logits: Tensor, rows: Tensor, tokens: Tensor, temperature: Tensor | None
) -> Tensor:
    """float32 log-probs [M] of `tokens` [M] at logits[rows [M]], after dividing by the request's
    temperature [M] where that is positive.
    """
    values = torch.empty(rows.shape[0], dtype=torch.float32, device=logits.device)  # [M]
    for start in range(0, rows.shape[0], _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        chunk = logits[rows[part]].float()  # [m, V]
        if temperature is not None:
            chunk = chunk / torch.where(temperature[part] > 0, temperature[part], 1.0).unsqueeze(1)
        values[part] = torch.log_softmax(chunk, -1).gather(1, tokens[part].unsqueeze(1)).squeeze(1)
    return values


def _note_logprobs(step: StepInputs, pending: Sequence[tuple[_Step, range, int]]) -> None:
    """Add to every recorded step the target log-probs of its rejected proposals. pending: (step,
    places of these proposals among all P, row of the request).
    """
    device = step.logits.device
    places = [place for _, rejected, _ in pending for place in rejected]
    entries = torch.tensor(places, device=device)  # [M], into P
    temperature = None
    if step.temperature is not None:
        rows = [row for _, rejected, row in pending for _ in rejected]
        temperature = step.temperature[torch.tensor(rows, device=device)]  # [M]
    values = target_logprobs(
        step.logits,
        step.target_rows[entries].long(),
        step.draft_ids[entries].long(),
        temperature,
    )  # [M]
    parts = values.split([len(rejected) for _, rejected, _ in pending])
    for (noted, _, _), part in zip(pending, parts, strict=True):
        noted.logprobs = part


class VerifyRecorder:
    """Verify steps by internal request id, handed out once through `pop`.

    A request's first sampled token comes from prefill and is not an event. Every later step is one:
    (accepted, drafted ids, target log-probs of the rejected ones), or (0, [], []) when nothing was
    drafted. Where placeholders were verified instead of proposals (slots that hold -1 among them),
    every token that the step commits is a draft-free event. Counters hold what was seen and what
    failed.

    is_live: whether the engine still holds the request of an internal id. The trace of a request
    that ended without being collected (an HTTP request) is dropped after a minute.
    """

    def __init__(self, is_live: Callable[[str], bool] = lambda name: False) -> None:
        self.enabled = True
        self.seconds = 0.0  # spent in here, inside the engine's step
        self._is_live = is_live
        self._requests: dict[str, _Request] = {}
        self.counts = {
            "steps": 0,
            "verify_rows": 0,
            "draft_free_rows": 0,
            "errors": 0,
            "expired": 0,
        }
        self.last_error = ""

    def observe(self, inputs: Any) -> None:
        """`record` in the engine's own thread: calls `inputs` to build StepInputs, and never
        raises.
        """
        if not self.enabled:
            return
        started = time.perf_counter()
        try:
            self.record(inputs())
        except Exception:  # the engine must keep serving; the probe and the metrics report it
            self.counts["errors"] += 1
            self.last_error = traceback.format_exc(limit=4)
        self.seconds += time.perf_counter() - started

    def record(self, step: StepInputs) -> None:
        """Record one sampler call. One copy of small integers goes to the host; log-probs stay on
        the device until `pop`.
        """
        width, total = step.sampled.shape[1], sum(step.num_drafts)
        # [R * width + P]
        packed = torch.cat(
            (step.sampled.reshape(-1).long(), step.draft_ids[:total].long())
        ).tolist()
        drafts_flat = packed[len(step.req_ids) * width :]  # [P]
        self.counts["steps"] += 1
        pending: list[tuple[_Step, range, int]] = []  # step, its rejected proposals in P, row
        offset = 0
        for row, (req_id, count) in enumerate(zip(step.req_ids, step.num_drafts, strict=True)):
            drafts = drafts_flat[offset : offset + count]
            first, offset = offset, offset + count
            if step.discarded[row] or req_id.startswith(_DUMMY):
                continue
            request = self._requests.get(req_id)
            if request is None:
                self._requests[req_id] = _Request()
                continue
            request.touched = time.monotonic()
            accepted = accepted_count(packed[row * width : (row + 1) * width], drafts)
            if not step.from_draft or -1 in drafts:
                request.steps.extend(_Step(0, [], None) for _ in range(accepted + 1))
                self.counts["draft_free_rows"] += 1
                continue
            noted = _Step(accepted, drafts, None)
            request.steps.append(noted)
            self.counts["verify_rows" if count else "draft_free_rows"] += 1
            if accepted < count:
                pending.append((noted, range(first + accepted, first + count), row))
        if pending:
            _note_logprobs(step, pending)

    def pop(
        self, external_ids: Sequence[str]
    ) -> dict[str, list[tuple[int, list[int], list[float]]] | None]:
        """Events of finished requests by the caller's id, handed out once; None for an unknown
        id.
        """
        by_base = {match["base"]: name for name in self._requests if (match := _SUFFIX.match(name))}
        popped: dict[str, list[tuple[int, list[int], list[float]]] | None] = {}
        for external in external_ids:
            name = external if external in self._requests else by_base.get(external)
            request = self._requests.pop(name) if name is not None else None
            popped[external] = None if request is None else _events(request.steps)
        self._expire()
        return popped

    def _expire(self) -> None:
        limit = time.monotonic() - _STALE_SECONDS
        for name in [
            name
            for name, request in self._requests.items()
            if request.touched < limit and not self._is_live(name)
        ]:
            del self._requests[name]
            self.counts["expired"] += 1

    def stats(self) -> dict[str, Any]:
        return {
            **self.counts,
            "seconds": self.seconds,
            "open_requests": len(self._requests),
            "last_error": self.last_error,
        }


def _events(steps: Sequence[_Step]) -> list[tuple[int, list[int], list[float]]]:
    """Plain events of one request; all its log-probs are copied to the host at once."""
    parts = [step.logprobs for step in steps if step.logprobs is not None]
    values = iter(torch.cat(parts).tolist() if parts else [])
    return [
        (
            step.accepted,
            step.drafted,
            [] if step.logprobs is None else [next(values) for _ in range(len(step.logprobs))],
        )
        for step in steps
    ]
