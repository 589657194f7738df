"""Loading a draft into a live model and reading it back, on a model that fuses as vLLM's DFlash
does.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import get_family
from verl_opd.engines.worker.draft_loader import DraftLoader, live_tensors, target_checksum
from verl_opd.snapshot import checksum

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 16, 4, 2, 8, 24, 2
FAMILY = get_family("dflash")


class Leaf(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(*shape), requires_grad=False)


def node(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def layer() -> nn.Module:
    q_size, kv_size = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    attention = node(
        qkv_proj=Leaf(q_size + 2 * kv_size, HIDDEN),
        o_proj=Leaf(HIDDEN, q_size),
        q_norm=Leaf(HEAD_DIM),
        k_norm=Leaf(HEAD_DIM),
    )
    attention.q_size, attention.kv_size = q_size, kv_size
    mlp = node(gate_up_proj=Leaf(2 * INNER, HIDDEN), down_proj=Leaf(HIDDEN, INNER))
    return node(
        self_attn=attention,
        mlp=mlp,
        input_layernorm=Leaf(HIDDEN),
        post_attention_layernorm=Leaf(HIDDEN),
    )


class FusedInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = Leaf(40, HIDDEN)
        self.fc, self.hidden_norm, self.norm = Leaf(HIDDEN, 2 * HIDDEN), Leaf(HIDDEN), Leaf(HIDDEN)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self._fused_kv_bias = None
        self._build_fused_kv_buffers()

    def _build_fused_kv_buffers(self) -> None:
        attentions: list[Any] = [block.self_attn for block in self.layers]
        self._fused_kv_weight = torch.cat([a.qkv_proj.weight[a.q_size :] for a in attentions])
        self._k_norm_weights = torch.stack([a.k_norm.weight for a in attentions])


class FusedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = FusedInner()
        self.lm_head = Leaf(40, HIDDEN)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        targets = live_tensors(self, self.lm_head)
        for name, value in weights:
            targets[name].data.copy_(value)
        self.model._build_fused_kv_buffers()


def config() -> dict[str, Any]:
    target = SimpleNamespace(
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=6,
        vocab_size=40,
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        model_type="qwen3",
        rope_theta=10000.0,
        to_dict=lambda: {"rope_theta": 10000.0},
    )
    draft = DraftConfig(num_hidden_layers=LAYERS, mask_token_id=3, target_layer_ids=[1, 3])
    return FAMILY.derive_config(target, draft, 3)  # type: ignore[arg-type]


def draft_tensors(seed: int) -> dict[str, Tensor]:
    state = FAMILY.build(config(), seed=seed, init_std=0.2).state_dict()
    return {name: tensor.bfloat16().contiguous() for name, tensor in state.items()}


@pytest.fixture
def live() -> tuple[DraftLoader, FusedModel]:
    model = FusedModel()
    target = nn.ModuleList([model.lm_head, model.model.embed_tokens])  # lent to the draft
    return DraftLoader(
        SimpleNamespace(drafter=SimpleNamespace(model=model), get_model=lambda: target)
    ), model


def load(
    loader: DraftLoader,
    tensors: dict[str, Tensor],
    path: Path,
    version: int,
    announced: str | None = None,
) -> dict[str, Any]:
    save_file(tensors, path)
    return loader.load(str(path), version, announced or checksum(tensors))


def test_fused_parameters_carry_exactly_the_public_names_and_shapes(
    live: tuple[DraftLoader, FusedModel],
):
    found = {
        name: tuple(tensor.shape)
        for name, tensor in live_tensors(
            live[1], nn.ModuleList([live[1].lm_head, live[1].model.embed_tokens])
        ).items()
    }
    assert found == {name: tuple(tensor.shape) for name, tensor in draft_tensors(0).items()}


def test_what_was_loaded_is_read_back_from_the_fused_parameters(
    live: tuple[DraftLoader, FusedModel], tmp_path: Path
):
    loader, model = live
    assert loader.read_back()["version"] == -1
    tensors = draft_tensors(1)
    report = load(loader, tensors, tmp_path / "d", 4)
    assert report == {
        "version": 4,
        "checksum": checksum(tensors),
        "tensors": len(tensors),
        "fused_consistent": True,
    }
    q_size = HEADS * HEAD_DIM
    assert torch.equal(
        model.model.layers[1].self_attn.qkv_proj.weight[:q_size].bfloat16(),
        tensors["layers.1.self_attn.q_proj.weight"],
    )
    assert torch.equal(
        model.model.layers[0].mlp.gate_up_proj.weight[INNER:].bfloat16(),
        tensors["layers.0.mlp.up_proj.weight"],
    )
    model.model.norm.weight[0] += 1
    assert loader.read_back()["checksum"] != checksum(tensors)


def test_fused_copies_are_rebuilt_where_they_were(
    live: tuple[DraftLoader, FusedModel], tmp_path: Path
):
    """Captured graphs keep the address of the fused tensors, so new values have to arrive there."""
    loader, model = live
    held = (model.model._fused_kv_weight, model.model._k_norm_weights)
    addresses = [tensor.data_ptr() for tensor in held]
    tensors = draft_tensors(2)
    load(loader, tensors, tmp_path / "d", 1)
    assert model.model._fused_kv_weight is held[0]
    assert model.model._k_norm_weights is held[1]
    assert [tensor.data_ptr() for tensor in held] == addresses
    keys = tensors["layers.0.self_attn.k_proj.weight"]
    assert torch.equal(held[0][: keys.shape[0]].bfloat16(), keys)


@pytest.mark.parametrize("name", ["_fused_kv_weight", "_k_norm_weights"])
def test_a_stale_fused_copy_is_reported(
    live: tuple[DraftLoader, FusedModel], tmp_path: Path, name: str
):
    loader, model = live
    load(loader, draft_tensors(3), tmp_path / "d", 1)
    stale = getattr(model.model, name)
    stale.view(-1)[-1] += 1
    assert loader.read_back()["fused_consistent"] is False
    assert getattr(model.model, name) is stale


BROKEN = {
    "missing fc.weight": lambda t: t.pop("fc.weight"),
    "unexpected layers.7.mlp.up_proj.weight": lambda t: t.update(
        {"layers.7.mlp.up_proj.weight": torch.zeros(1, dtype=torch.bfloat16)}
    ),
    r"norm.weight is \(3,\) torch.bfloat16, the engine holds \(16,\)": lambda t: t.update(
        {"norm.weight": torch.zeros(3).bfloat16()}
    ),
    r"fc.weight is \(16, 32\) torch.float32": lambda t: t.update(
        {"fc.weight": t["fc.weight"].float()}
    ),
    "unexpected embed_tokens.weight": lambda t: t.update(
        {"embed_tokens.weight": torch.zeros(40, HIDDEN).bfloat16()}
    ),
    "unexpected model.lm_head.weight": lambda t: t.update(
        {"model.lm_head.weight": torch.zeros(40, HIDDEN).bfloat16()}
    ),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_what_does_not_fit_is_rejected_before_anything_changes(
    live: tuple[DraftLoader, FusedModel], tmp_path: Path, problem: str
):
    loader, model = live
    load(loader, draft_tensors(4), tmp_path / "good", 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = draft_tensors(5)
    BROKEN[problem](tensors)
    with pytest.raises(ValueError, match=problem):
        load(loader, tensors, tmp_path / "bad", 2)
    assert loader.version == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_file_with_another_checksum_is_rejected(
    live: tuple[DraftLoader, FusedModel], tmp_path: Path
):
    with pytest.raises(
        ValueError, match=f"checksum of the file is {checksum(draft_tensors(6))}, expected abc"
    ):
        load(live[0], draft_tensors(6), tmp_path / "d", 2, announced="abc")


def test_an_engine_without_speculation_is_named():
    with pytest.raises(RuntimeError, match="without a speculative_config"):
        DraftLoader(SimpleNamespace()).read_back()


def test_the_target_checksum_sees_one_changed_value():
    target = Leaf(4, 4)
    runner = SimpleNamespace(get_model=lambda: target)
    before = target_checksum(runner)
    target.weight[2, 3] = 1e-6
    assert target_checksum(runner) != before
