"""What training needs from a frozen target, in whichever process it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Features:
    """What a frozen target computes for b padded sequences; rows beyond a sequence's true length
    are undefined.
    """

    # [b, S, n*h]: outputs of the requested layers, concatenated in the order of their ids
    aux: Tensor
    # [b, S, h]: after the final norm, so that TargetHead.weight turns row r into the target's own
    # logits for token r + 1
    last_hidden: Tensor


class FeatureSource(Protocol):
    """Where the features of a frozen target come from."""

    # whether it can also read rejected tokens, which are in no response (losses of whole blocks)
    reads_branches: bool

    def features(self, input_ids: Tensor, lengths: Tensor) -> Features:
        """Features of right-padded sequences input_ids [b, S] int64 with true lengths [b]."""
        ...
