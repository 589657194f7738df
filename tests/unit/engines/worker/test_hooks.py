"""Hooks into runners of every kind, on stand-ins of the runners."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_opd.engines.worker.hooks import attach
from verl_opd.engines.worker.recorder import (
    VerifyRecorder,
)

VOCAB = 11
ID = "0-7-v3-0123abcd"


class Base:
    """The members of a V1 model runner that the hooks touch."""

    use_async_scheduling = False

    def __init__(self) -> None:
        self.speculative_config = SimpleNamespace(rejection_sample_method="standard")
        self.input_batch = SimpleNamespace(
            num_reqs=1,
            req_ids=["a-00000000"],
            sampling_metadata=SimpleNamespace(all_greedy=True, temperature=None),
        )
        self.discard_request_mask = SimpleNamespace(np=torch.zeros(4, dtype=torch.bool).numpy())
        self.row = [5]

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        return SimpleNamespace(sampled_token_ids=torch.tensor([self.row], dtype=torch.int32))

    def propose_draft_token_ids(self, *args: Any) -> Any:
        return torch.tensor([[1, 2]])


class Overriding(Base):
    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        return super()._sample(logits, spec_decode_metadata)


METADATA = SimpleNamespace(
    num_draft_tokens=[2],
    draft_token_ids=torch.tensor([1, 2], dtype=torch.int32),
    target_logits_indices=torch.tensor([0, 1], dtype=torch.int32),
)


def wired(runner: Any) -> tuple[VerifyRecorder, Any, str]:
    recorder = VerifyRecorder()
    hook, switch = attach(runner, recorder)
    return recorder, switch, hook


def test_the_class_that_really_samples_is_named():
    assert wired(Base())[2] == "Base._sample"
    assert wired(Overriding())[2] == "Overriding._sample"


def test_a_step_flows_from_the_runner_into_the_recorder_and_its_output_is_unchanged():
    runner = Overriding()
    recorder, _, _ = wired(runner)
    runner._sample(torch.zeros(1, VOCAB), None)
    runner.propose_draft_token_ids()
    runner.row = [1, 9, -1]
    output = runner._sample(torch.zeros(3, VOCAB), METADATA)
    assert output.sampled_token_ids.tolist() == [[1, 9, -1]]
    assert recorder.pop(["a"]) == {"a": [(1, [1, 2], [pytest.approx(-math.log(VOCAB))])]}


def test_drafts_that_no_drafter_proposed_are_placeholders():
    runner = Base()
    recorder, _, _ = wired(runner)
    runner._sample(torch.zeros(1, VOCAB), None)
    runner.row = [1, 9, -1]
    runner._sample(torch.zeros(3, VOCAB), METADATA)
    assert recorder.pop(["a"]) == {"a": [(0, [], []), (0, [], [])]}


def test_the_switch_stops_proposals_only_with_synchronous_scheduling():
    runner = Base()
    _, switch, _ = wired(runner)
    assert switch.set(False)
    assert runner.propose_draft_token_ids() == [[]]
    assert switch.set(True)
    assert runner.propose_draft_token_ids().tolist() == [[1, 2]]

    busy = Base()
    busy.use_async_scheduling = True
    _, switch, _ = wired(busy)
    assert not switch.set(False)
    assert busy.propose_draft_token_ids().tolist() == [[1, 2]]


@pytest.mark.parametrize("method", ["synthetic", "block"])
def test_lossy_verification_is_unsupported(method: str):
    runner = Base()
    runner.speculative_config.rejection_sample_method = method
    with pytest.raises(RuntimeError, match=f"rejection_sample_method='{method}' is lossy"):
        wired(runner)


def test_a_runner_without_the_method_to_hook_is_named():
    with pytest.raises(RuntimeError, match="object has no sample"):
        wired(object())


# -- vllm-ascend: V1 with its own `_sample` --------------------------------------------------------


class NPUModelRunner(Base):
    """Overrides `_sample`; older trees list discarded rows instead of masking them."""

    def __init__(self) -> None:
        super().__init__()
        del self.discard_request_mask
        self.discard_request_indices = SimpleNamespace(np=torch.tensor([1, 7]).numpy())
        self.num_discarded_requests = 1
        self.ascend_config = SimpleNamespace(
            rejection_sampler_config=SimpleNamespace(enable_block_verify=False),
            enable_reduce_sample=False,
        )
        self.input_batch.num_reqs, self.input_batch.req_ids = 2, ["a-00000000", "chunk-00000000"]

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        return SimpleNamespace(sampled_token_ids=torch.tensor([[5], [6]], dtype=torch.int32))


def test_ascend_rows_discarded_by_index_are_not_recorded():
    runner = NPUModelRunner()
    recorder, _, hook = wired(runner)
    assert hook == "NPUModelRunner._sample"
    runner._sample(torch.zeros(2, VOCAB), None)
    assert recorder.pop(["a", "chunk"]) == {"a": [], "chunk": None}
    assert recorder.counts["errors"] == 0


@pytest.mark.parametrize("mode", ["enable_block_verify", "enable_entropy_verify"])
def test_ascends_lossy_modes_are_unsupported(mode: str):
    runner = NPUModelRunner()
    setattr(runner.ascend_config.rejection_sampler_config, mode, True)
    with pytest.raises(RuntimeError, match=f"{mode} is lossy"):
        wired(runner)


def test_logits_split_over_ranks_are_unsupported():
    runner = NPUModelRunner()
    runner.ascend_config.enable_reduce_sample = True
    with pytest.raises(RuntimeError, match="enable_reduce_sample"):
        wired(runner)


# -- the V2 runner ---------------------------------------------------------------------------------


class RejectionSampler:
    enable_adaptive_verification = False
    marker = "inner"

    def __call__(
        self, logits: Any, input_batch: Any, draft_logits: Any, invalid_drafts: Any
    ) -> Any:
        return input_batch.result


class V2:
    """The members of a V2 runner that the hook touches: logits are computed inside `sample`."""

    def __init__(self) -> None:
        self.speculative_config = SimpleNamespace(rejection_sample_method="standard")
        self.rejection_sampler: Any = RejectionSampler()
        temperature = SimpleNamespace(gpu=torch.tensor([0.0, 9.0, 0.5, 9.0]))
        self.sampler = SimpleNamespace(sampling_states=SimpleNamespace(temperature=temperature))
        self.logits = torch.zeros(0, VOCAB)

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        output = input_batch.result
        if input_batch.num_draft_tokens:
            output = self.rejection_sampler(self.logits, input_batch, None, None)
        return output, output.num_sampled, output.num_sampled * 0


def v2_batch(
    names: list[str],
    drafts: list[list[int]],
    sampled: list[list[int]],
    num_sampled: list[int],
    slots: list[int],
) -> Any:
    """Rows per request: one for its last known token, one per draft. input_ids holds exactly these
    rows.
    """
    rows = [token for row in drafts for token in (0, *row)]
    cu = [0]
    for row in drafts:
        cu.append(cu[-1] + 1 + len(row))
    total = sum(len(row) for row in drafts)
    return SimpleNamespace(
        req_ids=names,
        num_reqs=len(names),
        num_draft_tokens=total,
        num_draft_tokens_per_req=torch.tensor([len(row) for row in drafts]).numpy()
        if total
        else None,
        cu_num_logits_np=torch.tensor(cu).numpy(),
        input_ids=torch.tensor(rows, dtype=torch.int32),
        logits_indices=torch.arange(len(rows)),
        idx_mapping=torch.tensor(slots),
        result=SimpleNamespace(
            sampled_token_ids=torch.tensor(sampled), num_sampled=torch.tensor(num_sampled)
        ),
    )


def test_v2_rows_with_garbage_tails_are_cut_by_num_sampled():
    runner = V2()
    recorder, switch, hook = wired(runner)
    assert hook == "V2.sample"
    assert runner.rejection_sampler.marker == "inner"
    names = ["a-00000000", "b-00000000", "c-00000000"]
    runner.sample(
        None,
        v2_batch(names, [[], [], []], [[5, 99, 99], [6, 99, 99], [7, 1, 2]], [1, 1, 0], [0, 2, 1]),
        None,
    )
    generator = torch.Generator().manual_seed(0)
    runner.logits = torch.randn(7, VOCAB, generator=generator)
    # a accepts draft 1 and rejects 2 (whose garbage tail repeats it), b accepts both, c is a prompt
    # chunk
    batch = v2_batch(
        names, [[1, 2], [3, 4], []], [[1, 8, 2], [3, 4, 9], [1, 2, 3]], [2, 3, 0], [0, 2, 1]
    )
    runner.sample(None, batch, None)
    expected = float(
        torch.log_softmax(runner.logits[1], -1)[2]
    )  # row cu[0] + 1 verifies a's second draft
    popped = recorder.pop(["a", "b", "c"])
    assert popped["a"] == [(1, [1, 2], [pytest.approx(expected)])]
    assert popped["b"] == [(2, [3, 4], [])]
    assert popped["c"] is None
    assert recorder.counts["errors"] == 0, recorder.last_error
    assert switch.set(True)
    assert not switch.set(False)


def test_v2_applies_each_requests_own_temperature():
    runner = V2()
    recorder, _, _ = wired(runner)
    runner.sample(None, v2_batch(["b-00000000"], [[]], [[6, 0]], [1], [2]), None)
    runner.logits = torch.tensor([[0.0, 1.0, 3.0, *[0.0] * (VOCAB - 3)]] * 2)
    runner.sample(None, v2_batch(["b-00000000"], [[1]], [[2, 0]], [1], [2]), None)
    expected = float(torch.log_softmax(runner.logits[0] / 0.5, -1)[1])
    assert recorder.pop(["b"]) == {"b": [(0, [1], [pytest.approx(expected)])]}


def test_v2_slots_without_a_proposal_are_draft_free():
    runner = V2()
    recorder, _, _ = wired(runner)
    runner.sample(None, v2_batch(["b-00000000"], [[]], [[6, 0]], [1], [0]), None)
    runner.logits = torch.zeros(2, VOCAB)
    runner.sample(None, v2_batch(["b-00000000"], [[-1]], [[2, 0]], [1], [0]), None)
    assert recorder.pop(["b"]) == {"b": [(0, [], [])]}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: setattr(r, "batch_sharder", object()), "batch_sharder"),
        (lambda r: setattr(r, "rejection_sampler", None), "without a speculative_config"),
        (
            lambda r: setattr(r.rejection_sampler, "enable_adaptive_verification", True),
            "adaptive verification",
        ),
        (lambda r: setattr(r.speculative_config, "rejection_sample_method", "block"), "lossy"),
    ],
)
def test_v2_ways_of_verifying_that_cannot_be_recorded(change: Any, named: str):
    runner = V2()
    change(runner)
    with pytest.raises(RuntimeError, match=named):
        wired(runner)
