"""What a draft family provides. A new family is one folder below `drafts` whose package defines
FAMILY.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from verl_opd.config.schema import DraftConfig
from verl_opd.drafts.formats import Use
from verl_opd.opd.layout import Layout


@dataclass(frozen=True)
class Vocabulary:
    """A draft vocabulary of Vd < V tokens. token_ids [Vd] int64, ascending: target id of every
    draft id.
    """

    token_ids: Tensor

    def draft_ids(self, size: int) -> Tensor:
        """[size] int64: draft id of every target id, -1 where there is none."""
        index = torch.full((size,), -1, dtype=torch.long, device=self.token_ids.device)
        index[self.token_ids] = torch.arange(len(self.token_ids), device=self.token_ids.device)
        return index


@dataclass(frozen=True)
class OwnHead:
    """A trainable LM head: weight [Vd, width of what `replay` returns]; vocabulary None when Vd is
    the target's whole vocabulary.
    """

    weight: Tensor
    vocabulary: Vocabulary | None


class DraftFamily(Protocol):
    """name: value of draft.family. engine_method: vLLM's speculative_config["method"].
    engine_names: (prefix of a parameter in vLLM's draft module, after its leading "model.", public
    prefix) where the two differ. has_own_head: whether drafts bring an LM head instead of borrowing
    the target's. autoregressive: whether a proposal is drafted from the one before it, so that a
    slot after a refused one has seen the refused token. v2_runner: whether only vLLM's V2 model
    runner drafts with it, which needs an accelerator.
    """

    name: str
    engine_method: str
    engine_names: tuple[tuple[str, str], ...]
    has_own_head: bool
    autoregressive: bool
    v2_runner: bool

    def derive_config(
        self, target: PretrainedConfig, draft: DraftConfig, num_speculative_tokens: int
    ) -> dict[str, Any]:
        """config.json of a new draft for `target`."""
        ...

    def load_config(self, path: str, target: PretrainedConfig | None = None) -> dict[str, Any]:
        """config.json of the draft directory `path`; with `target`, what a public file leaves to it
        is written down.
        """
        ...

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
        ...

    def layer_ids(self, config: Mapping[str, Any]) -> list[int]: ...

    def mask_token_id(self, config: Mapping[str, Any]) -> int | None:
        """The token that fills slots still to be predicted; None for a family that drafts one token
        after the other.
        """
        ...

    def block_size(self, config: Mapping[str, Any], num_speculative_tokens: int) -> int:
        """B: the anchor and the proposals of one block."""
        ...

    def with_block(self, config: Mapping[str, Any], size: int) -> dict[str, Any]:
        """`config` of a trained draft that is to draft, and learn, in blocks of `size` from now on;
        ConfigError when it cannot.
        """
        ...

    def build(self, config: Mapping[str, Any], *, seed: int, init_std: float) -> nn.Module:
        """The draft with random float32 weights; its state_dict names are the public checkpoint
        names.
        """
        ...

    def load_weights(
        self, draft: nn.Module, path: str, frozen: Mapping[str, Tensor] | None = None
    ) -> None:
        """Load the draft directory `path` into `draft`; ConfigError lists missing, unexpected and
        misshapen tensors, and names a copy in the file that is not the target's (`frozen`:
        "embed_tokens.weight" and "lm_head.weight" of the target).
        """
        ...

    def shard_units(self, draft: nn.Module) -> list[nn.Module]:
        """Sub-modules that FSDP2 shards one by one, before the root."""
        ...

    def inputs(
        self, config: Mapping[str, Any], embed: Callable[[Tensor], Tensor], layout: Layout
    ) -> Any:
        """What `replay` needs of the frozen target's embedding: `embed` maps token ids [...] to
        embeddings [..., h].
        """
        ...

    def replay(self, draft: nn.Module, features: Tensor, inputs: Any, layout: Layout) -> Tensor:
        """Training forward: every block of the micro-batch as the engine drafted it.

        features [b, C, n*h]: concatenated target layer outputs of the first C >= layout.context_len
        positions; inputs: as `inputs` gave them. Returns draft hidden states [b, N*B, h], ready for
        the LM head; slot 0 of a block, its anchor, predicts nothing.
        """
        ...

    def own_head(self, draft: nn.Module, target_head: Tensor) -> OwnHead | None:
        """The head for what `replay` returns, when it is not just the target's [V, h]; None when it
        is. Under FSDP only after `replay`, while the root's weights are whole.
        """
        ...

    def confidence(self, draft: nn.Module) -> Callable[[Tensor], Tensor] | None:
        """Acceptance logits [M] float32 from what `replay` returned at M slots, whose gradient ends
        there; None for a draft without such a head. Under FSDP as `own_head`.
        """
        ...

    def vocabulary(self, config: Mapping[str, Any], path: str | None) -> Vocabulary | None:
        """The part of the target's vocabulary that the draft at `path` can propose; None for all of
        it.
        """
        ...

    def for_reader(
        self, config: Mapping[str, Any], reader: str, use: Use
    ) -> tuple[dict[str, Any], Callable[[str], str]]:
        """config.json, and what to call each parameter, for one of the readers of formats.py;
        ConfigError when it does not read this family. What `load_config` and `load_weights` read
        back is the same draft, but for sglang.
        """
        ...

    def save_pretrained(
        self, state: Mapping[str, Tensor], config: Mapping[str, Any], path: Path
    ) -> None:
        """Write an HF-format directory (config.json, model.safetensors in bf16)."""
        ...
