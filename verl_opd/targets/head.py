"""Both ends of a frozen target, which every trainer process holds itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class TargetHead:
    """Embedding and LM head of the target, without gradient. Tied ones may be the same tensor."""

    # [V, h], input embedding
    embedding: Tensor
    # [V, h], LM head
    weight: Tensor

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., h] of token ids [...]."""
        return F.embedding(ids, self.embedding)
