"""DFlash as a DraftFamily."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from transformers import PretrainedConfig

from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import files
from verl_opd.drafts.base import DraftFamily
from verl_opd.drafts.dflash import config as dflash_config
from verl_opd.drafts.dflash.model import DFlashDraft
from verl_opd.drafts.dflash.replay import slot_positions, visibility
from verl_opd.drafts.formats import Use
from verl_opd.drafts.layers import masked_block_embeds
from verl_opd.errors import ConfigError
from verl_opd.opd.layout import Layout


class DFlash(DraftFamily):
    name = "dflash"
    engine_method = "dflash"

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
        return dflash_config.from_speculators(files.read_config(path))

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

    def network(self, config: Mapping[str, Any]) -> nn.Module:
        return DFlashDraft(config)

    def shard_units(self, draft: nn.Module) -> list[nn.Module]:
        return list(cast(DFlashDraft, draft).layers)

    def inputs(
        self, config: Mapping[str, Any], embed: Callable[[Tensor], Tensor], layout: Layout
    ) -> Tensor:
        """Embeddings [b, N, B, h]: the anchor token, then mask tokens."""
        return masked_block_embeds(
            embed, self.mask_token_id(config), layout.block_tokens[:, :, 0], layout.block_size
        )

    def replay(self, draft: nn.Module, features: Tensor, inputs: Tensor, layout: Layout) -> Tensor:
        attention = cast(DFlashDraft, draft).attention
        # per kind of layer [b, 1, N*B, C + N*B]
        masks = {kind: visibility(layout, features.shape[1], *kind) for kind in set(attention)}
        per_layer = [masks[kind] for kind in attention]
        slots = inputs.flatten(1, 2)  # [b, N*B, h]
        hidden: Tensor = draft(features, slots, slot_positions(layout), per_layer)
        return hidden

    def to_format(
        self, config: Mapping[str, Any], format: str, use: Use
    ) -> tuple[dict[str, Any], Callable[[str], str]]:
        if format == "speculators":
            return dflash_config.to_speculators(config, use), str
        return dict(config), str
