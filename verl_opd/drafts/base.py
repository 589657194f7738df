"""What a draft family provides. A new family is one folder below `drafts` whose package defines
FAMILY, an instance of a subclass of DraftFamily.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

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

    # [Vd] int64, ascending: target id of every draft id
    token_ids: Tensor

    def draft_ids(self, size: int) -> Tensor:
        """[size] int64: draft id of every target id, -1 where there is none."""
        index = torch.full((size,), -1, dtype=torch.long, device=self.token_ids.device)
        index[self.token_ids] = torch.arange(len(self.token_ids), device=self.token_ids.device)
        return index


@dataclass(frozen=True)
class OwnHead:
    """A trainable LM head."""

    # [Vd, width of what `replay` returns]
    weight: Tensor
    # None when Vd is the target's whole vocabulary
    vocabulary: Vocabulary | None


class DraftFamily(ABC):
    """One kind of draft network. What most families share is implemented here."""

    # value of draft.family
    name: ClassVar[str]
    # vLLM's speculative_config["method"]
    engine_method: ClassVar[str]
    # (prefix of a parameter in vLLM's draft module, after its leading "model.", public prefix)
    # where the two differ
    engine_names: ClassVar[tuple[tuple[str, str], ...]] = ()
    # whether drafts bring an LM head instead of borrowing the target's
    has_own_head: ClassVar[bool] = False
    # whether a proposal is drafted from the one before it, so that a slot after a rejected one has
    # seen the rejected token
    autoregressive: ClassVar[bool] = False
    # whether only vLLM's V2 model runner drafts with it, which needs an accelerator
    v2_runner: ClassVar[bool] = False
    # copies of the target's tensors that draft files may carry; compared with it and left out
    target_copies: ClassVar[tuple[str, ...]] = ()
    # what the names of this family's own measurements start with
    metric_prefix: ClassVar[str] = ""

    # -- configuration -----------------------------------------------------------------------------

    @abstractmethod
    def derive_config(
        self, target: PretrainedConfig, draft: DraftConfig, num_speculative_tokens: int
    ) -> dict[str, Any]:
        """config.json of a new draft for `target`."""

    @abstractmethod
    def load_config(self, path: str, target: PretrainedConfig | None = None) -> dict[str, Any]:
        """config.json of the draft directory `path`; with `target`, what a public file leaves to it
        is filled in.
        """

    @abstractmethod
    def check(
        self,
        config: Mapping[str, Any],
        target: PretrainedConfig,
        num_speculative_tokens: int,
        allow_block_size_mismatch: bool,
    ) -> None:
        """ConfigError, with both numbers, when draft, target and K do not fit or the draft needs
        what replay does not support.
        """

    @abstractmethod
    def layer_ids(self, config: Mapping[str, Any]) -> list[int]:
        """0-based target layers whose outputs the draft reads, in its order."""

    def mask_token_id(self, config: Mapping[str, Any]) -> int | None:
        """The token that fills slots still to be predicted; None for a family that drafts one token
        after the other.
        """
        return None

    def block_size(self, config: Mapping[str, Any], num_speculative_tokens: int) -> int:
        """B: the anchor and the proposals of one block."""
        return num_speculative_tokens + 1

    def with_block(self, config: Mapping[str, Any], size: int) -> dict[str, Any]:
        """`config` of a trained draft that is to draft, and learn, in blocks of `size` from now on;
        ConfigError when it cannot.
        """
        raise ConfigError(
            f"draft.block_size={size}: blocks of this family are as long as "
            "rollout.num_speculative_tokens; leave the key out"
        )

    # -- network -----------------------------------------------------------------------------------

    @abstractmethod
    def network(self, config: Mapping[str, Any]) -> nn.Module:
        """The draft; its state_dict names are the public checkpoint names."""

    def build(self, config: Mapping[str, Any], *, seed: int, init_std: float) -> nn.Module:
        """The draft with random float32 weights."""
        draft = self.network(config)
        random_init(draft, seed, init_std)
        return draft

    def load_weights(
        self, draft: nn.Module, path: str, frozen: Mapping[str, Tensor] | None = None
    ) -> None:
        """Load the draft directory `path` into `draft`; ConfigError lists missing, unexpected and
        misshapen tensors, and names a copy in the file that is not the target's (`frozen`:
        "embed_tokens.weight" and "lm_head.weight" of the target).
        """
        files.load_into(draft, path, frozen, self.target_copies, self.public_name)

    def public_name(self, name: str) -> str:
        """Our name of a parameter in a draft file."""
        return name

    def shard_units(self, draft: nn.Module) -> list[nn.Module]:
        """Sub-modules that FSDP2 shards one by one, before the root."""
        return []

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
        """The head for what `replay` returns, when it is not just the target's [V, h]; None when it
        is. Under FSDP only after `replay`, while the root's weights are whole.
        """
        return None

    def confidence(self, draft: nn.Module) -> Callable[[Tensor], Tensor] | None:
        """Acceptance logits [M] float32 from what `replay` returned at M slots, whose gradient ends
        there; None for a draft without such a head. Under FSDP as `own_head`.
        """
        return None

    # -- files -------------------------------------------------------------------------------------

    def vocabulary(self, config: Mapping[str, Any], path: str | None) -> Vocabulary | None:
        """The part of the target's vocabulary that the draft at `path` can propose; None for all of
        it.
        """
        return None

    @abstractmethod
    def to_format(
        self, config: Mapping[str, Any], format: str, use: Use
    ) -> tuple[dict[str, Any], Callable[[str], str]]:
        """config.json, and what to call each parameter, in one of the file formats of formats.py;
        ConfigError for a format that has no place for this family. What `load_config` and
        `load_weights` read back is the same draft, but for sglang.
        """

    def save_pretrained(
        self, state: Mapping[str, Tensor], config: Mapping[str, Any], path: Path
    ) -> None:
        """Write an HF-format directory (config.json, model.safetensors in bf16)."""
        files.write_draft(state, config, path)
