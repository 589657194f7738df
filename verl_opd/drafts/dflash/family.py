"""DFlash as a DraftFamily."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from transformers import PretrainedConfig

from verl_opd.config.schema import DraftConfig
from verl_opd.drafts.base import DraftFamily
from verl_opd.drafts.dflash import config as dflash_config
from verl_opd.drafts.dflash.model import DFlashDraft
from verl_opd.drafts.dflash.replay import layer_masks, slot_positions
from verl_opd.drafts.formats import Use
from verl_opd.drafts.layers import masked_block_embeds
from verl_opd.errors import ConfigError
from verl_opd.opd.layout import Layout


class DFlash(DraftFamily):
    name = "dflash"
    engine_method = "dflash"
    network = DFlashDraft

    def derive_config(
        self, target: PretrainedConfig, draft: DraftConfig, num_speculative_tokens: int
    ) -> dict[str, Any]:
        return dflash_config.derive_config(target, draft, num_speculative_tokens)

    def load_config(self, path: str, target: PretrainedConfig | None = None) -> dict[str, Any]:
        if (Path(path) / "mask_embedding.pt").exists():
            raise ConfigError(
                f"draft.path={path}: a separate mask embedding (mask_embedding.pt) is not "
                "supported; the target's row is used"
            )
        return super().load_config(path, target)

    def check(
        self,
        config: Mapping[str, Any],
        target: PretrainedConfig,
        num_speculative_tokens: int,
        allow_block_size_mismatch: bool,
    ) -> None:
        dflash_config.check(config, target, num_speculative_tokens, allow_block_size_mismatch)

    def layer_ids(self, config: Mapping[str, Any]) -> list[int]:
        return dflash_config.target_layer_ids(config)

    def mask_token_id(self, config: Mapping[str, Any]) -> int:
        return int(dflash_config.dflash_key(config, "mask_token_id"))

    def block_size(self, config: Mapping[str, Any], num_speculative_tokens: int) -> int:
        return int(dflash_config.dflash_key(config, "block_size"))

    def with_block(self, config: Mapping[str, Any], size: int) -> dict[str, Any]:
        return dflash_config.with_block(config, size)

    def shard_units(self, draft: nn.Module) -> list[nn.Module]:
        return list(cast(DFlashDraft, draft).layers)

    def inputs(
        self, config: Mapping[str, Any], embed: Callable[[Tensor], Tensor], layout: Layout
    ) -> Tensor:
        """Embeddings [b, N, B, h]: the anchor token, then mask tokens."""
        anchor_ids = layout.block_tokens[:, :, 0]  # [b, N]
        return masked_block_embeds(embed, self.mask_token_id(config), anchor_ids, layout.block_size)

    def replay(self, draft: nn.Module, features: Tensor, inputs: Tensor, layout: Layout) -> Tensor:
        """See DraftFamily.replay."""
        masks = layer_masks(layout, features.shape[1], cast(DFlashDraft, draft).attention)
        embeds = inputs.flatten(1, 2)  # [b, N*B, h]
        hidden: Tensor = draft(features, embeds, slot_positions(layout), masks)  # [b, N*B, h]
        return hidden

    def to_speculators(self, config: Mapping[str, Any], use: Use) -> dict[str, Any]:
        return dflash_config.to_speculators(config, use)

    def from_speculators(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return dflash_config.from_speculators(config)
