"""The teacher of the response stream, chosen once from the configuration."""

from __future__ import annotations

import os

from verl_opd.config.schema import Config
from verl_opd.errors import ConfigError
from verl_opd.opd.names import SCORED_LOSSES, TOP_K_LOSS

_DEFAULT = "default"


def teacher_models(cfg: Config) -> dict[str, str]:
    """Teacher servers to start, name -> model; empty when the trainer's own copy of the target is
    the teacher. ConfigError for combinations that cannot work.

    `auto` selects the trainer's copy wherever that can score the response loss: when no other model
    is named and the loss is not forward_kl_topk.
    """
    teacher, loss = cfg.teacher, cfg.opd.response_loss
    foreign = {
        name: path
        for name, path in teacher.models.items()
        if os.path.realpath(path) != os.path.realpath(cfg.target.path)
    }
    wants_server = loss == TOP_K_LOSS or bool(foreign)
    if teacher.source == "composed" and wants_server:
        why = f"opd.response_loss={loss}" if loss == TOP_K_LOSS else f"teacher.models={foreign}"
        raise ConfigError(
            "teacher.source=composed scores with the trainer's copy of target.path and does not "
            f"work with {why}: use teacher.source=server"
            + (", or opd.response_loss=full_forward_kl" if loss == TOP_K_LOSS else "")
        )
    if teacher.source == "composed" or (teacher.source == "auto" and not wants_server):
        return {}
    _check_server(cfg)
    return dict(teacher.models) or {_DEFAULT: cfg.target.path}


def _check_server(cfg: Config) -> None:
    loss, temperature = cfg.opd.response_loss, cfg.rollout.temperature
    usable = (*SCORED_LOSSES, TOP_K_LOSS)
    if loss not in usable:
        raise ConfigError(
            "a teacher server reports log-probs of single tokens, which are not enough for "
            f"opd.response_loss={loss}: use one of {', '.join(usable)}, or "
            "teacher.source=composed without teacher.models"
        )
    if temperature not in (0.0, 1.0):
        raise ConfigError(
            "a teacher server scores at temperature 1, not at "
            f"rollout.temperature={temperature:g}: use 0 or 1, or teacher.source=composed without "
            "teacher.models"
        )
