"""What training needs of a frozen target, wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class TargetFeatures:
    """aux [b, S, n*h]: outputs of the requested layers, concatenated in id order given. last_hidden
    [b, S, h]: after the final norm, so that last_hidden @ lm_head.T are the target's own logits;
    row r scores token r + 1.
    """

    aux: Tensor
    last_hidden: Tensor


class TargetBackend(Protocol):
    """lm_head_weight [V, h], frozen."""

    lm_head_weight: Tensor

    def features(self, input_ids: Tensor, lengths: Tensor) -> TargetFeatures:
        """Features of right-padded sequences input_ids [b, S] int64 with true lengths [b]; rows
        beyond a length are undefined.
        """
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., h] of token ids [...]."""
        ...
