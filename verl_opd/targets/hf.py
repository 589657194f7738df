"""A frozen target in this process, through transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from verl_opd.errors import ConfigError
from verl_opd.targets.base import Features
from verl_opd.targets.head import TargetHead

# Model types whose vLLM implementation gives aux hidden states, and whose rotary layout is that of
# our DFlash drafts.
SUPPORTED = ("llama", "qwen2", "qwen3")


def check_target_supported(config: PretrainedConfig) -> None:
    """ConfigError for a target that the engine cannot draft for."""
    if config.model_type not in SUPPORTED:
        raise ConfigError(
            f"target.path holds a {config.model_type!r} model "
            f"({', '.join(config.architectures or ['?'])}); "
            f"drafting is supported for {', '.join(SUPPORTED)}"
        )


class HFSource:
    """A FeatureSource over a transformers model in this process: eval mode, no gradient, decoder
    only (full-sequence logits are never built).

    head: the model's own embedding and LM head, not copies.
    """

    reads_branches = True

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        layer_ids: Sequence[int],
        device: torch.device | str = "cpu",
        attention: str = "sdpa",
        trust_remote_code: bool = False,
    ) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        model, report = loaded
        if report["missing_keys"]:  # transformers would leave these at random values
            raise ConfigError(
                f"target.path={path} lacks weights: {', '.join(sorted(report['missing_keys'])[:5])}"
            )
        model.requires_grad_(False).eval().to(device)
        self._decoder = model.get_decoder()
        self._layer_ids = list(layer_ids)
        self._captured: dict[int, Tensor] = {}
        for layer_id in self._layer_ids:
            self._decoder.layers[layer_id].register_forward_hook(self._capture(layer_id))
        self.head = TargetHead(
            embedding=model.get_input_embeddings().weight.detach(),
            weight=model.get_output_embeddings().weight.detach(),
        )

    def _capture(self, layer_id: int) -> Any:
        # A hook, not output_hidden_states: that list ends with the normed state, so the last
        # layer's own output would be missing.
        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            self._captured[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.no_grad()
    def features(self, input_ids: Tensor, lengths: Tensor) -> Features:
        # [b, S], True on real tokens
        mask = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths.unsqueeze(-1)
        # [b, S, h]
        last = self._decoder(
            input_ids=input_ids, attention_mask=mask.long(), use_cache=False
        ).last_hidden_state
        # [b, S, n*h]
        aux = torch.cat([self._captured.pop(layer_id) for layer_id in self._layer_ids], dim=-1)
        return Features(aux, last)
