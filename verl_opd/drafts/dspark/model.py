"""The DSpark draft network: DFlash's backbone, and a Markov head that sees the token before each
slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from verl_opd.drafts.dflash.model import DFlashDraft
from verl_opd.drafts.dspark.config import as_dflash


class MarkovHead(nn.Module):
    """Adds markov_w2(markov_w1[token before]) to a slot's logits (vLLM DSparkMarkovHead)."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)


class ConfidenceHead(nn.Module):
    """How likely a proposal is to be accepted, from the slot's hidden state, and from the Markov
    embedding where `width` has room for it (vLLM DSparkConfidenceHead). Its input is detached, so
    it does not change the backbone.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """states [M, h + r], as DSparkDraft.forward returns them -> logits [M] float32."""
        weight, bias = self.proj.weight.float(), self.proj.bias.float()  # [1, width], [1]
        seen = states.detach()[:, : weight.shape[1]].float()  # [M, width]
        return nn.functional.linear(seen, weight, bias).squeeze(-1)


class DSparkDraft(DFlashDraft):
    """Parameters have the public checkpoint names; embedding and LM head are the target's."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(as_dflash(config))
        self.markov_head = MarkovHead(config["vocab_size"], config["markov_rank"])
        if config.get("enable_confidence_head"):
            rank = config["markov_rank"] if config.get("confidence_head_with_markov") else 0
            self.confidence_head = ConfidenceHead(config["hidden_size"] + rank)

    def forward(  # type: ignore[override]
        self,
        features: Tensor,
        slot_embeds: Tensor,
        slot_positions: Tensor,
        masks: Sequence[Tensor],
        before: Tensor,
    ) -> Tensor:
        """As DFlashDraft.forward, with `before` [b, M] int64: the token before each predicted
        one. Returns [b, M, h + r]: the slot's hidden state and the Markov embedding of rank r, so
        that one head [V, h + r] gives logits and bias at once.
        """
        hidden = super().forward(features, slot_embeds, slot_positions, masks)  # [b, M, h]
        markov = self.markov_head.markov_w1(before).to(hidden.dtype)  # [b, M, r]
        return torch.cat((hidden, markov), dim=-1)
