"""What each slot of a replayed block sees, against perturbations and against a block-by-block
float64 reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from tests.drafts import (
    HIDDEN,
    QWEN3_4B_DFLASH,
    build_draft,
    draft_config,
    make_layout,
    random_inputs,
)
from verl_opd.drafts import get_family
from verl_opd.drafts.dflash.model import DFlashDraft, rotate, rotation
from verl_opd.drafts.dflash.replay import slot_positions, visibility
from verl_opd.opd.layout import Layout

FAMILY = get_family("dflash")


def _replay(draft: nn.Module, features: Tensor, slots: Tensor, layout: Layout) -> Tensor:
    """Hidden states [b, N, B, h]."""
    return FAMILY.replay(draft, features, slots, layout).unflatten(1, slots.shape[1:3])


# -- names and shapes ------------------------------------------------------------------------------


def test_names_and_shapes_of_the_public_checkpoint() -> None:
    """Qwen3-4B-DFlash-b16."""
    with torch.device("meta"):
        state = DFlashDraft(QWEN3_4B_DFLASH).state_dict()
    layer = {
        "input_layernorm.weight": (2560,),
        "self_attn.q_proj.weight": (4096, 2560),
        "self_attn.k_proj.weight": (1024, 2560),
        "self_attn.v_proj.weight": (1024, 2560),
        "self_attn.o_proj.weight": (2560, 4096),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "post_attention_layernorm.weight": (2560,),
        "mlp.gate_proj.weight": (9728, 2560),
        "mlp.up_proj.weight": (9728, 2560),
        "mlp.down_proj.weight": (2560, 9728),
    }
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (2560, 12800),
        "hidden_norm.weight": (2560,),
        "norm.weight": (2560,),
    }
    expected |= {f"layers.{i}.{name}": shape for i in range(5) for name, shape in layer.items()}
    assert len(expected) == 58
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected


def test_random_weights_depend_on_the_seed_only() -> None:
    config = draft_config()
    first, again, other = (
        FAMILY.build(config, seed=seed, init_std=0.05).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert first["fc.weight"].dtype == torch.float32
    assert first["fc.weight"].std().item() == pytest.approx(0.05, rel=0.1)
    norms = [tensor for name, tensor in first.items() if name.endswith("norm.weight")]
    assert len(norms) == 2 + 2 * 4
    assert all(bool((tensor == 1).all()) for tensor in norms)


# -- positions and visibility ----------------------------------------------------------------------


def test_positions_count_on_from_the_anchor() -> None:
    layout = make_layout([9, 5], [[2, 5], [3]], block=3)
    assert slot_positions(layout).tolist() == [[2, 3, 4, 5, 6, 7], [3, 4, 5, 0, 1, 2]]


def test_visibility_by_hand() -> None:
    """Two samples, B = 2: blocks at 1 and 3, then one block at 2 and a padded one; three context
    positions.
    """
    mask = visibility(make_layout([6, 4], [[1, 3], [2]], block=2), 3).squeeze(1).int().tolist()
    at_1, at_3 = [1, 0, 0, 1, 1, 0, 0], [1, 1, 1, 0, 0, 1, 1]
    at_2, padded = [1, 1, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1]
    assert mask == [[at_1, at_1, at_3, at_3], [at_2, at_2, padded, padded]]


def test_window_and_causality_by_hand() -> None:
    """One block of 3 at position 4 over four context positions: slots at 4, 5, 6."""
    layout = make_layout([9], [[4]], block=3)
    windowed = visibility(layout, 4, window=3)[0, 0].int().tolist()
    assert [row[:4] for row in windowed] == [
        [0, 0, 1, 1],
        [0, 0, 0, 1],
        [0, 0, 0, 0],
    ]  # at most 2 positions behind the slot
    assert [row[4:] for row in windowed] == [[1, 1, 1]] * 3
    causal = visibility(layout, 4, causal=True)[0, 0].int().tolist()
    assert [row[:4] for row in causal] == [[1, 1, 1, 1]] * 3
    assert [row[4:] for row in causal] == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(("causal", "sees_later"), [(False, True), (True, False)])
def test_a_slot_sees_later_slots_of_its_block_unless_causal(causal: bool, sees_later: bool) -> None:
    """K6: slot 1 sees slot 3 in DFlash, not in a causal draft."""
    config = draft_config()
    config["dflash_config"]["causal"] = causal
    draft, layout = build_draft(config), make_layout([12], [[5]])
    features, slots = random_inputs(layout)
    changed = slots.clone()
    changed[0, 0, 3] += 1
    assert (
        torch.equal(
            _replay(draft, features, slots, layout)[0, 0, 1],
            _replay(draft, features, changed, layout)[0, 0, 1],
        )
        != sees_later
    )


def test_a_padded_block_sees_no_context_whatever_its_anchor() -> None:
    """K3: padded rows still see themselves."""
    layout = make_layout([6], [[4]], block=2)
    padded = replace(layout, block_keep=torch.tensor([[False]]))
    assert visibility(layout, 4)[0, 0, :, :4].all()
    assert not visibility(padded, 4)[0, 0, :, :4].any()


def _changed(features: Tensor, slots: Tensor, block: int) -> bool:
    """Whether the block's output differs, in any bit, from the unperturbed one."""
    layout, draft = make_layout([12], [[3, 7]]), build_draft(draft_config())
    base = _replay(draft, *random_inputs(layout), layout)[0, block]
    return not torch.equal(base, _replay(draft, features, slots, layout)[0, block])


@pytest.mark.parametrize(
    ("position", "seen_by_3", "seen_by_7"),
    [(0, True, True), (2, True, True), (3, False, True), (6, False, True)],
)
def test_context_is_seen_strictly_before_the_anchor(
    position: int, seen_by_3: bool, seen_by_7: bool
) -> None:
    """K1: a future token must not leak into earlier slots."""
    features, slots = random_inputs(make_layout([12], [[3, 7]]))
    features[0, position] += 1.0
    assert (_changed(features, slots, 0), _changed(features, slots, 1)) == (seen_by_3, seen_by_7)


@pytest.mark.parametrize("position", [7, 8, 11])
def test_context_from_the_last_anchor_on_is_never_seen(position: int) -> None:
    features, slots = random_inputs(make_layout([12], [[3, 7]]))
    features[0, position] += 1.0
    assert not _changed(features, slots, 0)
    assert not _changed(features, slots, 1)


@pytest.mark.parametrize("slot", range(4))
def test_slots_are_seen_by_their_own_block_only(slot: int) -> None:
    layout = make_layout([12], [[3, 7]])
    draft = build_draft(draft_config())
    features, slots = random_inputs(layout)
    base = _replay(draft, features, slots, layout)
    slots[0, 1, slot] += 1.0
    moved = _replay(draft, features, slots, layout)
    assert torch.equal(base[0, 0], moved[0, 0])
    for j in range(4):  # before and after the perturbed slot
        assert not torch.equal(base[0, 1, j], moved[0, 1, j])


# -- independence of how a batch is put together ---------------------------------------------------


def test_padding_of_batch_context_and_blocks_does_not_matter() -> None:
    draft = build_draft(draft_config())
    rows = [(12, [3, 7, 9]), (5, [2]), (9, [1, 6])]
    layout = make_layout([length for length, _ in rows], [anchors for _, anchors in rows])
    features, slots = random_inputs(layout)
    batch = _replay(draft, features, slots, layout)
    for row, (length, anchors) in enumerate(rows):
        alone = make_layout([length], [anchors])
        context = features[row : row + 1, : max(anchors)]
        single = _replay(draft, context, slots[row : row + 1, : len(anchors)], alone)[0]
        torch.testing.assert_close(batch[row, : len(anchors)], single, rtol=1e-5, atol=1e-5)
        for block, anchor in enumerate(anchors):
            one = _replay(
                draft,
                context,
                slots[row : row + 1, block : block + 1],
                make_layout([length], [[anchor]]),
            )[0, 0]
            torch.testing.assert_close(batch[row, block], one, rtol=1e-5, atol=1e-5)


def test_padded_blocks_give_finite_values_and_no_gradient_of_their_own() -> None:
    draft = build_draft(draft_config())
    layout = make_layout([12, 5], [[3, 7], []])
    features, slots = random_inputs(layout)
    hidden = _replay(draft, features, slots, layout)
    assert bool(hidden.isfinite().all())
    hidden[layout.block_keep].square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in draft.named_parameters()}
    assert all(
        gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients.values()
    )

    alone = build_draft(draft_config())
    kept = make_layout([12], [[3, 7]])
    _replay(alone, features[:1], slots[:1], kept).square().sum().backward()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-4)


def test_a_micro_batch_without_blocks_reaches_every_parameter() -> None:
    draft = build_draft(draft_config())
    layout = make_layout([4], [[]])
    features, slots = random_inputs(layout)
    hidden = _replay(draft, features[:, : layout.context_len], slots, layout)
    assert bool(hidden.isfinite().all())
    (hidden.sum() * 0.0).backward()
    assert all(
        parameter.grad is not None and not parameter.grad.any() for parameter in draft.parameters()
    )


def test_gradient_checkpointing_changes_no_gradient() -> None:
    layout = make_layout([12, 5], [[3, 7], [2]])
    gradients = []
    for checkpointing in (False, True):
        draft = build_draft(draft_config()).train()
        draft.gradient_checkpointing = checkpointing
        _replay(draft, *random_inputs(layout), layout).square().sum().backward()
        gradients.append([parameter.grad for parameter in draft.parameters()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*gradients, strict=True))


def test_features_of_a_bfloat16_target_feed_a_float32_draft() -> None:
    layout = make_layout([12], [[3, 7]])
    features, slots = random_inputs(layout)
    draft = build_draft(draft_config())
    narrow = _replay(draft, features.bfloat16(), slots.bfloat16(), layout)
    assert narrow.dtype == torch.float32
    assert torch.equal(
        narrow, _replay(draft, features.bfloat16().float(), slots.bfloat16().float(), layout)
    )


# -- against a reference that shares no code -------------------------------------------------------


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate one head vector: component i and i + d/2 form a plane turned by position *
    theta^(-2i/d).
    """
    half = x.shape[-1] // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / (2 * half))
        a, b = x[..., i], x[..., i + half]
        out[..., i] = a * math.cos(angle) - b * math.sin(angle)
        out[..., i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def _reference_block(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    features: Tensor,
    slots: Tensor,
    anchor: int,
) -> Tensor:
    """One block [B, h] of one sample in float64: context keys and values straight from the normed
    features, slots through the layer's norm.
    """
    eps, theta, size = config["rms_norm_eps"], config["rope_theta"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    context = _norm(features[:anchor] @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x = slots
    for index in range(config["num_hidden_layers"]):
        w = {
            name.removeprefix(f"layers.{index}."): value
            for name, value in weights.items()
            if name.startswith(f"layers.{index}.")
        }
        inner = _norm(x, w["input_layernorm.weight"], eps)
        mixed = torch.zeros(len(x), heads * size, dtype=torch.float64)
        for head in range(heads):
            of_query = slice(head * size, (head + 1) * size)
            group = head // (heads // kv_heads)
            of_key = slice(group * size, (group + 1) * size)
            wk, wv = w["self_attn.k_proj.weight"][of_key], w["self_attn.v_proj.weight"][of_key]
            rows = [(context[c], c) for c in range(anchor)] + [
                (inner[j], anchor + j) for j in range(len(x))
            ]
            keys = torch.stack(
                [
                    _turn(_norm(wk @ row, w["self_attn.k_norm.weight"], eps), at, theta)
                    for row, at in rows
                ]
            )
            values = torch.stack([wv @ row for row, _ in rows])
            for j in range(len(x)):
                query = _norm(
                    w["self_attn.q_proj.weight"][of_query] @ inner[j],
                    w["self_attn.q_norm.weight"],
                    eps,
                )
                scores = keys @ _turn(query, anchor + j, theta) / math.sqrt(size)
                share = (scores - scores.max()).exp()
                mixed[j, of_query] = (share / share.sum()) @ values
        x = x + mixed @ w["self_attn.o_proj.weight"].T
        inner = _norm(x, w["post_attention_layernorm.weight"], eps)
        gate = inner @ w["mlp.gate_proj.weight"].T
        x = (
            x
            + (gate / (1 + (-gate).exp()) * (inner @ w["mlp.up_proj.weight"].T))
            @ w["mlp.down_proj.weight"].T
        )
    return _norm(x, weights["norm.weight"], eps)


def test_equals_a_block_by_block_reference() -> None:
    config = draft_config()
    draft = build_draft(config)
    weights = {name: tensor.double() for name, tensor in draft.state_dict().items()}
    layout = make_layout([40, 7], [[5, 6, 33], [1]])
    features, slots = random_inputs(layout)
    hidden = _replay(draft, features, slots, layout)
    for sample, anchors in enumerate([[5, 6, 33], [1]]):
        for block, anchor in enumerate(anchors):
            expected = _reference_block(
                weights, config, features[sample].double(), slots[sample, block].double(), anchor
            )
            torch.testing.assert_close(
                hidden[sample, block].double(), expected, rtol=1e-4, atol=1e-4
            )


def test_the_reference_tells_neighbouring_anchors_apart() -> None:
    """The tolerance above is far below what a shift by one position changes."""
    config = draft_config()
    weights = {name: tensor.double() for name, tensor in build_draft(config).state_dict().items()}
    features, slots = random_inputs(make_layout([40], [[5]]))
    at_5, at_6 = (
        _reference_block(weights, config, features[0].double(), slots[0, 0].double(), anchor)
        for anchor in (5, 6)
    )
    assert (at_5 - at_6).abs().max() > 0.1


# -- rotary embedding ------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(theta: float, dtype: torch.dtype) -> None:
    config = Qwen3Config(
        hidden_size=HIDDEN,
        head_dim=16,
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    positions = torch.tensor([[0, 1, 2, 40, 511, 4000, 32000]])
    x = torch.randn(1, 2, 7, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = Qwen3RotaryEmbedding(config)(x, positions)
    ours = rotation(positions, 16, theta, dtype)
    assert ours[0].dtype == dtype
    assert torch.equal(ours[0].squeeze(1), cos)
    assert torch.equal(ours[1].squeeze(1), sin)
    expected, _ = apply_rotary_pos_emb(x.float(), x.float(), cos.float(), sin.float())
    torch.testing.assert_close(rotate(x, ours), expected.to(dtype))


def test_a_bfloat16_draft_keeps_float32_angles() -> None:
    """bfloat16 cannot count beyond 256: positions 4000 and 4001 must still differ."""
    cos, _ = rotation(torch.tensor([[4000, 4001]]), 16, 10000.0, torch.bfloat16)
    assert abs(cos[0, 0, 0, 0].item() - math.cos(4000)) < 0.005
    assert abs(cos[0, 0, 1, 0].item() - math.cos(4001)) < 0.005
