"""Checks of config.json that families share: each raises ConfigError with both values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PretrainedConfig

from verl_opd.errors import ConfigError


def check_complete(absent: Iterable[str], title: str) -> None:
    """`absent`: keys that the network needs and config.json lacks. Engines would fill them in with
    the defaults of their model class (Qwen3: head_dim 128, 32 KV heads).
    """
    names = ", ".join(absent)
    if names:
        raise ConfigError(f"the draft's config.json has no {names}: is it {title} draft?")


def check_architecture(config: Mapping[str, Any], architecture: str) -> None:
    if architecture not in (config.get("architectures") or []):
        raise ConfigError(
            f"the draft's architectures={config.get('architectures')} is not supported; "
            f"{architecture} is"
        )


def check_replayed(values: Mapping[str, tuple[Any, tuple[Any, ...]]], title: str) -> None:
    """`values`: key -> (its value, values under which replay computes what engines draft). Variants
    that it does not compute are unsupported; none is approximated.
    """
    wrong = [f"{name}={value!r}" for name, (value, same) in values.items() if value not in same]
    if wrong:
        raise ConfigError(
            f"this {title} draft has {', '.join(wrong)}, which training does not support: it would "
            "not replay what the engine drafts"
        )


def check_sizes(config: Mapping[str, Any], target: PretrainedConfig) -> None:
    """A draft has its target's hidden size and vocabulary."""
    for key in ("hidden_size", "vocab_size"):
        if config[key] != getattr(target, key):
            raise ConfigError(
                f"draft does not fit the target: {key} is {config[key]} in the draft and "
                f"{getattr(target, key)} in the target"
            )
