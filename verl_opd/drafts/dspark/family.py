"""DSpark as a DraftFamily."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import files
from verl_opd.drafts.base import OwnHead
from verl_opd.drafts.dflash.replay import slot_positions, visibility
from verl_opd.drafts.dspark import config as dspark_config
from verl_opd.drafts.dspark.model import DSparkDraft
from verl_opd.drafts.formats import Use
from verl_opd.drafts.layers import masked_block_embeds, random_init
from verl_opd.errors import ConfigError
from verl_opd.opd.layout import Layout


class DSpark:
    name = "dspark"
    engine_method = "dspark"
    engine_names = ()
    has_own_head = False
    autoregressive = True
    v2_runner = True

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

    def block_size(self, config: Mapping[str, Any], num_speculative_tokens: int) -> int:
        return num_speculative_tokens + 1

    def with_block(self, config: Mapping[str, Any], size: int) -> dict[str, Any]:
        raise ConfigError(
            f"draft.block_size={size}: blocks of this family are as long as "
            "rollout.num_speculative_tokens; leave the key out"
        )

    def build(self, config: Mapping[str, Any], *, seed: int, init_std: float) -> nn.Module:
        draft = DSparkDraft(config)
        random_init(draft, seed, init_std)
        return draft

    def load_weights(
        self, draft: nn.Module, path: str, frozen: Mapping[str, Tensor] | None = None
    ) -> None:
        files.load_into(draft, path, frozen, ("embed_tokens.weight", "lm_head.weight"))

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
        masks = {
            kind: visibility(slots, features.shape[1], *kind) for kind in set(module.attention)
        }
        before = layout.block_tokens[:, :, :-1].flatten(1)
        hidden = module(
            features,
            inputs.flatten(1, 2),
            slot_positions(slots),
            [masks[kind] for kind in module.attention],
            before,
        )
        shifted = hidden.unflatten(1, (-1, slots.block_size))
        return torch.cat((torch.zeros_like(shifted[:, :, :1]), shifted), dim=2).flatten(1, 2)

    def own_head(self, draft: nn.Module, target_head: Tensor) -> OwnHead:
        """[V, h + r]: the target's frozen head beside the trainable bias."""
        bias = cast(DSparkDraft, draft).markov_head.markov_w2.weight
        return OwnHead(torch.cat((target_head.detach(), bias.to(target_head.dtype)), dim=1), None)

    def confidence(self, draft: nn.Module) -> Callable[[Tensor], Tensor] | None:
        return getattr(draft, "confidence_head", None)

    def vocabulary(self, config: Mapping[str, Any], path: str | None) -> None:
        return None

    def for_reader(
        self, config: Mapping[str, Any], reader: str, use: Use
    ) -> tuple[dict[str, Any], Callable[[str], str]]:
        if reader == "sglang":
            raise ConfigError("SGLang does not draft with DSpark: use --reader vllm or speculators")
        return dspark_config.to_speculators(config, use) if reader == "speculators" else dict(
            config
        ), str

    def save_pretrained(
        self, state: Mapping[str, Tensor], config: Mapping[str, Any], path: Path
    ) -> None:
        files.write_draft(state, config, path)
