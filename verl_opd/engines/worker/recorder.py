"""Notes every verify step at the sampler seam, per request. Nothing in here may raise into the
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
_ROWS_AT_ONCE = (
    2 if not torch.cuda.is_available() else 64
)  # a few rows stay in cache on a CPU; a GPU wants more per launch


@dataclass
class _Step:
    """What one step adds to one request; `logprobs` is a slice of a tensor still on the device."""

    accepted: int
    drafted: list[int]
    logprobs: Tensor | None


@dataclass
class _Request:
    steps: list[_Step] = field(default_factory=list)
    touched: float = field(default_factory=lambda: time.monotonic())


@dataclass(frozen=True)
class StepInputs:
    """One sampler call, as the V1 runner sees it (SpecDecodeMetadata of vLLM).

    req_ids: internal ids, one per row. num_drafts: proposals per row. draft_ids [sum]: flattened by
    row. sampled [rows, width]: accepted proposals, one target token, then -1. logits [L, V]: raw
    target logits; target_rows [sum]: row of `logits` that verifies each proposal. discarded: rows
    whose token is thrown away (a prompt chunk that is not the last). temperature [rows] or None
    when all rows are greedy. from_draft: whether the draft made the proposals; near max_model_len
    the runner has placeholders verified instead.
    """

    req_ids: Sequence[str]
    num_drafts: Sequence[int]
    draft_ids: Tensor
    sampled: Tensor
    logits: Tensor
    target_rows: Tensor
    discarded: Sequence[bool]
    temperature: Tensor | None
    from_draft: bool = True


def accepted_count(row: Sequence[int], drafts: Sequence[int]) -> int:
    """How many leading proposals a sampled row accepts.

    Bounded by both signals: tokens before the -1 padding minus the target's own, and the prefix
    that matches the proposals. Engines that pad give the first; samplers that fill whole rows only
    give the second; a recovered token equal to a rejected proposal fools the second alone.
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
    values = torch.empty(rows.shape[0], dtype=torch.float32, device=logits.device)
    for start in range(0, rows.shape[0], _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        chunk = logits[rows[part]].float()
        if temperature is not None:
            chunk = chunk / torch.where(temperature[part] > 0, temperature[part], 1.0).unsqueeze(1)
        values[part] = torch.log_softmax(chunk, -1).gather(1, tokens[part].unsqueeze(1)).squeeze(1)
    return values


class VerifyRecorder:
    """Verify steps by internal request id, handed out once through `pop`.

    A request's first sampled token comes from prefill and is no event; every later step is one:
    (accepted, drafted ids, target log-probs of the rejected ones), or (0, [], []) when nothing was
    drafted. Placeholders verified in place of proposals teach nothing: every token that such a step
    commits is a draft-free event; a slot that holds -1 was never proposed. Counters say what was
    seen and what failed.

    is_live: whether the engine still holds the request of an internal id. Traces of requests that
    ended and that nobody collects (HTTP requests) are dropped after a minute.
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
        """`record`, for the engine's own thread: `inputs` is called to build StepInputs, and no
        exception leaves.
        """
        if not self.enabled:
            return
        started = time.perf_counter()
        try:
            self.record(inputs())
        except Exception:  # the engine must go on serving; the probe and the metrics report it
            self.counts["errors"] += 1
            self.last_error = traceback.format_exc(limit=4)
        self.seconds += time.perf_counter() - started

    def record(self, step: StepInputs) -> None:
        """Note one sampler call. One copy of small integers to the host; log-probs stay on the
        device until `pop`.
        """
        width, total = step.sampled.shape[1], sum(step.num_drafts)
        packed = torch.cat(
            (step.sampled.reshape(-1).long(), step.draft_ids[:total].long())
        ).tolist()
        split = len(step.req_ids) * width
        drafts_flat = packed[split:]
        self.counts["steps"] += 1
        wanted_rows: list[int] = []
        wanted_requests: list[int] = []
        pending: list[tuple[_Step, int]] = []
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
                pending.append((noted, count - accepted))
                wanted_rows.extend(range(first + accepted, first + count))
                wanted_requests.extend([row] * (count - accepted))
        if not pending:
            return
        device = step.logits.device
        entries = torch.tensor(wanted_rows, device=device)
        temperature = (
            None
            if step.temperature is None
            else step.temperature[torch.tensor(wanted_requests, device=device)]
        )
        values = target_logprobs(
            step.logits,
            step.target_rows[entries].long(),
            step.draft_ids[entries].long(),
            temperature,
        )
        for (noted, _), part in zip(
            pending, values.split([count for _, count in pending]), strict=True
        ):
            noted.logprobs = part

    def pop(
        self, external_ids: Sequence[str]
    ) -> dict[str, list[tuple[int, list[int], list[float]]] | None]:
        """Events of finished requests by the caller's id, once; None for an id never seen."""
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
    """Plain events of one request; all its log-probs come to the host in one copy."""
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
