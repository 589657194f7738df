"""File formats of drafts: what other programs than vLLM's plain loader expect, and their public
files as this project reads them.

vllm: config.json and names as every draft directory here has them. speculators: one config.json
that names its target and its proposals, from which `vllm serve <draft>` starts both
(vllm.transformers_utils.configs.speculators). sglang: the same file but for EAGLE-3, see its
family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_opd.errors import ConfigError

_TYPE = "speculators_model_type"


@dataclass(frozen=True)
class Use:
    """How a draft is used, as a speculators file records it."""

    # HF path or hub id of the target
    target: str
    # proposals of a verify step
    num_speculative_tokens: int
    # of the target
    architectures: tuple[str, ...] = ()


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
    """`config` without keys of value null, which typed parsers reject."""
    return {
        key: without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value is not None
    }
