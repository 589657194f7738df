"""The verify recorder on hand-made sampler calls: no engine, every value known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from verl_opd.engines.worker import recorder as recorder_module
from verl_opd.engines.worker.recorder import (
    StepInputs,
    VerifyRecorder,
    accepted_count,
    target_logprobs,
)
from verl_opd.opd.trace import trace_from_events

VOCAB = 11
ID = "0-7-v3-0123abcd"


def step(
    req_ids: Sequence[str],
    drafts: Sequence[Sequence[int]],
    sampled: Sequence[Sequence[int]],
    *,
    discarded: Sequence[bool] | None = None,
    temperature: Sequence[float] | None = None,
    from_draft: bool = True,
    seed: int = 0,
) -> StepInputs:
    """Logits are random; every row owns len(drafts) + 1 logits rows, in row order, as in the
    engine.
    """
    starts = [sum(len(d) + 1 for d in drafts[:row]) for row in range(len(drafts))]
    total = sum(len(d) + 1 for d in drafts)
    width = max(len(d) for d in drafts) + 1
    padded = [list(row) + [-1] * (width - len(row)) for row in sampled]
    return StepInputs(
        req_ids=list(req_ids),
        num_drafts=[len(d) for d in drafts],
        draft_ids=torch.tensor([t for d in drafts for t in d], dtype=torch.int32),
        sampled=torch.tensor(padded, dtype=torch.int32),
        logits=torch.randn(total, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3,
        target_rows=torch.tensor(
            [s + j for s, d in zip(starts, drafts, strict=True) for j in range(len(d))],
            dtype=torch.int32,
        ),
        discarded=list(discarded or [False] * len(drafts)),
        temperature=None if temperature is None else torch.tensor(temperature),
        from_draft=from_draft,
    )


def prefill(*req_ids: str) -> StepInputs:
    return step(req_ids, [[] for _ in req_ids], [[5] for _ in req_ids])


def reference(row: torch.Tensor, token: int, temperature: float = 1.0) -> float:
    values = [float(x) / temperature for x in row.double()]
    return values[token] - math.log(sum(math.exp(v) for v in values))


@pytest.mark.parametrize(
    ("row", "drafts", "expected"),
    [
        ([4, 5, 6, 9], [4, 5, 6], 3),  # all accepted, bonus 9
        ([4, 5, 9, -1], [4, 5, 6], 2),
        ([9, -1, -1, -1], [4, 5, 6], 0),
        ([4, 5, 9, 6], [4, 5, 6], 2),  # a sampler that fills whole rows: only the prefix tells
        ([9, 8, 7, 6], [4, 5, 6], 0),
        (
            [4, 5, -1, -1],
            [4, 5, 6],
            1,
        ),  # the recovered token equals the rejected proposal: only the padding tells
        ([7], [], 0),
        ([-1, -1], [4], 0),  # a discarded row
    ],
)
def test_accepted_count_needs_both_signals(row: list[int], drafts: list[int], expected: int):
    assert accepted_count(row, drafts) == expected


def test_the_first_sampled_token_is_prefill_and_every_later_step_one_event():
    recorder = VerifyRecorder()
    recorder.record(prefill(ID))
    verify = step([ID], [[4, 5, 6]], [[4, 9]])
    recorder.record(verify)
    recorder.record(step([ID], [[]], [[3]]))
    recorder.record(step([ID], [[1, 2]], [[1, 2, 8]]))
    events = recorder.pop(["0-7-v3"])["0-7-v3"]
    assert events is not None
    assert [(a, d) for a, d, _ in events] == [(1, [4, 5, 6]), (0, []), (2, [1, 2])]
    assert events[0][2] == pytest.approx(
        [reference(verify.logits[1], 5), reference(verify.logits[2], 6)], abs=1e-5
    )
    assert events[1][2] == events[2][2] == []
    assert recorder.counts["verify_rows"] == 2
    assert recorder.counts["draft_free_rows"] == 1
    assert trace_from_events(events, 1 + 2 + 1 + 3).draft_free == (3,)


def test_rows_of_one_call_do_not_mix():
    """Decode with drafts, a prefill that completes, one without drafts and a discarded prompt chunk
    share a call.
    """
    a, b, c, d = (f"{name}-0000000{i}" for i, name in enumerate("abcd"))
    recorder = VerifyRecorder()
    recorder.record(prefill(a, c))
    mixed = step(
        [a, b, c, d],
        [[1, 2], [], [], []],
        [[7], [5], [6], [8]],
        discarded=[False, False, False, True],
    )
    recorder.record(mixed)
    second = step([b, a, d], [[3, 4], [5, 6], []], [[3, 0], [5, 6, 2], [9]], seed=1)
    recorder.record(second)
    popped = recorder.pop(["a", "b", "c", "d"])
    assert [(x, y) for x, y, _ in popped["a"] or []] == [(0, [1, 2]), (2, [5, 6])]
    assert (popped["a"] or [])[0][2] == pytest.approx(
        [reference(mixed.logits[0], 1), reference(mixed.logits[1], 2)], abs=1e-5
    )
    assert [(x, y) for x, y, _ in popped["b"] or []] == [(1, [3, 4])]
    assert (popped["b"] or [])[0][2] == pytest.approx([reference(second.logits[1], 4)], abs=1e-5)
    assert popped["c"] == [(0, [], [])]
    assert (
        popped["d"] == []
    )  # its chunk was discarded, so its first kept token is the prefill token


def test_each_row_is_scored_at_its_own_temperature():
    recorder = VerifyRecorder()
    ids = ["x-00000000", "y-00000000"]
    recorder.record(prefill(*ids))
    inputs = step(ids, [[1, 2], [3, 4]], [[9], [8]], temperature=[0.5, 0.0])
    recorder.record(inputs)
    popped = recorder.pop(["x", "y"])
    assert (popped["x"] or [])[0][2] == pytest.approx(
        [reference(inputs.logits[i], t, 0.5) for i, t in ((0, 1), (1, 2))], abs=1e-5
    )
    assert (popped["y"] or [])[0][2] == pytest.approx(
        [reference(inputs.logits[i], t) for i, t in ((3, 3), (4, 4))], abs=1e-5
    )


def test_half_precision_logits_are_normalised_in_float32():
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(2)).bfloat16()
    got = target_logprobs(logits, torch.tensor([2, 0, 1]), torch.tensor([17, 4, 4999]), None)
    expected = torch.log_softmax(logits.double(), -1)[[2, 0, 1], [17, 4, 4999]]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)


def test_minus_infinity_in_padded_vocabulary_columns_is_harmless():
    logits = torch.zeros(1, 8)
    logits[:, 4:] = -torch.inf
    assert target_logprobs(
        logits, torch.tensor([0]), torch.tensor([1]), torch.tensor([0.7])
    ).tolist() == pytest.approx([-math.log(4)])


def test_placeholders_in_place_of_proposals_become_draft_free_tokens():
    recorder = VerifyRecorder()
    recorder.record(prefill(ID))
    recorder.record(step([ID], [[0, 0, 0]], [[0, 7]], from_draft=False))
    recorder.record(step([ID], [[]], [[4]], from_draft=False))
    assert recorder.pop(["0-7-v3"])["0-7-v3"] == [(0, [], [])] * 3
    assert recorder.counts["verify_rows"] == 0


def test_ids_are_matched_exactly_or_by_the_engines_suffix_only():
    recorder = VerifyRecorder()
    names = ["req-1-0a1b2c3d", "req-12-0a1b2c3d", "req-1-x-0a1b2c3d", "plain", "req-2-0a1b2c3"]
    for name in names:
        recorder.record(prefill(name))
    popped = recorder.pop(["req-1", "plain", "req-2", "req", "never"])
    assert {name for name, events in popped.items() if events is not None} == {"req-1", "plain"}
    assert recorder.stats()["open_requests"] == 3
    assert recorder.pop(["req-12", "req-1-x"]) == {"req-12": [], "req-1-x": []}


def test_a_trace_is_handed_out_once():
    recorder = VerifyRecorder()
    recorder.record(prefill(ID))
    assert recorder.pop(["0-7-v3"]) == {"0-7-v3": []}
    assert recorder.pop(["0-7-v3"]) == {"0-7-v3": None}


def test_dummy_requests_of_the_engine_are_ignored():
    recorder = VerifyRecorder()
    recorder.record(prefill("_dummy_req_0", "dummy-1"))
    assert recorder.stats()["open_requests"] == 0


def test_requests_that_are_never_popped_expire(monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]
    monkeypatch.setattr(recorder_module.time, "monotonic", lambda: now[0])
    live = {"running-00000000"}
    recorder = VerifyRecorder(live.__contains__)
    recorder.record(prefill("old-00000000"))
    recorder.record(prefill("running-00000000"))
    now[0] += recorder_module._STALE_SECONDS - 1
    recorder.record(prefill("new-00000000"))
    recorder.pop([])
    assert recorder.counts["expired"] == 0
    now[0] += 2
    recorder.pop([])
    assert recorder.counts["expired"] == 1
    assert recorder.pop(["running", "new", "old"]) == {"running": [], "new": [], "old": None}


def test_nothing_raises_into_the_engine_and_the_failure_is_kept():
    recorder = VerifyRecorder()

    def broken() -> StepInputs:
        raise IndexError("row 9 of 3")

    recorder.observe(broken)
    recorder.observe(lambda: prefill("a-00000000"))
    stats = recorder.stats()
    assert stats["errors"] == 1
    assert "row 9 of 3" in stats["last_error"]
    assert stats["steps"] == 1


# -- the hooks on a runner that looks like vLLM's --------------------------------------------------


def test_a_step_is_copied_to_the_host_once_however_many_requests_it_has(
    monkeypatch: pytest.MonkeyPatch,
):
    """S16: a device synchronisation per row slows decoding down."""
    copies: list[str] = []
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        inner = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda self, *args, _name=name, _inner=inner: (
                copies.append(_name) or _inner(self, *args)
            ),
        )
    recorder = VerifyRecorder()
    ids = [f"r{i}-0000000{i}" for i in range(8)]
    recorder.record(prefill(*ids))
    copies.clear()
    recorder.record(step(ids, [[1, 2, 3]] * 8, [[9]] * 8, temperature=[0.7] * 8))
    assert copies == ["tolist"]
