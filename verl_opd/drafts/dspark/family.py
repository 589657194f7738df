"""DSpark as a DraftFamily."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from verl_opd.config.schema import DraftConfig
from verl_opd.drafts.base import DraftFamily, OwnHead
from verl_opd.drafts.dflash.replay import layer_masks, slot_positions
from verl_opd.drafts.dspark import config as dspark_config
from verl_opd.drafts.dspark.model import DSparkDraft
from verl_opd.drafts.formats import Use
from verl_opd.drafts.layers import masked_block_embeds
from verl_opd.errors import ConfigError
from verl_opd.opd.layout import Layout


class DSpark(DraftFamily):
    name = "dspark"
    engine_method = "dspark"
    network = DSparkDraft
    copies = ("embed_tokens.weight", "lm_head.weight")
    autoregressive = True
    v2_runner = True
    confidence_prefix = "dspark_"

    def derive_config(
        self, target: PretrainedConfig, draft: DraftConfig, num_speculative_tokens: int
    ) -> dict[str, Any]:
        return dspark_config.derive_config(target, draft, num_speculative_tokens)

    def check(
        self,
        config: Mapping[str, Any],
        target: PretrainedConfig,
        num_speculative_tokens: int,
        allow_block_size_mismatch: bool,
    ) -> None:
        dspark_config.check(config, target, num_speculative_tokens)

    def layer_ids(self, config: Mapping[str, Any]) -> list[int]:
        return list(config["target_layer_ids"])

    def mask_token_id(self, config: Mapping[str, Any]) -> int:
        return int(config["mask_token_id"])

    def shard_units(self, draft: nn.Module) -> list[nn.Module]:
        return list(cast(DSparkDraft, draft).layers)

    def inputs(
        self, config: Mapping[str, Any], embed: Callable[[Tensor], Tensor], layout: Layout
    ) -> Tensor:
        """Embeddings [b, N, K, h]: the anchor token, then mask tokens; one slot per proposal."""
        anchor_ids = layout.block_tokens[:, :, 0]  # [b, N]
        slots = layout.block_size - 1
        return masked_block_embeds(embed, self.mask_token_id(config), anchor_ids, slots)

    def replay(self, draft: nn.Module, features: Tensor, inputs: Tensor, layout: Layout) -> Tensor:
        """Hidden states [b, N*B, h + r], see DSparkDraft.forward.

        The engine's slot i, at position anchor + i, predicts the token at anchor + 1 + i. In a
        layout a slot is at the position that it predicts, so it becomes slot i + 1.
        """
        proposals = replace(layout, block_size=layout.block_size - 1)  # blocks of K = B - 1 slots
        masks = layer_masks(proposals, features.shape[1], cast(DSparkDraft, draft).attention)
        embeds = inputs.flatten(1, 2)  # [b, N*K, h]
        before = layout.block_tokens[:, :, :-1].flatten(1)  # [b, N*K]: token before the predicted
        hidden = draft(features, embeds, slot_positions(proposals), masks, before)
        blocks = hidden.unflatten(1, (-1, proposals.block_size))  # [b, N, K, h + r]
        anchors = torch.zeros_like(blocks[:, :, :1])  # [b, N, 1, h + r]
        return torch.cat((anchors, blocks), dim=2).flatten(1, 2)  # [b, N*B, h + r]

    def own_head(self, draft: nn.Module, target_head: Tensor) -> OwnHead:
        """[V, h + r]: the target's frozen head beside the trainable bias."""
        bias = cast(DSparkDraft, draft).markov_head.markov_w2.weight  # [V, r]
        weight = torch.cat((target_head.detach(), bias.to(target_head.dtype)), dim=1)
        return OwnHead(weight, None)

    def confidence(self, draft: nn.Module) -> Callable[[Tensor], Tensor] | None:
        return getattr(draft, "confidence_head", None)

    def to_format(
        self, config: Mapping[str, Any], format: str, use: Use
    ) -> tuple[dict[str, Any], Callable[[str], str]]:
        if format == "sglang":
            raise ConfigError("SGLang does not draft with DSpark: use --format vllm or speculators")
        return super().to_format(config, format, use)

    def to_speculators(self, config: Mapping[str, Any], use: Use) -> dict[str, Any]:
        return dspark_config.to_speculators(config, use)

    def from_speculators(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return dspark_config.from_speculators(config)
