"""EAGLE-3 as a DraftFamily."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import files
from verl_opd.drafts.base import DraftFamily, OwnHead, Vocabulary
from verl_opd.drafts.eagle3 import config as eagle3_config
from verl_opd.drafts.eagle3.model import Eagle3Draft
from verl_opd.drafts.formats import Use
from verl_opd.errors import ConfigError
from verl_opd.opd.layout import Layout

_PUBLIC = "layers.0."  # what other files call the one layer


class Eagle3(DraftFamily):
    name = "eagle3"
    engine_method = "eagle3"
    engine_names = ((_PUBLIC, "midlayer."),)
    has_own_head = True
    autoregressive = True
    target_copies = ("embed_tokens.weight",)

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

    def network(self, config: Mapping[str, Any]) -> nn.Module:
        return Eagle3Draft(config)  # one layer and its head: FSDP shards the root alone

    def public_name(self, name: str) -> str:
        return name.replace(_PUBLIC, "midlayer.", 1)

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
        if features.shape[1] == 0:
            # nothing is supervised: a context of one row keeps every weight in the graph
            features = features.new_zeros(features.shape[0], 1, features.shape[2])
            context = blocks[:, 0, :1]
        hidden: Tensor = draft(features, context, blocks, layout.anchors)
        return hidden.flatten(1, 2)

    def own_head(self, draft: nn.Module, target_head: Tensor) -> OwnHead:
        module = cast(Eagle3Draft, draft)
        if not hasattr(module, "d2t"):
            return OwnHead(module.lm_head.weight, None)
        ids = module.d2t + torch.arange(len(module.d2t), device=module.d2t.device)  # [Vd]
        return OwnHead(module.lm_head.weight, Vocabulary(ids))

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

    def to_format(
        self, config: Mapping[str, Any], format: str, use: Use
    ) -> tuple[dict[str, Any], Callable[[str], str]]:
        """SGLang's older releases know the layer as midlayer only and skip other names without an
        error; speculators files call it layers.0.
        """
        if format == "speculators":
            return eagle3_config.to_speculators(config, use), lambda name: name.replace(
                "midlayer.", _PUBLIC, 1
            )
        return eagle3_config.to_sglang(config) if format == "sglang" else dict(config), str
