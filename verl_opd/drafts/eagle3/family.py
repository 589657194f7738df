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

_LAYER, _PUBLIC = "midlayer.", "layers.0."  # the one layer here and in SGLang, and elsewhere


class Eagle3(DraftFamily):
    name = "eagle3"
    engine_method = "eagle3"
    network = Eagle3Draft
    engine_names = ((_PUBLIC, _LAYER),)
    copies = ("embed_tokens.weight",)
    has_own_head = True
    autoregressive = True

    def derive_config(
        self, target: PretrainedConfig, draft: DraftConfig, num_speculative_tokens: int
    ) -> dict[str, Any]:
        return eagle3_config.derive_config(target, draft)

    def load_config(self, path: str, target: PretrainedConfig | None = None) -> dict[str, Any]:
        config = super().load_config(path, target)
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

    def load_weights(
        self, draft: nn.Module, path: str, frozen: Mapping[str, Tensor] | None = None
    ) -> None:
        files.load_into(
            draft, path, frozen, self.copies, lambda name: name.replace(_PUBLIC, _LAYER, 1)
        )

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
        """See DraftFamily.replay."""
        if bool(((layout.anchors == 0) & layout.block_keep).any()):
            raise ValueError(
                "EAGLE-3 drafts from the token before the anchor, and a block anchored at position "
                "0 has none"
            )
        context, blocks = inputs  # [b, C, h], [b, N, B-1, h]
        if features.shape[1] == 0:
            # nothing is supervised: a context of one row keeps every weight in the graph
            features = features.new_zeros(features.shape[0], 1, features.shape[2])  # [b, 1, n*h]
            context = blocks[:, 0, :1]  # [b, 1, h]
        hidden: Tensor = draft(features, context, blocks, layout.anchors)  # [b, N, B, h]
        return hidden.flatten(1, 2)

    def own_head(self, draft: nn.Module, target_head: Tensor) -> OwnHead:
        """The draft's own [Vd, h]."""
        module = cast(Eagle3Draft, draft)
        vocabulary = _vocabulary(module.d2t) if hasattr(module, "d2t") else None
        return OwnHead(module.lm_head.weight, vocabulary)

    def vocabulary(self, config: Mapping[str, Any], path: str | None) -> Vocabulary | None:
        size = eagle3_config.draft_vocab_size(config)
        if size == config["vocab_size"]:
            return None
        if path is None:
            raise ConfigError(
                "a draft vocabulary smaller than the target's needs a trained draft: set "
                "draft.path to its directory"
            )
        d2t = files.read_weights(path).get("d2t")
        if d2t is None:
            raise ConfigError(
                f"draft.path={path}: draft_vocab_size={size} needs the tensor d2t, which is missing"
            )
        return _vocabulary(d2t)

    def to_format(
        self, config: Mapping[str, Any], format: str, use: Use
    ) -> tuple[dict[str, Any], Callable[[str], str]]:
        """Older releases of SGLang know the layer as midlayer only and silently skip other names;
        speculators files call it layers.0.
        """
        if format == "sglang":
            return eagle3_config.to_sglang(config), str
        if format == "speculators":
            return self.to_speculators(config, use), lambda name: name.replace(_LAYER, _PUBLIC, 1)
        return super().to_format(config, format, use)

    def to_speculators(self, config: Mapping[str, Any], use: Use) -> dict[str, Any]:
        return eagle3_config.to_speculators(config, use)

    def from_speculators(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return eagle3_config.from_speculators(config)


def _vocabulary(d2t: Tensor) -> Vocabulary:
    """d2t [Vd] int64: target id - draft id."""
    return Vocabulary(d2t + torch.arange(len(d2t), device=d2t.device))
