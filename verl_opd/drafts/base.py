"""What a draft family provides. A new family is one folder below `drafts` whose package defines
FAMILY, an object of a subclass of DraftFamily.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from verl_opd.config.schema import DraftConfig
from verl_opd.drafts import files
from verl_opd.drafts.formats import Use
from verl_opd.drafts.layers import random_init
from verl_opd.errors import ConfigError
from verl_opd.opd.layout import Layout


@dataclass(frozen=True)
class Vocabulary:
    """A draft vocabulary of Vd < V tokens."""

    token_ids: Tensor  # [Vd] int64, ascending: target id of every draft id

    def draft_ids(self, size: int) -> Tensor:
        """[size] int64: draft id of every target id, -1 where there is none."""
        index = torch.full((size,), -1, dtype=torch.long, device=self.token_ids.device)
        index[self.token_ids] = torch.arange(len(self.token_ids), device=self.token_ids.device)
        return index


@dataclass(frozen=True)
class OwnHead:
    """A trainable LM head."""

    weight: Tensor  # [Vd, width of what `replay` returns]
    vocabulary: Vocabulary | None  # None: Vd is the target's whole vocabulary


class DraftFamily(ABC):
    """A kind of draft. The defaults are those of a family that uses the target's embedding and LM
    head and drafts the K proposals of a block in one forward.
    """

    # value of draft.family, and the name of the family's folder
    name: str
    # vLLM's speculative_config["method"]
    engine_method: str
    # the draft network, made from a config.json; its state_dict has the public checkpoint names
    network: type[nn.Module]
    # (prefix of a parameter in vLLM's draft module, after its leading "model.", public prefix)
    # where the two differ
    engine_names: tuple[tuple[str, str], ...] = ()
    # tensors of the target ("embed_tokens.weight", "lm_head.weight") that public files may repeat
    copies: tuple[str, ...] = ()
    # drafts have their own LM head instead of using the target's
    has_own_head: bool = False
    # a proposal is drafted from the one before it: a slot after a rejected one saw that token
    autoregressive: bool = False
    # only vLLM's V2 model runner drafts with it, which needs an accelerator
    v2_runner: bool = False
    # between "actor/distillation/" and the name of every metric of the confidence head
    confidence_prefix: str = ""

    # -- config.json

    @abstractmethod
    def derive_config(
        self, target: PretrainedConfig, draft: DraftConfig, num_speculative_tokens: int
    ) -> dict[str, Any]:
        """config.json of a new draft for `target`."""

    def load_config(self, path: str, target: PretrainedConfig | None = None) -> dict[str, Any]:
        """config.json of the draft directory `path`. With `target`, keys that public files leave to
        the target are filled in.
        """
        return self.from_speculators(files.read_config(path))

    @abstractmethod
    def check(
        self,
        config: Mapping[str, Any],
        target: PretrainedConfig,
        num_speculative_tokens: int,
        allow_block_size_mismatch: bool,
    ) -> None:
        """ConfigError, with both numbers, when draft, target and K do not fit, or when replay does
        not support the draft.
        """

    @abstractmethod
    def layer_ids(self, config: Mapping[str, Any]) -> list[int]:
        """Target layers that the draft reads (targets/layers.py), in the order of its input."""

    def mask_token_id(self, config: Mapping[str, Any]) -> int | None:
        """The token that fills slots still to be predicted; None for a family that drafts token by
        token.
        """
        return None

    def block_size(self, config: Mapping[str, Any], num_speculative_tokens: int) -> int:
        """B: the anchor and the proposals of one block."""
        return num_speculative_tokens + 1

    def with_block(self, config: Mapping[str, Any], size: int) -> dict[str, Any]:
        """`config` of a trained draft, changed to draft and learn in blocks of `size`; ConfigError
        when it cannot.
        """
        raise ConfigError(
            f"draft.block_size={size}: blocks of this family are as long as "
            "rollout.num_speculative_tokens; leave the key out"
        )

    # -- weights

    def build(self, config: Mapping[str, Any], *, seed: int, init_std: float) -> nn.Module:
        """The draft with random float32 weights."""
        draft = self.network(config)
        random_init(draft, seed, init_std)
        return draft

    def load_weights(
        self, draft: nn.Module, path: str, frozen: Mapping[str, Tensor] | None = None
    ) -> None:
        """Load the draft directory `path` into `draft`. ConfigError lists missing, unexpected and
        misshapen tensors, and names one of `copies` in the file that differs from the target's
        (`frozen`: the target's tensors by these names).
        """
        files.load_into(draft, path, frozen, self.copies)

    def save_pretrained(
        self, state: Mapping[str, Tensor], config: Mapping[str, Any], path: Path
    ) -> None:
        """Write an HF-format directory (config.json, model.safetensors in bf16)."""
        files.write_draft(state, config, path)

    def shard_units(self, draft: nn.Module) -> list[nn.Module]:
        """Sub-modules that FSDP2 shards one by one, before the root. None: the root is the unit."""
        return []

    # -- training

    @abstractmethod
    def inputs(
        self, config: Mapping[str, Any], embed: Callable[[Tensor], Tensor], layout: Layout
    ) -> Any:
        """What `replay` needs of the frozen target's embedding: `embed` maps token ids [...] to
        embeddings [..., h].
        """

    @abstractmethod
    def replay(self, draft: nn.Module, features: Tensor, inputs: Any, layout: Layout) -> Tensor:
        """Training forward: every block of the micro-batch as the engine drafted it.

        features [b, C, n*h]: concatenated target layer outputs of the first C >= layout.context_len
        positions; inputs: as `inputs` gave them. Returns draft hidden states [b, N*B, h], ready for
        the LM head; slot 0 of a block, its anchor, predicts nothing.
        """

    def own_head(self, draft: nn.Module, target_head: Tensor) -> OwnHead | None:
        """The head for what `replay` returns; None when that is the target's [V, h]. Under FSDP
        call it only after `replay`, while the root's weights are whole.
        """
        return None

    def confidence(self, draft: nn.Module) -> Callable[[Tensor], Tensor] | None:
        """A function from what `replay` returned at M slots to acceptance logits [M] float32, with
        no gradient into its input; None for a draft without such a head. Under FSDP as `own_head`.
        """
        return None

    def vocabulary(self, config: Mapping[str, Any], path: str | None) -> Vocabulary | None:
        """The part of the target's vocabulary that the draft at `path` can propose; None for all of
        it.
        """
        return None

    # -- file formats of other programs (formats.py)

    def to_format(
        self, config: Mapping[str, Any], format: str, use: Use
    ) -> tuple[dict[str, Any], Callable[[str], str]]:
        """config.json in `format`, and a function from our parameter names to those of the format;
        ConfigError when the format does not support this draft. `load_config` and `load_weights`
        read the same draft back, except from sglang.
        """
        if format == "speculators":
            return self.to_speculators(config, use), str
        return dict(config), str

    @abstractmethod
    def to_speculators(self, config: Mapping[str, Any], use: Use) -> dict[str, Any]:
        """The config.json of a speculators file of this draft."""

    @abstractmethod
    def from_speculators(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """`config` itself in this family's layout; a speculators file turned into that layout, as
        vLLM reads it.
        """
