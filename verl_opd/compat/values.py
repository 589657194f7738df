"""Values of old keys in terms of ours: key by key, and for several keys that together decide one of
ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString, Sweep
from hydra.errors import HydraException

from verl_opd.errors import ConfigError

# every key of the command line, old ones and ours, with the value of its last line
Given = Mapping[str, Any]

UNREADABLE = object()


def parsed(key: str, raw: str) -> Any:
    """The value of `key=raw` in Hydra's grammar, or UNREADABLE. ConfigError for a sweep."""
    try:
        value = OverridesParser.create().parse_override(f"{key}={raw}").value()
    except HydraException:
        return UNREADABLE
    if isinstance(value, Sweep):
        raise ConfigError(
            f"{key}={raw} has several values: write a list as [a,b], a string with a comma as "
            "'\"a,b\"'"
        )
    return value


def flag(value: Any) -> str:
    if value not in (0, 1):  # True and False among them
        raise ValueError("true or false")
    return str(bool(value)).lower()


def _is_true(given: Given, key: str, default: bool = False) -> bool:
    try:
        return flag(given.get(key, default)) == "true"
    except ValueError as error:
        raise ConfigError(f"{key}={given[key]} must be {error}") from error


def _number(given: Given, key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}={value} must be a number")
    return value


def _whole(given: Given, key: str, default: int) -> int:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{key}={value} must be a whole number of at least 0")
    return value


def quoted(text: str) -> str:
    return QuotedString(text, Quote.single).with_quotes()


def _listed(value: Any) -> list[Any] | None:
    """The list that `value` is, or that it spells as a string ("['a','b']")."""
    if isinstance(value, list):
        return value
    spelt = parsed("x", value) if isinstance(value, str) and value.startswith("[") else None
    return spelt if isinstance(spelt, list) else None


def files(value: Any) -> str | None:
    entries = None if isinstance(value, list) else _listed(value)
    return None if entries is None else f"[{','.join(quoted(str(entry)) for entry in entries)}]"


def loggers(value: Any) -> str | None:
    entries = _listed(value)
    if entries is None or (isinstance(value, list) and "file" not in entries):
        return None
    return f"[{','.join('jsonl' if entry == 'file' else str(entry) for entry in entries)}]"


def benchmarks(value: Any) -> str | None:
    """Files, named as Draft-OPD names its benchmarks: lower-cased stem without _user_prompt and
    _128, `_` for other characters, _2, _3 ... for repeats.
    """
    if isinstance(value, str) and not value.startswith("["):
        value = [value]
    entries, named = _listed(value), dict[str, str]()
    if entries is None:
        return None
    for entry in entries:
        stem = (
            PurePosixPath(str(entry)).stem.lower().removesuffix("_user_prompt").removesuffix("_128")
        )
        name = base = re.sub(r"[^a-z0-9_]", "_", stem)
        if not base:
            raise ValueError("a list of files, none of them empty")
        count = 1
        while name in named:
            count += 1
            name = f"{base}_{count}"
        named[name] = quoted(str(entry))
    return "{" + ", ".join(f"{name}: {path}" for name, path in named.items()) + "}"


def or_all(value: Any) -> str | None:
    return "null" if value == -1 else None


def or_path(value: Any) -> str | None:
    return "path" if value == "resume_path" else None


def or_zero(value: Any) -> str | None:
    return "0" if value is None else None


def one_less(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("a whole number")
    return str(value - 1)


def a_path(value: Any) -> None:
    if value is None:
        raise ValueError("the directory of a draft: a draft inside the target is not supported")


DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
ATTENTION = dict.fromkeys(("flex_attention", "auto", "sdpa"), "sdpa") | {"eager": "eager"}
SOURCES = {"auto": "auto", "server": "server", "composed_main": "composed"}
_MODES = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
_DISTRIBUTIONS = {
    "forward_kl_topk": "forward_kl_topk",
    "eagle3_native_target_distribution": "full_forward_kl",
}

# --- keys that together decide one of ours ---

_DECAY = "rejected_draft_position_decay"
_LOSS = "distillation.distillation_loss."
_OVERRIDE = "actor_rollout_ref.model.override_config.verl_"
_MTP = "actor_rollout_ref.rollout.mtp."
_TEACHERS = "distillation.teacher_models."


def family(given: Given) -> dict[str, str]:
    variant, method = (
        given.get(f"{_OVERRIDE}dflash_draft_variant", "auto"),
        given.get(f"{_MTP}method"),
    )
    for key, value, known in (
        (f"{_OVERRIDE}dflash_draft_variant", variant, ("auto", "dflash", "dspark")),
        (f"{_MTP}method", method, (None, "dflash", "eagle3", "dspark")),
    ):
        if value not in known:
            raise ConfigError(f"{key}={value} is not one of {', '.join(filter(None, known))}")
    wanted = {str(name) for name in (variant, method) if name not in ("auto", None)}
    if _is_true(given, f"{_OVERRIDE}composed_eagle3_student"):
        wanted.add("eagle3")
    if _is_true(given, f"{_OVERRIDE}composed_dflash_student") and "dspark" not in wanted:
        wanted.add("dflash")
    if len(wanted) > 1:
        raise ConfigError(
            f"{_MTP}method={method}, {_OVERRIDE}dflash_draft_variant={variant} and the composed "
            f"student select {' and '.join(sorted(wanted))}: "
            "use draft.family"
        )
    return {"draft.family": wanted.pop()} if wanted else {}


def students(given: Given) -> dict[str, str]:
    nodes = _whole(given, "trainer.nnodes", 1)
    return {
        "trainer.n_student_workers": str(_whole(given, "trainer.n_gpus_per_node", 1) * nodes),
        "trainer.nnodes": str(nodes),
    }


def teachers(given: Given) -> dict[str, str]:
    pattern = re.compile(re.escape(_TEACHERS) + r"([^.]+)\.(model_path|key|num_replicas)")
    entries: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        if (match := pattern.fullmatch(key)) and value is not None:
            entries.setdefault(match[1], {})[match[2]] = value
    models = {name: entry for name, entry in entries.items() if "model_path" in entry}
    if len(models) > 1:
        models.pop("teacher_model", None)  # the template of the others
    named = dict[str, str]()
    for entry_name, entry in sorted(models.items()):
        name = "default" if len(models) == 1 else str(entry.get("key", entry_name))
        if name in named or not re.fullmatch(r"[\w./-]+", name):
            raise ConfigError(
                f"{_TEACHERS}{entry_name}.key={name} must differ from the others, and hold "
                "letters, digits and . / - _ only"
            )
        named[name] = quoted(str(entry["model_path"]))
    result = (
        {"teacher.models": "{" + ", ".join(f"{name}: {path}" for name, path in named.items()) + "}"}
        if named
        else {}
    )
    replicas = _replicas(given, models or entries)
    return result | ({"teacher.replicas": str(replicas)} if replicas else {})


def _replicas(given: Given, entries: Mapping[str, Given]) -> int:
    """Servers per teacher; 0 when no line gives a number."""
    pool = _whole(given, "distillation.n_gpus_per_node", 0) * max(
        1, _whole(given, "distillation.nnodes", 1)
    )
    counts = {_whole(entry, "num_replicas", 0) for entry in entries.values()} - {0}
    if pool and not counts:
        counts = {pool // max(1, len(entries))}
    if len(counts) > 1 or (pool and pool != sum(counts) * max(1, len(entries))):
        raise ConfigError(
            f"distillation.n_gpus_per_node: {pool} devices, {max(1, len(entries))} teachers, "
            f"num_replicas {sorted(counts)}: every teacher has the "
            "same number of servers, one device each; use teacher.replicas"
        )
    return sum(counts)


def losses(given: Given) -> dict[str, str]:
    """Divergences of both streams. use_tv_loss comes before all, then what scores whole
    distributions, then the estimator with its weights.
    """
    weight = f"{_LOSS}rejected_draft_stream_weight"
    result = {"opd.rejected_stream_weight": str(given[weight])} if weight in given else {}
    if _is_true(given, f"{_LOSS}use_tv_loss"):
        return {
            "opd.response_loss": "e2e_tv",
            "opd.rejected_stream_weight": "0",
            "opd.response_position_decay": "1.0",
        }
    mode = _loss_mode(given)
    if mode in _DISTRIBUTIONS:
        if given.get(weight, given.get("opd.rejected_stream_weight")) != 0:
            raise ConfigError(
                f"{_LOSS}loss_mode={mode} does not score rejected tokens: add "
                "opd.rejected_stream_weight=0"
            )
        return {"opd.response_loss": _DISTRIBUTIONS[mode], **result}
    reverse, forward = (
        _number(given, f"{_LOSS}{name}_kl_weight", default)
        for name, default in (("reverse", 1), ("forward", 0))
    )
    picks = [f"{_LOSS}{name}" for name in ("loss_mode", "reverse_kl_weight", "forward_kl_weight")]
    only_estimator = f"{_LOSS}rejected_draft_use_reverse_kl"
    if any(key in given for key in picks):
        result["opd.response_loss"] = _divergence(_MODES[mode], reverse, forward)
    if any(key in given for key in [*picks, only_estimator]):
        result["opd.rejected_loss"] = (
            _MODES[mode]
            if _is_true(given, only_estimator)
            else _divergence(_MODES[mode], reverse, forward)
        )
    return result


def _loss_mode(given: Given) -> str:
    """A key of _MODES or _DISTRIBUTIONS."""
    key, eagle_key = f"{_LOSS}loss_mode", f"{_OVERRIDE}eagle3_response_loss_mode"
    mode, eagle = str(given.get(key, "k3")), given.get(eagle_key)
    if eagle not in (None, "scalar_k3", "native_target_distribution"):
        raise ConfigError(
            f"{eagle_key}={eagle} is not one of scalar_k3, native_target_distribution"
        )
    native = f"eagle3_{eagle}" if eagle == "native_target_distribution" else None
    if (eagle == "scalar_k3" and mode in _DISTRIBUTIONS) or (
        native and mode != native and key in given
    ):
        raise ConfigError(f"{key}={mode} and {eagle_key}={eagle} contradict each other: keep one")
    mode = native or mode
    if mode not in _MODES and mode not in _DISTRIBUTIONS:
        raise ConfigError(
            f"{key}={mode} is not one of {', '.join([*_MODES, *_DISTRIBUTIONS])}: use "
            "opd.response_loss and opd.rejected_loss"
        )
    return mode


def _divergence(estimator: str, reverse: float, forward: float) -> str:
    if (reverse, forward) not in ((1, 0), (0, 1)):
        raise ConfigError(
            f"{_LOSS}reverse_kl_weight={reverse} and {_LOSS}forward_kl_weight={forward} mix two "
            "divergences, but a stream has only one: use 1 and 0 (the default), or 0 and 1"
        )
    return estimator if reverse else "forward_kl"


def decays(given: Given) -> dict[str, str]:
    name, enabled, accepted = (
        f"{_LOSS}{key}"
        for key in (_DECAY, f"{_DECAY}_enabled", "accept_draft_position_decay_enabled")
    )
    decay = _number(given, name, 0.9)
    result = {}
    if name in given or enabled in given:
        result["opd.rejected_position_decay"] = str(
            decay if _is_true(given, enabled, True) else 1.0
        )
    if accepted in given:
        result["opd.response_position_decay"] = str(decay if _is_true(given, accepted) else 1.0)
    return result


def updates_per_step(given: Given) -> dict[str, str]:
    key = "actor_rollout_ref.actor.ppo_mini_batch_size"
    mini, batch = _whole(given, key, 0), _whole(given, "data.train_batch_size", 0)
    steps = _whole(given, "trainer.update_accumulation_steps", 1)
    if not batch:
        raise ConfigError(
            f"{key}={mini} is a part of data.train_batch_size, which is not on the command line: "
            "add it, or use trainer.updates_per_step"
        )
    if not mini or batch % mini or (mini < batch and steps > 1):
        raise ConfigError(
            f"{key}={mini} does not split data.train_batch_size={batch} with "
            f"trainer.update_accumulation_steps={steps}: use a divisor of the batch size (with "
            "accumulation the batch size itself), or trainer.updates_per_step"
        )
    return {"trainer.updates_per_step": str(batch // mini)}


def model_length(given: Given) -> dict[str, str]:
    value = given["actor_rollout_ref.rollout.max_model_len"]
    prompt, response = (
        _whole(given, f"data.max_{part}_length", 0) for part in ("prompt", "response")
    )
    fits = value is None or (
        prompt and response and isinstance(value, int) and value <= prompt + response + 1
    )
    return {"rollout.max_model_len": "null" if fits else str(value)}
