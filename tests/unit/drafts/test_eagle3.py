"""EAGLE-3: config, replay against a step-by-step reference, own head and draft vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from tests.drafts import HIDDEN, VOCAB, make_layout, target_config
from tests.options import planned
from tests.rollouts import worked_sample
from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import get_family
from verl_opd.drafts.base import OwnHead, Vocabulary
from verl_opd.drafts.files import write_draft
from verl_opd.errors import ConfigError
from verl_opd.opd.losses import FULL_VOCABULARY
from verl_opd.targets.head import TargetHead
from verl_opd.training.lm_head import against_target, own_logprobs, own_row_loss
from verl_opd.training.scoring import Scorer

FAMILY = get_family("eagle3")
BLOCK = 5


def eagle_config(**changes: Any) -> dict[str, Any]:
    config = FAMILY.derive_config(
        target_config(LlamaConfig), DraftConfig(target_layer_ids=[1, 3, 5]), BLOCK - 1
    )
    return {**config, **changes}


def uneven(draft: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return draft


def eagle_draft(**changes: Any) -> nn.Module:
    return uneven(FAMILY.build(eagle_config(**changes), seed=3, init_std=0.2))


# -- the network, written out one query at a time in float64 ---------------------------------------


def norm(weight: Tensor, x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turn(x: Tensor, position: int) -> Tensor:
    """Rotary embedding of one head vector, pairs (i, i + d/2)."""
    half = x.shape[-1] // 2
    angles = position / 50000.0 ** (torch.arange(half, dtype=torch.float64) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class Reference:
    """Keeps keys and values as an engine's cache would: rows of the context, then of one chain."""

    def __init__(self, draft: nn.Module, config: dict[str, Any]) -> None:
        self.w = {name: tensor.double() for name, tensor in draft.state_dict().items()}
        self.config, self.keys, self.values = config, [], []

    def row(self, embed: Tensor, hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """(normed, raw) output [h] of one new row, which sees every row before it."""
        w, heads, kv = self.w, 4, 2
        g = norm(w["midlayer.hidden_norm.weight"], hidden)
        residual = g if self.config["norm_before_residual"] else hidden
        x = torch.cat((norm(w["midlayer.input_layernorm.weight"], embed), g))
        q, k, v = (w[f"midlayer.self_attn.{p}_proj.weight"] @ x for p in "qkv")
        self.keys.append(turn(k.view(kv, -1), position))
        self.values.append(v.view(kv, -1))
        q = turn(q.view(heads, -1), position)
        out = []
        for head in range(heads):
            scores = (
                torch.stack([q[head] @ key[head // 2] for key in self.keys]) / q.shape[-1] ** 0.5
            )
            out.append(
                sum(
                    p * value[head // 2]
                    for p, value in zip(scores.softmax(0), self.values, strict=True)
                )
            )
        x = residual + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(out)
        y = norm(w["midlayer.post_attention_layernorm.weight"], x)
        gate = w["midlayer.mlp.gate_proj.weight"] @ y
        x = x + w["midlayer.mlp.down_proj.weight"] @ (
            gate * gate.sigmoid() * (w["midlayer.mlp.up_proj.weight"] @ y)
        )
        return norm(w["norm.weight"], x), x

    def fuse(self, feature: Tensor) -> Tensor:
        if self.config["fc_norm"]:
            parts = feature.chunk(3)
            feature = torch.cat(
                [norm(self.w[f"fc_norm.{i}.weight"], part) for i, part in enumerate(parts)]
            )
        return self.w["fc.weight"] @ feature

    def block(self, features: Tensor, context: Tensor, block: Tensor, anchor: int) -> Tensor:
        """[B, h] of one block; slot 0 is zero."""
        self.keys, self.values = [], []
        for x in range(anchor):
            normed, raw = self.row(context[x], self.fuse(features[x]), x)
        slots = [torch.zeros(HIDDEN, dtype=torch.float64), normed]
        for step in range(1, BLOCK - 1):
            normed, raw = self.row(
                block[step], normed if self.config["norm_output"] else raw, anchor + step - 1
            )
            slots.append(normed)
        return torch.stack(slots)


def problem() -> tuple[Any, Tensor, tuple[Tensor, Tensor]]:
    layout = make_layout([9, 6], [[2, 5, 7], [1, 4]], BLOCK)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, layout.context_len, 3 * HIDDEN, generator=generator)
    context = torch.randn(2, layout.context_len, HIDDEN, generator=generator)
    return layout, features, (context, torch.randn(2, 3, BLOCK - 1, HIDDEN, generator=generator))


@pytest.mark.parametrize(
    "switch",
    [{}, {"norm_before_residual": True}, {"fc_norm": True}, {"norm_output": True}],
    ids=str,
)
def test_replay_is_the_chain_an_engine_drafts(switch: dict[str, bool]) -> None:
    draft, (layout, features, inputs) = eagle_draft(**switch), problem()
    found = FAMILY.replay(draft, features, inputs, layout).unflatten(1, (3, BLOCK))
    reference = Reference(draft, eagle_config(**switch))
    context, blocks = (part.double() for part in inputs)
    for sample, anchors in enumerate([[2, 5, 7], [1, 4]]):
        for index, anchor in enumerate(anchors):
            expected = reference.block(
                features[sample].double(), context[sample], blocks[sample, index], anchor
            )
            torch.testing.assert_close(
                found[sample, index].double(), expected, atol=2e-5, rtol=1e-4
            )


def test_a_block_sees_its_context_and_its_own_chain_only() -> None:
    draft, (layout, features, (context, blocks)) = eagle_draft(), problem()
    plain = FAMILY.replay(draft, features, (context, blocks), layout).unflatten(1, (3, BLOCK))
    later, other = features.clone(), blocks.clone()
    later[0, 5:] += 1  # at and after the anchor of block 1
    other[0, 2] += 1
    moved = FAMILY.replay(draft, later, (context, other), layout).unflatten(1, (3, BLOCK))
    assert torch.equal(moved[0, :2], plain[0, :2])
    assert not torch.equal(moved[0, 2], plain[0, 2])
    tail = blocks.clone()
    tail[0, 1, 3] += 1  # the last proposal that is fed: only the slot after it may change
    moved = FAMILY.replay(draft, features, (context, tail), layout).unflatten(1, (3, BLOCK))
    assert torch.equal(moved[0, 1, :4], plain[0, 1, :4])
    assert not torch.equal(moved[0, 1, 4], plain[0, 1, 4])


def test_padded_blocks_and_empty_contexts_stay_finite() -> None:
    draft, layout = eagle_draft(), make_layout([1], [[]], BLOCK)
    nothing = torch.zeros(1, 0, 3 * HIDDEN)
    hidden = FAMILY.replay(
        draft, nothing, (torch.zeros(1, 0, HIDDEN), torch.ones(1, 1, BLOCK - 1, HIDDEN)), layout
    )
    (hidden.sum() * 0.0 + draft.lm_head.weight.sum() * 0.0).backward()
    assert all(
        parameter.grad is not None and torch.isfinite(parameter.grad).all()
        for parameter in draft.parameters()
    )
    first = make_layout([3], [[0]], BLOCK)
    with pytest.raises(ValueError, match="position 0"):
        FAMILY.replay(
            draft,
            torch.zeros(1, 1, 3 * HIDDEN),
            (torch.zeros(1, 1, HIDDEN), torch.ones(1, 1, BLOCK - 1, HIDDEN)),
            first,
        )


def test_gradient_checkpointing_changes_nothing() -> None:
    layout, features, inputs = problem()
    gradients = []
    for checkpointing in (False, True):
        draft = eagle_draft().train()
        draft.gradient_checkpointing = checkpointing
        FAMILY.replay(draft, features, inputs, layout).square().sum().backward()
        gradients.append(
            {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=0, rtol=0)


def test_labels_of_a_drafted_chain_end_with_the_correction() -> None:
    """After the first rejected proposal the chain has read other tokens than the response holds:
    its next token is not a label there.
    """
    plan = planned(worked_sample(), block_size=4, response_span="block", autoregressive=True)
    supervised = [
        (plan.anchors[b], o) for b, o in zip(plan.response_block, plan.response_offset, strict=True)
    ]
    assert supervised == [(0, 1), (0, 2), (2, 1), (2, 2), (2, 3), (6, 1)]
    assert FAMILY.autoregressive
    assert not get_family("dflash").autoregressive


# -- config and files ------------------------------------------------------------------------------


def test_derived_config_passes_its_own_check_and_names_the_engines_layers() -> None:
    config = eagle_config()
    FAMILY.check(config, target_config(LlamaConfig), 4, False)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert FAMILY.layer_ids(config) == [1, 3, 5]
    assert FAMILY.block_size(config, 4) == 5
    assert FAMILY.mask_token_id(config) is None


def test_a_public_config_without_layers_means_the_engines_default(tmp_path: Path) -> None:
    public = eagle_config()
    for name in ("eagle_aux_hidden_state_layer_ids", "num_target_layers"):
        del public[name]
    (tmp_path / "config.json").write_text(json.dumps(public))
    config = FAMILY.load_config(str(tmp_path), target_config(LlamaConfig, num_hidden_layers=36))
    assert FAMILY.layer_ids(config) == [1, 17, 32]  # vLLM: 2, 36 // 2, 36 - 3
    with pytest.raises(ConfigError, match="eagle_aux_hidden_state_layer_ids"):
        FAMILY.layer_ids(FAMILY.load_config(str(tmp_path)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"parallel_drafting": True}, "parallel_drafting=True"),
        ({"target_hidden_size": 64}, "target_hidden_size=64"),
        ({"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel"),
        ({"hidden_size": 48}, "hidden_size is 48 in the draft and 32"),
        ({"vocab_size": 60}, f"vocab_size is 60 in the draft and {VOCAB}"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0"),
        ({"draft_vocab_size": -1}, "draft_vocab_size=-1"),
        ({"draft_vocab_size": 4.0}, "draft_vocab_size=4.0"),
        ({"draft_vocab_size": VOCAB + 1}, f"draft_vocab_size={VOCAB + 1}"),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 6]}, "[3, 1, 5]"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}, "[-1, 1, 5]"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "[1, 3, 8]"),
        ({"rope_theta": None}, "rope_theta"),
        ({"intermediate_size": None}, "intermediate_size"),
    ],
)
def test_what_would_not_be_replayed_is_unsupported(change: dict[str, Any], named: str) -> None:
    """C7, C10, B2 and K9 of docs/known_faults.md among them: vocabulary sizes, foreign
    vocabularies, layer ids, a guessed rope base.
    """
    config = {**eagle_config(), "target_hidden_size": HIDDEN, **change}
    if change.get("hidden_size"):
        config["target_hidden_size"] = change["hidden_size"]
    with pytest.raises(ConfigError) as caught:
        FAMILY.check(config, target_config(LlamaConfig), 4, False)
    assert named in str(caught.value)


PROPOSABLE = torch.tensor([0, 3, 4, 9, 20, 50, 96])


def pruned_draft() -> nn.Module:
    draft = eagle_draft(draft_vocab_size=len(PROPOSABLE))
    draft.d2t.copy_(PROPOSABLE - torch.arange(len(PROPOSABLE)))
    draft.t2d[PROPOSABLE] = True
    return draft


def test_token_maps_survive_save_and_load(tmp_path: Path) -> None:
    """C1 and C2: d2t holds offsets and is part of every file; weights are bf16, maps are not."""
    draft = pruned_draft()
    config = eagle_config(draft_vocab_size=len(PROPOSABLE))
    write_draft(draft.state_dict(), config, tmp_path / "draft")
    again = FAMILY.build(FAMILY.load_config(str(tmp_path / "draft")), seed=0, init_std=0.0)
    FAMILY.load_weights(again, str(tmp_path / "draft"))
    assert torch.equal(again.d2t, draft.d2t)
    assert torch.equal(again.t2d, draft.t2d)
    assert torch.equal(again.lm_head.weight, draft.lm_head.weight.bfloat16().float())
    vocabulary = FAMILY.vocabulary(config, str(tmp_path / "draft"))
    assert vocabulary.token_ids.tolist() == PROPOSABLE.tolist()
    assert bool(again.t2d[vocabulary.token_ids].all())
    with pytest.raises(ConfigError, match=r"draft\.path"):
        FAMILY.vocabulary(config, None)


def test_without_a_vocabulary_of_its_own_there_is_no_map() -> None:
    """C4: an identity map would be applied at every step."""
    assert not {"d2t", "t2d"} & set(eagle_draft().state_dict())
    assert FAMILY.vocabulary(eagle_config(), None) is None


def test_an_embedding_of_its_own_is_unsupported_and_the_targets_is_not(tmp_path: Path) -> None:
    draft, table = (
        eagle_draft(),
        torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9)).bfloat16().float(),
    )
    for name, brought in (("same", table), ("other", table.roll(1, dims=0))):
        write_draft(
            {**draft.state_dict(), "embed_tokens.weight": brought}, eagle_config(), tmp_path / name
        )
    FAMILY.load_weights(eagle_draft(), str(tmp_path / "same"), {"embed_tokens.weight": table})
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight differs"):
        FAMILY.load_weights(eagle_draft(), str(tmp_path / "other"), {"embed_tokens.weight": table})


def test_a_pruned_head_without_its_map_is_an_error(tmp_path: Path) -> None:
    state = pruned_draft().state_dict()
    del state["d2t"]
    write_draft(state, eagle_config(draft_vocab_size=len(PROPOSABLE)), tmp_path / "draft")
    with pytest.raises(ConfigError, match="d2t, which is missing"):
        FAMILY.vocabulary(eagle_config(draft_vocab_size=len(PROPOSABLE)), str(tmp_path / "draft"))
    with pytest.raises(ConfigError, match="missing d2t"):
        FAMILY.load_weights(eagle_draft(draft_vocab_size=len(PROPOSABLE)), str(tmp_path / "draft"))


# -- the draft's own head --------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [2, 100])
def test_own_head_logprobs_and_gradients_equal_float64(chunk: int) -> None:
    torch.manual_seed(0)
    rows, weight, labels = (
        torch.randn(7, 12),
        torch.randn(30, 12),
        torch.tensor([0, 29, 5, 5, 7, 1, 2]),
    )
    ours, head = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    values = own_logprobs(ours, head, labels, chunk)
    values.backward(torch.linspace(-1, 1, 7))
    wide, wide_head = rows.double().requires_grad_(), weight.double().requires_grad_()
    expected = torch.log_softmax(wide @ wide_head.T, 1).gather(1, labels.unsqueeze(1)).squeeze(1)
    expected.backward(torch.linspace(-1, 1, 7).double())
    torch.testing.assert_close(values.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.grad.double(), wide.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(head.grad.double(), wide_head.grad, atol=1e-5, rtol=1e-4)
    assert own_logprobs(ours[:0], head, labels[:0], chunk).shape == (0,)


def test_full_vocabulary_losses_restrict_the_target_to_the_draft_vocabulary() -> None:
    torch.manual_seed(0)
    rows, teacher, own, target = (
        torch.randn(4, 12),
        torch.randn(4, 12),
        torch.randn(3, 12),
        torch.randn(20, 12),
    )
    ids = torch.tensor([2, 11, 19])
    p, q = (
        (x.double() @ w.double().T).softmax(1) for x, w in ((teacher, target[ids]), (rows, own))
    )
    values = own_row_loss(
        rows, own, against_target(FULL_VOCABULARY["full_forward_kl"], target[ids]), 3, teacher
    )[:, 0]
    torch.testing.assert_close(values.double(), (p * (p / q).log()).sum(1), atol=1e-5, rtol=1e-4)


def test_tokens_are_mapped_into_the_draft_vocabulary() -> None:
    rows, own, target = torch.eye(3), torch.diag(torch.tensor([3.0, 2.0, 1.0])), torch.zeros(20, 3)
    head = Scorer(
        TargetHead(target, target), OwnHead(own, Vocabulary(torch.tensor([2, 11, 19]))), 8
    )
    assert head.gaps(rows, torch.tensor([2, 11, 2])).tolist() == [0.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="token 5 is supervised"):
        head.gaps(rows, torch.tensor([2, 5, 2]))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"mask_token_id": 3}, "mask_token_id=3"),
        ({"block_size": 5}, "block_size=5"),
    ],
)
def test_keys_that_mean_nothing_here_are_an_error(keys: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        FAMILY.derive_config(target_config(LlamaConfig), DraftConfig(**keys), 4)


def test_a_target_layer_default_for_a_new_draft() -> None:
    assert FAMILY.layer_ids(FAMILY.derive_config(target_config(LlamaConfig), DraftConfig(), 4)) == [
        1,
        3,
        4,
    ]
