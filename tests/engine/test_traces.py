"""What the recorder says must be what the engine did, checked against transformers on the same
weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.conftest import FAMILY, K, LiveEngine
from tests.options import planned
from verl_opd.opd.layout import build_layout
from verl_opd.opd.plan import TrainItem
from verl_opd.opd.trace import (
    RolloutSample,
    VerifyTrace,
    check_trace,
    rejections,
)
from verl_opd.opd.wire import from_extra_fields
from verl_opd.rollout.server import GenerateResult
from verl_opd.targets.hf import HFSource

pytestmark = pytest.mark.engine


def trace_of(result: GenerateResult) -> VerifyTrace:
    trace = from_extra_fields(result.extra_fields, len(result.token_ids))
    check_trace(trace, result.token_ids)
    return trace


def logprob(
    model: torch.nn.Module, prefix: Sequence[int], token: int, temperature: float = 1.0
) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([list(prefix)])).logits[0, -1].double()
    return float(torch.log_softmax(logits / temperature, -1)[token])


def test_greedy_traces_explain_every_token_of_32_concurrent_requests(live: LiveEngine, prompts):
    before = live.call(live.engine.recorder_stats())
    results = live.generate_all("many", prompts)
    for result in results:
        trace = trace_of(result)
        assert len(result.token_ids) == 24
        assert trace.steps
        assert all(len(step.drafted) == K for step in trace.steps)
    stats = live.call(live.engine.recorder_stats())
    assert stats["errors"] == 0, stats["last_error"]
    assert stats["open_requests"] == before["open_requests"]


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.7, 1.0), (0.7, 0.8)])
def test_logprobs_of_rejected_tokens_are_the_targets_on_the_drafts_own_prefix(
    live: LiveEngine, prompts, temperature: float, top_p: float
):
    """Divided by the temperature, and not cut by top-p: a rejected token outside the nucleus keeps
    a finite log-prob.
    """
    model = AutoModelForCausalLM.from_pretrained(live.settings.model_path, dtype=torch.float32)
    result = live.generate(
        f"rejected-{temperature}-{top_p}",
        prompts[0],
        temperature=temperature,
        top_p=top_p,
        seed=5,
        max_tokens=10,
    )
    trace = trace_of(result)
    checked = 0
    for step in trace.steps:
        known = [*prompts[0], *result.token_ids[: step.anchor + 1]]
        for item in rejections(VerifyTrace(trace.response_len, (step,))):
            prefix = [*known, *step.drafted[: item.offset - 1]]
            assert item.logprob == pytest.approx(
                logprob(model, prefix, item.token, temperature or 1.0), abs=2e-3
            )
            checked += 1
    assert checked >= 2 * K


def test_sampled_rollouts_follow_the_targets_distribution(live: LiveEngine, prompts):
    """D6: the second token comes from a verify step. Over 1500 rollouts of one prompt its
    frequencies are the target's, within 4 standard errors, for every token that is likely enough to
    count.
    """
    temperature, count = 0.5, 1500
    model = AutoModelForCausalLM.from_pretrained(live.settings.model_path, dtype=torch.float32)
    results = live.generate_all(
        "exact", [prompts[3]] * count, temperature=temperature, max_tokens=2
    )
    first, second = (
        Counter(result.token_ids[0] for result in results),
        Counter(result.token_ids[1] for result in results),
    )
    expected = torch.zeros(model.config.vocab_size, dtype=torch.float64)
    with torch.no_grad():
        for token, times in first.items():
            logits = model(torch.tensor([[*prompts[3], token]])).logits[0, -1].double()
            expected += times * torch.softmax(logits / temperature, -1)
    checked = 0
    for token, times in enumerate(expected.tolist()):
        share = times / count
        if times >= 20:
            assert abs(second[token] - times) < 4 * (count * share * (1 - share)) ** 0.5, (
                f"token {token}: {second[token]} times, expected {times:.0f}"
            )
            checked += 1
    assert checked >= 5
    assert all(trace_of(result).steps for result in results)


def test_a_seeded_request_draws_the_same_alone_and_beside_others(live: LiveEngine, prompts):
    """S30: verification draws from the request's own generator, so its response does not depend on
    the batch it runs in (float32).
    """
    sampling = {"temperature": 0.9, "top_p": 0.9, "seed": 11, "max_tokens": 16}
    alone = live.generate("seeded-alone", prompts[3], **sampling)
    assert live.generate("seeded-again", prompts[3], **sampling).token_ids == alone.token_ids
    together = live.generate_all("seeded", [prompts[3], *prompts[4:9]], **sampling)
    assert together[0].token_ids == alone.token_ids
    for result in together:
        trace_of(result)
    assert (
        live.generate("seeded-other", prompts[3], **{**sampling, "seed": 12}).token_ids
        != alone.token_ids
    )


def test_speculation_changes_no_greedy_token_and_drafting_can_be_switched_off(
    live: LiveEngine, prompts
):
    drafted = live.generate_all("on", prompts[:8])
    assert live.call(live.engine.set_drafting(False))
    plain = live.generate_all("off", prompts[:8])
    assert live.call(live.engine.set_drafting(True))
    again = live.generate_all("on-again", prompts[:8])
    assert (
        [r.token_ids for r in plain]
        == [r.token_ids for r in drafted]
        == [r.token_ids for r in again]
    )
    assert all(
        not trace_of(r).steps and trace_of(r).draft_free == tuple(range(1, 24)) for r in plain
    )
    assert [trace_of(r).steps for r in again] == [trace_of(r).steps for r in drafted]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_response_that_ends_inside_a_block_commits_only_what_it_holds(
    live: LiveEngine, prompts, length: int
):
    result = live.generate(f"short-{length}", prompts[1], max_tokens=length)
    trace = trace_of(result)
    assert len(result.token_ids) == length
    assert result.finish_reason == "length"
    assert sum(step.committed for step in trace.steps) == length - 1
    assert set(result.extra_fields) == set(live.generate(f"full-{length}", prompts[1]).extra_fields)


def test_an_eos_inside_a_response_ends_its_trace(live: LiveEngine, prompts):
    full = live.generate("eos-full", prompts[2])
    stop = full.token_ids[9]
    result = live.generate("eos-cut", prompts[2], stop_token_ids=[stop])
    assert result.finish_reason == "stop"
    assert result.token_ids == full.token_ids[: full.token_ids.index(stop) + 1]
    trace_of(result)


def test_replayed_slots_choose_what_the_engine_proposed(live: LiveEngine, prompts):
    """The strongest alignment check: layer ids, positions, mask, anchor, head and weights all have
    to agree for this to hold.
    """
    draft = FAMILY.build(live.draft_config, seed=1, init_std=0.02)
    FAMILY.load_weights(draft, live.settings.speculation.draft_path)
    target = HFSource(
        live.settings.model_path, dtype="float32", layer_ids=FAMILY.layer_ids(live.draft_config)
    )
    mask = target.head.embed(torch.tensor(FAMILY.mask_token_id(live.draft_config)))
    mismatched = compared = 0
    for index, prompt in enumerate(prompts[:6]):
        result = live.generate(f"replay-{index}", prompt)
        sample = RolloutSample(
            sample_id=f"0-{index}",
            data_source="t",
            prompt_ids=tuple(prompt),
            response_ids=result.token_ids,
            trace=trace_of(result),
            draft_version=0,
            finish_reason="length",
        )
        layout = build_layout(
            [
                TrainItem(
                    sample_id="0",
                    prompt_ids=sample.prompt_ids,
                    response_ids=sample.response_ids,
                    plan=planned(sample, block_size=K + 1),
                )
            ]
        )
        features = target.features(layout.input_ids, layout.lengths)
        embeds = mask.expand(1, layout.anchors.shape[1], K + 1, -1).clone()
        embeds[:, :, 0] = target.head.embed(layout.input_ids.gather(1, layout.anchors))
        with torch.no_grad():
            hidden = FAMILY.replay(draft, features.aux[:, : layout.context_len], embeds, layout)
        chosen = (hidden[0] @ target.head.weight.T).argmax(-1).view(-1, K + 1)[:, 1:].tolist()
        by_anchor = {
            int(anchor) - len(prompt): row
            for anchor, row in zip(layout.anchors[0], chosen, strict=True)
        }
        for step in sample.trace.steps:
            if step.anchor in by_anchor:
                mismatched += sum(
                    a != b for a, b in zip(by_anchor[step.anchor], step.drafted, strict=True)
                )
                compared += K
    assert compared > 200
    assert mismatched == 0
