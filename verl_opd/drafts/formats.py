"""The formats of draft files: what an export writes, and which public files can be read.

vllm          config.json and tensor names of every draft directory in this project
speculators   one config.json that also names the target and the number of proposals:
              `vllm serve <draft>` starts both (vllm.transformers_utils.configs.speculators)
sglang        as vllm, except for EAGLE-3: see Eagle3.to_format
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_opd.errors import ConfigError

_TYPE = "speculators_model_type"


@dataclass(frozen=True)
class Use:
    """How a draft is used, for formats that record it (speculators)."""

    target: str  # HF path or hub id
    num_speculative_tokens: int  # K, proposals of one block
    architectures: tuple[str, ...] = ()  # the target's, from its config.json; empty when unknown


def to_speculators(
    algorithm: str, network: Mapping[str, Any], use: Use, own: Mapping[str, Any]
) -> dict[str, Any]:
    """A speculators config.json. network: what describes the transformer layers; own: the keys of
    this algorithm.
    """
    return {
        _TYPE: algorithm,
        "target_hidden_size": network["hidden_size"],
        **own,
        "tie_word_embeddings": False,
        "dtype": network.get("dtype", "bfloat16"),
        "transformer_layer_config": dict(network),
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": use.num_speculative_tokens}
            ],
            "verifier": {"name_or_path": use.target, "architectures": list(use.architectures)},
        },
    }


def speculators_parts(
    config: Mapping[str, Any], algorithm: str
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """(what describes the transformer layers, the file's other keys) of a speculators config.json;
    None for any other. ConfigError for another algorithm's.
    """
    if _TYPE not in config:
        return None
    if config[_TYPE] != algorithm:
        raise ConfigError(
            f"this draft is a speculators file of {_TYPE}={config[_TYPE]!r}: use "
            f"draft.family={config[_TYPE]}"
        )
    return dict(config.get("transformer_layer_config") or {}), dict(config)


def without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` without keys of value null, which engines with typed configurations reject."""
    return {
        key: without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value is not None
    }
