"""DSpark as a DraftFamily."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import files
from verl_opd.drafts.base import DraftFamily, OwnHead
from verl_opd.drafts.dflash.replay import slot_positions, visibility
from verl_opd.drafts.dspark import config as dspark_config
from verl_opd.drafts.dspark.model import DSparkDraft
from verl_opd.drafts.formats import Use
from verl_opd.drafts.layers import masked_block_embeds
from verl_opd.errors import ConfigError
from verl_opd.opd.layout import Layout


class DSpark(DraftFamily):
    name = "dspark"
    engine_method = "dspark"
    autoregressive = True
    v2_runner = True
    target_copies = ("embed_tokens.weight", "lm_head.weight")
    metric_prefix = "dspark_"

    def derive_config(
        self, target: PretrainedConfig, draft: DraftConfig, num_speculative_tokens: int
    ) -> dict[str, Any]:
        return dspark_config.derive_config(target, draft, num_speculative_tokens)

    def load_config(self, path: str, target: PretrainedConfig | None = None) -> dict[str, Any]:
        return dspark_config.from_speculators(files.read_config(path))

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

    def network(self, config: Mapping[str, Any]) -> nn.Module:
        return DSparkDraft(config)

    def shard_units(self, draft: nn.Module) -> list[nn.Module]:
        return list(cast(DSparkDraft, draft).layers)

    def inputs(
        self, config: Mapping[str, Any], embed: Callable[[Tensor], Tensor], layout: Layout
    ) -> Tensor:
        """Embeddings [b, N, K, h]: the anchor token, then mask tokens; one slot per proposal."""
        return masked_block_embeds(
            embed, self.mask_token_id(config), layout.block_tokens[:, :, 0], layout.block_size - 1
        )

    def replay(self, draft: nn.Module, features: Tensor, inputs: Tensor, layout: Layout) -> Tensor:
        """The engine's slot i, at position anchor + i, predicts anchor + 1 + i: it becomes slot i +
        1 of a layout whose slots stand where they predict.
        """
        module, slots = cast(DSparkDraft, draft), replace(layout, block_size=layout.block_size - 1)
        # per kind of layer [b, 1, N*K, C + N*K]
        masks = {
            kind: visibility(slots, features.shape[1], *kind) for kind in set(module.attention)
        }
        per_layer = [masks[kind] for kind in module.attention]
        before = layout.block_tokens[:, :, :-1].flatten(1)  # [b, N*K], the token before each one
        embeds = inputs.flatten(1, 2)  # [b, N*K, h]
        hidden = module(features, embeds, slot_positions(slots), per_layer, before)
        shifted = hidden.unflatten(1, (-1, slots.block_size))  # [b, N, K, h + r]
        return torch.cat((torch.zeros_like(shifted[:, :, :1]), shifted), dim=2).flatten(1, 2)

    def own_head(self, draft: nn.Module, target_head: Tensor) -> OwnHead:
        """[V, h + r]: the target's frozen head beside the trainable bias."""
        bias = cast(DSparkDraft, draft).markov_head.markov_w2.weight
        return OwnHead(torch.cat((target_head.detach(), bias.to(target_head.dtype)), dim=1), None)

    def confidence(self, draft: nn.Module) -> Callable[[Tensor], Tensor] | None:
        return getattr(draft, "confidence_head", None)

    def to_format(
        self, config: Mapping[str, Any], format: str, use: Use
    ) -> tuple[dict[str, Any], Callable[[str], str]]:
        if format == "sglang":
            raise ConfigError("SGLang does not draft with DSpark: use --format vllm or speculators")
        if format == "speculators":
            return dspark_config.to_speculators(config, use), str
        return dict(config), str
