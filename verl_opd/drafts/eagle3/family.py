"""EAGLE-3 as a DraftFamily."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import files
from verl_opd.drafts.base import OwnHead, Vocabulary
from verl_opd.drafts.eagle3 import config as eagle3_config
from verl_opd.drafts.eagle3.model import Eagle3Draft
from verl_opd.drafts.formats import Use
from verl_opd.drafts.layers import random_init
from verl_opd.errors import ConfigError
from verl_opd.opd.layout import Layout

_PUBLIC = "layers.0."  # what other files call the one layer


class Eagle3:
    name = "eagle3"
    engine_method = "eagle3"
    engine_names = ((_PUBLIC, "midlayer."),)
    has_own_head = True
    autoregressive = True
    v2_runner = False

    def derive_config(
        self, target: PretrainedConfig, draft: DraftConfig, num_speculative_tokens: int
    ) -> dict[str, Any]:
        return eagle3_config.derive_config(target, draft)

    def load_config(self, path: str, target: PretrainedConfig | None = None) -> dict[str, Any]:
        config = eagle3_config.from_speculators(files.read_config(path))
        if target is not None:  # public drafts leave the depth of their target to the engine
            config.setdefault("num_target_layers", target.num_hidden_layers)
        return config

    def check(
        self,
        config: Mapping[str, Any],
        target: PretrainedConfig,
        num_speculative_tokens: int,
        allow_block_size_mismatch: bool,
    ) -> None:
        eagle3_config.check(config, target)

    def layer_ids(self, config: Mapping[str, Any]) -> list[int]:
        return eagle3_config.target_layer_ids(config)

    def mask_token_id(self, config: Mapping[str, Any]) -> None:
        return None

    def block_size(self, config: Mapping[str, Any], num_speculative_tokens: int) -> int:
        return num_speculative_tokens + 1

    def with_block(self, config: Mapping[str, Any], size: int) -> dict[str, Any]:
        raise ConfigError(
            f"draft.block_size={size}: blocks of this family are as long as "
            "rollout.num_speculative_tokens; leave the key out"
        )

    def build(self, config: Mapping[str, Any], *, seed: int, init_std: float) -> nn.Module:
        draft = Eagle3Draft(config)
        random_init(draft, seed, init_std)
        return draft

    def load_weights(
        self, draft: nn.Module, path: str, frozen: Mapping[str, Tensor] | None = None
    ) -> None:
        files.load_into(
            draft,
            path,
            frozen,
            ("embed_tokens.weight",),
            lambda name: name.replace(_PUBLIC, "midlayer.", 1),
        )

    def shard_units(self, draft: nn.Module) -> list[nn.Module]:
        return []  # one layer and its head: the root is the unit

    def inputs(
        self, config: Mapping[str, Any], embed: Callable[[Tensor], Tensor], layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """(embeddings of the token after each context row [b, C, h], of each block's anchor and
        proposals [b, N, B-1, h]).
        """
        count = layout.context_len
        return embed(layout.input_ids[:, 1 : count + 1]), embed(layout.block_tokens[:, :, :-1])

    def replay(
        self, draft: nn.Module, features: Tensor, inputs: tuple[Tensor, Tensor], layout: Layout
    ) -> Tensor:
        if bool(((layout.anchors == 0) & layout.block_keep).any()):
            raise ValueError(
                "EAGLE-3 drafts from the token before the anchor: a block anchored at position 0 "
                "has none"
            )
        context, blocks = inputs
        if (
            features.shape[1] == 0
        ):  # nothing is supervised: a context of one row keeps every weight in the graph
            features, context = (
                features.new_zeros(features.shape[0], 1, features.shape[2]),
                blocks[:, 0, :1],
            )
        hidden: Tensor = draft(features, context, blocks, layout.anchors)
        return hidden.flatten(1, 2)

    def own_head(self, draft: nn.Module, target_head: Tensor) -> OwnHead:
        module = cast(Eagle3Draft, draft)
        vocabulary = (
            Vocabulary(module.d2t + torch.arange(len(module.d2t), device=module.d2t.device))
            if hasattr(module, "d2t")
            else None
        )
        return OwnHead(module.lm_head.weight, vocabulary)

    def confidence(self, draft: nn.Module) -> None:
        return None

    def vocabulary(self, config: Mapping[str, Any], path: str | None) -> Vocabulary | None:
        if eagle3_config.draft_vocab_size(config) == config["vocab_size"]:
            return None
        if path is None:
            raise ConfigError(
                "a draft vocabulary smaller than the target's comes with a draft: name its "
                "directory as draft.path"
            )
        d2t = files.read_weights(path).get("d2t")
        if d2t is None:
            raise ConfigError(
                f"draft.path={path}: draft_vocab_size={eagle3_config.draft_vocab_size(config)} "
                "needs the tensor d2t, which is missing"
            )
        return Vocabulary(d2t + torch.arange(len(d2t)))

    def for_reader(
        self, config: Mapping[str, Any], reader: str, use: Use
    ) -> tuple[dict[str, Any], Callable[[str], str]]:
        """SGLang's older releases know the layer as midlayer only and skip other names without a
        word; speculators files call it layers.0.
        """
        if reader == "speculators":
            return eagle3_config.to_speculators(config, use), lambda name: name.replace(
                "midlayer.", _PUBLIC, 1
            )
        return eagle3_config.to_sglang(config) if reader == "sglang" else dict(config), str

    def save_pretrained(
        self, state: Mapping[str, Tensor], config: Mapping[str, Any], path: Path
    ) -> None:
        files.write_draft(state, config, path)
