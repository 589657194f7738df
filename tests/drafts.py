"""Small DFlash drafts and hand-made layouts for unit tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import get_family
from verl_opd.opd.layout import Layout, Stream

VOCAB, HIDDEN, LAYERS, MASK = 97, 32, 8, 96
QWEN3_4B_DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "num_target_layers": 36,
    "num_hidden_layers": 5,
    "hidden_size": 2560,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "layer_types": ["full_attention"] * 5,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def target_config(kind: type[PretrainedConfig] = Qwen3Config, **changes: Any) -> PretrainedConfig:
    """A target of 8 layers, hidden 32, 4 heads and 2 KV heads of size 16."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "pad_token_id": 0,
    }
    return kind(**{**values, **changes})


def draft_config(
    block: int = 4, layer_ids: tuple[int, ...] = (1, 3, 5), target: PretrainedConfig | None = None
) -> dict[str, Any]:
    """config.json of a two-layer draft for `target_config()`."""
    keys = DraftConfig(mask_token_id=MASK, target_layer_ids=list(layer_ids), num_hidden_layers=2)
    return get_family("dflash").derive_config(target or target_config(LlamaConfig), keys, block - 1)


def build_draft(config: dict[str, Any], std: float = 0.2) -> nn.Module:
    """Weights, norms included, that are large and uneven enough for every
    structural fault to show.
    """
    draft = get_family("dflash").build(config, seed=3, init_std=std)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return draft


def make_layout(lengths: list[int], anchors: list[list[int]], block: int = 4) -> Layout:
    """A layout with these full-sequence anchors per sample, padded as the training step pads them,
    and no supervision.
    """
    blocks = max(1, *(len(row) for row in anchors))
    none = torch.zeros(0, dtype=torch.long)
    stream = Stream(none, none, none, none, none, torch.zeros(0))
    return Layout(
        input_ids=torch.zeros(len(lengths), max(lengths), dtype=torch.long),
        lengths=torch.tensor(lengths),
        anchors=torch.tensor([row + [0] * (blocks - len(row)) for row in anchors]),
        block_keep=torch.tensor([[i < len(row) for i in range(blocks)] for row in anchors]),
        block_tokens=torch.zeros(len(lengths), blocks, block, dtype=torch.long),
        block_size=block,
        response=stream,
        rejected=stream,
        drafted=stream,
        verified=stream,
    )


def random_inputs(layout: Layout, features: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(features [b, S, n*h], slot_embeds [b, N, B, h]) for a layout."""
    generator = torch.Generator().manual_seed(seed)
    samples, length = layout.input_ids.shape
    slots = (samples, layout.anchors.shape[1], layout.block_size, HIDDEN)
    return torch.randn(samples, length, features * HIDDEN, generator=generator), torch.randn(
        slots, generator=generator
    )


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a safetensors file, read from its header."""
    with safe_open(str(path), framework="pt") as file:
        names = list(file.keys())
        return {name: tuple(file.get_slice(name).get_shape()) for name in names}
