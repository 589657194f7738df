"""What a draft family provides. A new family is one folder below `drafts` whose package defines FAMILY."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PretrainedConfig

from verl_opd.config.schema import DraftConfig
from verl_opd.opd.layout import Layout


class DraftFamily(Protocol):
    """name: value of draft.family. engine_method: vLLM's speculative_config["method"]."""

    name: str
    engine_method: str

    def derive_config(self, target: PretrainedConfig, draft: DraftConfig, num_speculative_tokens: int) -> dict[str, Any]:
        """config.json of a new draft for `target`."""
        ...

    def load_config(self, path: str) -> dict[str, Any]:
        """config.json of the draft directory `path`."""
        ...

    def check(
        self, config: Mapping[str, Any], target: PretrainedConfig, num_speculative_tokens: int, allow_block_size_mismatch: bool
    ) -> None:
        """ConfigError, with both numbers, when draft, target and K do not fit or the draft needs what replay does not support."""
        ...

    def layer_ids(self, config: Mapping[str, Any]) -> list[int]: ...

    def mask_token_id(self, config: Mapping[str, Any]) -> int: ...

    def block_size(self, config: Mapping[str, Any]) -> int: ...

    def build(self, config: Mapping[str, Any], *, seed: int, init_std: float) -> nn.Module:
        """The draft with random float32 weights; its state_dict names are the public checkpoint names."""
        ...

    def load_weights(self, draft: nn.Module, path: str) -> None:
        """Load the draft directory `path` into `draft`; ConfigError lists missing, unexpected and misshapen tensors."""
        ...

    def shard_units(self, draft: nn.Module) -> list[nn.Module]:
        """Sub-modules that FSDP2 shards one by one, before the root."""
        ...

    def replay(self, draft: nn.Module, features: Tensor, slot_embeds: Tensor, layout: Layout) -> Tensor:
        """Training forward: every block of the micro-batch as the engine drafted it.

        features [b, C, n*h]: concatenated target layer outputs of the first C >= layout.context_len positions; slot_embeds [b, N, B, h]: target
        embeddings of anchor and mask tokens. Returns draft hidden states [b, N*B, h], ready for the target's LM head.
        """
        ...

    def save_pretrained(self, state: Mapping[str, Tensor], config: Mapping[str, Any], path: Path) -> None:
        """Write an HF-format directory (config.json, model.safetensors in bf16)."""
        ...
