"""DSpark: config, replay against a left-to-right reference decode, Markov head in loss and files.
(B5, B7 of docs/known_faults.md.)
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.drafts import MASK, VOCAB, make_layout, target_config
from tests.options import loss_options, loss_settings, planned
from tests.training import ObservedTrainer, calm, make_config, save_models
from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import get_family
from verl_opd.drafts.dspark.config import as_dflash
from verl_opd.drafts.files import write_draft
from verl_opd.errors import ConfigError
from verl_opd.opd.layout import build_layout
from verl_opd.opd.losses import confidence_loss, stream_totals
from verl_opd.opd.metrics import reduce_metrics
from verl_opd.opd.plan import TrainItem, verified_proposals
from verl_opd.opd.trace import Event, RolloutSample, check_trace, trace_from_events

FAMILY, DFLASH, K = get_family("dspark"), get_family("dflash"), 3


def spark_config(**changes: Any) -> dict[str, Any]:
    keys = DraftConfig(mask_token_id=MASK, target_layer_ids=[1, 3, 5], num_hidden_layers=2)
    return {
        **FAMILY.derive_config(target_config(LlamaConfig), keys, K),
        "markov_rank": 8,
        **changes,
    }


def spark_draft(**changes: Any) -> nn.Module:
    draft = FAMILY.build(spark_config(**changes), seed=3, init_std=0.2)
    with torch.no_grad():
        draft.markov_head.markov_w2.weight.mul_(4)  # so that the token before decides
    return draft


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spark")
    save_models(folder)
    write_draft(spark_draft().state_dict(), spark_config(), folder / "spark")
    return folder


def decode(root: Path, prompt: list[int], length: int) -> RolloutSample:
    """Greedy speculative decoding, one block at a time: K slots from the anchor on, then left to
    right with the Markov bias of the token before.
    """
    target = AutoModelForCausalLM.from_pretrained(root / "target", dtype=torch.float32)
    draft = FAMILY.build(spark_config(), seed=0, init_std=0.0)
    FAMILY.load_weights(draft, str(root / "spark"))
    backbone = DFLASH.build(as_dflash(spark_config()), seed=0, init_std=0.0)
    backbone.load_state_dict(
        {
            name: tensor
            for name, tensor in draft.state_dict().items()
            if not name.startswith("markov_head")
        }
    )
    w1, w2 = draft.markov_head.markov_w1.weight, draft.markov_head.markov_w2.weight
    embed, ids, events = target.get_input_embeddings(), list(prompt), list[Event]()
    with torch.no_grad():
        ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
        while len(ids) - len(prompt) < length:
            anchor = len(ids) - 1
            states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
            aux = torch.cat([states[i + 1] for i in (1, 3, 5)], -1)[:, :anchor]
            slots = embed(torch.tensor([[[ids[anchor], *[MASK] * (K - 1)]]]))
            hidden = DFLASH.replay(backbone, aux, slots, make_layout([len(ids)], [[anchor]], K))[0]
            drafted: list[int] = []
            for slot in range(K):
                before = drafted[-1] if drafted else ids[anchor]
                drafted.append(
                    int((target.lm_head.weight @ hidden[slot] + w2 @ w1[before]).argmax())
                )
            logits = target(torch.tensor([ids + drafted])).logits[0, anchor:]
            choice = logits.argmax(-1).tolist()
            accepted = next((i for i in range(K) if drafted[i] != choice[i]), K)
            logprobs = torch.log_softmax(logits, -1)
            events.append(
                (accepted, drafted, [float(logprobs[i, drafted[i]]) for i in range(accepted, K)])
            )
            ids += [*drafted[:accepted], choice[accepted]]
    response = tuple(ids[len(prompt) : len(prompt) + length])
    sample = RolloutSample(
        sample_id="0-0",
        data_source="t",
        prompt_ids=tuple(prompt),
        response_ids=response,
        trace=trace_from_events(events, length),
        draft_version=0,
        finish_reason="length",
    )
    check_trace(sample.trace, response)
    return sample


def trainer_for(
    root: Path, name: str = "spark", config: dict[str, Any] | None = None, **training: Any
) -> ObservedTrainer:
    cfg = make_config(root, **training)
    cfg.draft.family, cfg.draft.path, cfg.rollout.num_speculative_tokens = (
        "dspark",
        str(root / name),
        K,
    )
    return calm(ObservedTrainer(cfg, config or spark_config(), 0, 1, "cpu"))


def update(
    trainer: ObservedTrainer, items: list[TrainItem], lr: float = 0.0, **loss: Any
) -> dict[str, float]:
    spec = loss_settings(response_loss="cross_entropy", loss_max_clamp=None, **loss)
    totals = stream_totals(
        [item.plan for item in items], [len(item.response_ids) for item in items], spec.options
    )
    return reduce_metrics([trainer.update(items, totals, spec, lr, check_replay=True)])


def items_of(root: Path) -> list[TrainItem]:
    samples = [
        replace(decode(root, prompt, 20), sample_id=f"0-{i}")
        for i, prompt in enumerate([[5, 9, 30], [7, 2, 60, 11, 3]])
    ]
    return [
        TrainItem(
            sample_id=s.sample_id,
            prompt_ids=s.prompt_ids,
            response_ids=s.response_ids,
            plan=planned(s, block_size=K + 1, autoregressive=True),
        )
        for s in samples
    ]


def test_replay_chooses_what_a_left_to_right_decode_proposed(root: Path, one_rank: None) -> None:
    items = items_of(root)
    trainer = trainer_for(root)
    metrics = update(trainer, items, 1e-2)
    assert metrics["opd/replay_slots"] > 60
    assert metrics["opd/replay_mismatch_raw"] == 0
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "fc.weight"):
        assert trainer.gradients[name].abs().sum() > 0
    losses = [update(trainer, items, 1e-2)["actor/distillation/loss"] for _ in range(6)]
    assert losses[-1] < losses[0]


def test_another_token_before_the_slot_is_found(root: Path, one_rank: None) -> None:
    """B7: the Markov bias of slot k belongs to the token before it, the anchor's for the first."""
    items = items_of(root)
    late = [
        replace(
            item,
            plan=replace(
                item.plan, drafted=tuple((tokens[1], *tokens[1:]) for tokens in item.plan.drafted)
            ),
        )
        for item in items
    ]
    assert update(trainer_for(root), late)["opd/replay_mismatch_raw"] > 0.1


def test_files_hold_the_public_names_and_neither_embedding_nor_head(
    root: Path, one_rank: None, tmp_path: Path
) -> None:
    trainer = trainer_for(root)
    trainer.export(str(tmp_path / "out"))
    state = get_family("dspark").build(spark_config(), seed=0, init_std=0.0).state_dict()
    assert {
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "fc.weight",
        "norm.weight",
    } < state.keys()
    assert not {name for name in state if "embed_tokens" in name or "lm_head" in name}
    assert set(trainer.published()) == set(state)
    again = FAMILY.build(FAMILY.load_config(str(tmp_path / "out")), seed=0, init_std=0.0)
    FAMILY.load_weights(again, str(tmp_path / "out"))


def test_verified_proposals_are_the_accepted_ones_and_the_first_rejected_one() -> None:
    """Of four drafted: two accepted, then all, then none."""
    events: list[Event] = [
        (2, [11, 12, 13, 14], [-1.0, -2.0]),
        (4, [21, 22, 23, 24], []),
        (0, [31, 32, 33, 34], [-1.0] * 4),
    ]
    sample = RolloutSample(
        sample_id="0-0",
        data_source="t",
        prompt_ids=(1, 2),
        response_ids=(10, 11, 12, 19, 21, 22, 23, 24, 29, 39),
        trace=trace_from_events(events, 10),
        draft_version=0,
        finish_reason="stop",
    )
    plan = planned(sample, block_size=5)
    first = [(0, 1, True), (0, 2, True), (0, 3, False)]
    assert verified_proposals(plan) == [
        *first,
        (1, 1, True),
        (1, 2, True),
        (1, 3, True),
        (1, 4, True),
        (2, 1, False),
    ]
    cut = RolloutSample(
        sample_id="0-0",
        data_source="t",
        prompt_ids=(1, 2),
        response_ids=(10, 11, 12),
        trace=trace_from_events(events, 3),
        draft_version=0,
        finish_reason="stop",
    )
    assert verified_proposals(planned(cut, block_size=5)) == first[:2], (
        "the response ended before the third proposal's place"
    )
    stream = build_layout(
        [
            TrainItem(
                sample_id="0-0",
                prompt_ids=sample.prompt_ids,
                response_ids=sample.response_ids,
                plan=plan,
            )
        ]
    ).verified
    assert stream.slot.tolist() == [1, 2, 3, 6, 7, 8, 9, 11]
    assert stream.token.tolist() == [1, 1, 0, 1, 1, 1, 1, 0]
    spec = loss_options(confidence_weight=2.0)
    assert stream_totals([plan], [10], spec).verified == 8
    logits = torch.tensor([1.0, -0.5, 2.0, 0.0, 0.3, -4.0, 1.5, 0.7])
    by_hand = [
        -math.log(1 / (1 + math.exp(-z if y else z)))
        for z, y in zip(logits.tolist(), stream.token.tolist(), strict=True)
    ]
    totals = stream_totals([plan], [10], spec)
    parts = [
        confidence_loss(logits[part], stream.token[part], totals, spec).item()
        for part in (slice(0, 3), slice(3, 8), slice(8, 8))
    ]
    assert sum(parts) == pytest.approx(2.0 * sum(by_hand) / 8, rel=1e-6)


SURE = {"enable_confidence_head": True, "confidence_head_with_markov": True}


@pytest.mark.parametrize("with_markov", [True, False])
def test_the_confidence_head_learns_and_does_not_pull_the_backbone(
    root: Path, one_rank: None, tmp_path: Path, with_markov: bool
) -> None:
    """K7: backbone gradients with and without the confidence stream are the same."""
    config = spark_config(**SURE | {"confidence_head_with_markov": with_markov})
    draft = FAMILY.build(config, seed=3, init_std=0.2)
    assert draft.confidence_head.proj.weight.shape == (
        1,
        config["hidden_size"] + (8 if with_markov else 0),
    )
    assert draft.confidence_head.proj.bias.item() == 0, "biases start at 0 on every rank"
    name = f"sure-{with_markov}"
    write_draft(draft.state_dict(), config, root / name)
    items = items_of(root)
    without, with_it = trainer_for(root, name, config), trainer_for(root, name, config)
    plain = update(without, items)
    first = update(with_it, items, confidence_weight=1.0)
    for parameter, gradient in without.gradients.items():
        if parameter.startswith("confidence_head"):
            assert gradient.abs().sum() == 0
            assert with_it.gradients[parameter].abs().sum() > 0
        else:
            torch.testing.assert_close(with_it.gradients[parameter], gradient, rtol=0, atol=0)
    count = first["actor/distillation/dspark_confidence_token_count"]
    assert count == sum(len(verified_proposals(item.plan)) for item in items)
    bce = "actor/distillation/dspark_confidence_bce_loss"
    assert first["actor/distillation/loss"] == pytest.approx(plain["actor/distillation/loss"]), (
        "the loss of the two streams"
    )
    later = [update(with_it, items, 3e-2, confidence_weight=1.0)[bce] for _ in range(8)]
    assert later[-1] < first[bce]
    with_it.export(str(tmp_path / "out"))
    FAMILY.load_weights(FAMILY.build(config, seed=2, init_std=0.1), str(tmp_path / "out"))
    assert {"confidence_head.proj.weight", "confidence_head.proj.bias"} < set(with_it.published())


def test_confidence_does_not_depend_on_the_micro_batches(root: Path, one_rank: None) -> None:
    config = spark_config(**SURE)
    write_draft(FAMILY.build(config, seed=3, init_std=0.2).state_dict(), config, root / "split")
    items = items_of(root)
    one, many = (
        trainer_for(root, "split", config),
        trainer_for(root, "split", config, max_tokens_per_micro_batch=1),
    )
    results = [update(trainer, items, confidence_weight=0.5) for trainer in (one, many)]
    assert results[0]["actor/distillation/dspark_confidence_bce_loss"] == pytest.approx(
        results[1]["actor/distillation/dspark_confidence_bce_loss"], rel=1e-5
    )
    torch.testing.assert_close(
        one.gradients["confidence_head.proj.weight"],
        many.gradients["confidence_head.proj.weight"],
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("change", "tokens", "named"),
    [
        ({"markov_head_type": "rnn"}, K, "markov_head_type='rnn'"),
        ({"markov_head_type": "gated"}, K, "markov_head_type='gated'"),
        ({"sample_from_anchor": False}, K, "sample_from_anchor=False"),
        ({"markov_rank": None}, K, "markov_rank"),
        ({"architectures": ["DFlashDraftModel"]}, K, "DFlashDraftModel"),
        ({"draft_vocab_size": 50}, K, "draft_vocab_size=50"),
        ({"target_layer_ids": [5, 3]}, K, "[5, 3]"),
        ({}, K + 1, f"rollout.num_speculative_tokens={K + 1} exceeds the {K} proposals"),
        ({"vocab_size": 60}, K, f"vocab_size is 60 in the draft and {VOCAB}"),
    ],
)
def test_what_would_not_be_replayed_is_unsupported(
    change: dict[str, Any], tokens: int, named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        FAMILY.check(spark_config(**change), target_config(LlamaConfig), tokens, False)
    assert named in str(caught.value)


def test_derived_config_and_block() -> None:
    FAMILY.check(spark_config(), target_config(LlamaConfig), K, False)
    assert spark_config()["block_size"] == K
    assert (
        FAMILY.block_size(spark_config(), K),
        FAMILY.mask_token_id(spark_config()),
        FAMILY.layer_ids(spark_config()),
    ) == (
        K + 1,
        MASK,
        [1, 3, 5],
    )


def test_copies_of_the_targets_embedding_and_head_are_left_out_and_others_unsupported(
    tmp_path: Path,
) -> None:
    table = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(9)).bfloat16().float()
    frozen = {"embed_tokens.weight": table, "lm_head.weight": table * 2}
    write_draft({**spark_draft().state_dict(), **frozen}, spark_config(), tmp_path / "same")
    FAMILY.load_weights(spark_draft(), str(tmp_path / "same"), frozen)
    write_draft(
        {**spark_draft().state_dict(), **frozen, "lm_head.weight": table},
        spark_config(),
        tmp_path / "other",
    )
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs"):
        FAMILY.load_weights(spark_draft(), str(tmp_path / "other"), frozen)
