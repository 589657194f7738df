"""From a recipe and command-line overrides to a `Config`: composed with Hydra, checked against the
schema, every fault one clear line.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from verl_opd.compat.aliases import translate
from verl_opd.config.keys import (
    is_free_form,
    is_known,
    is_section,
    nearest_key,
    renamed,
    section_of,
)
from verl_opd.config.recipes import find_recipe, resolve_path, shipped_root
from verl_opd.config.schema import Config
from verl_opd.config.validate import validate
from verl_opd.errors import ConfigError

__all__ = ["compose_config", "load_config", "to_yaml", "validate"]

_SCHEMA = "verl_opd_schema"
_JOB = "verl_opd_job"


def load_config(recipe: str, overrides: list[str]) -> Config:
    """The configuration of a run, from a recipe (name or path) and `key=value` overrides in Hydra's
    grammar, with our keys or verl's.

    Existing local paths come back absolute. Only keys and types are checked here; `validate` checks
    the values. Raises ConfigError.
    """
    composed = compose_config(recipe, overrides)
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ConfigError(
            f"{missing[0]} has no value (???): set it in the recipe, or add {missing[0]}=... to "
            "the command"
        )
    try:
        cfg = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        _raise_readable(error, recipe)
    assert isinstance(cfg, Config)
    cfg.optim.betas = tuple(cfg.optim.betas)  # type: ignore[assignment]  # OmegaConf hands tuples back as lists
    cfg.target.path = resolve_path(cfg.target.path)
    cfg.draft.path = cfg.draft.path and resolve_path(cfg.draft.path)
    cfg.data.train_files = [resolve_path(path) for path in cfg.data.train_files]
    cfg.data.val_files = {name: resolve_path(path) for name, path in cfg.data.val_files.items()}
    return cfg


def compose_config(recipe: str, overrides: list[str]) -> DictConfig:
    """The composed tree, typed by the schema; values may still be missing (`???`). Raises
    ConfigError.
    """
    path = find_recipe(recipe)
    overrides, _ = translate(overrides)
    prepared = [
        _prepare(override, text)
        for text, override in zip(overrides, _parse(overrides), strict=True)
    ]
    store = ConfigStore.instance()
    store.store(name=_SCHEMA, node=Config)
    store.store(name=_JOB, node={"defaults": [_SCHEMA, path.stem, "_self_"]})
    # a user's recipe may extend a shipped one
    shipped = f"hydra.searchpath=[file://{shipped_root() / 'recipes'}]"
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(path.parent)):
            composed = compose(_JOB, [*prepared, shipped])
        _refuse_unknown("", OmegaConf.to_container(composed, resolve=True))
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {recipe} is not valid YAML: {_one_line(error)}") from error
    except (HydraException, OmegaConfBaseException) as error:
        _raise_readable(error, recipe)
    return composed


def to_yaml(cfg: Config | DictConfig) -> str:
    """The resolved configuration as YAML, a valid recipe itself."""
    node = cfg if isinstance(cfg, DictConfig) else OmegaConf.structured(cfg)
    return OmegaConf.to_yaml(node, resolve=True)


def _parse(overrides: list[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            reason = _one_line(error).removeprefix(f"Error parsing override '{text}' ")
            raise ConfigError(
                f"override {text!r} cannot be read ({reason}): overrides look like "
                "section.key=value"
            ) from error
    return parsed


def _prepare(override: Override, text: str) -> str:
    """Refuse what the schema does not know; let free-form entries be set with or without the `+`
    that Hydra asks for.
    """
    key = override.key_or_group
    if not key:
        raise ConfigError(f"override {text!r} has no key: overrides look like section.key=value")
    if not is_known(key) or override.package is not None:
        raise _unknown(text.lstrip("+~").split("=")[0], override.value())
    if override.is_sweep_override():
        raise ConfigError(
            f"{text}: several values; a list is written [a,b], a string with a comma '\"a,b\"'"
        )
    if override.is_delete() and not is_free_form(key):
        raise ConfigError(
            f"{text}: only entries of free-form sections can be deleted; set {key} to another "
            "value instead"
        )
    _refuse_unknown(key, override.value())
    return f"++{text.lstrip('+')}" if is_free_form(key) and not text.startswith("~") else text


def _refuse_unknown(section: str, node: Any) -> None:
    """ConfigError for the first key below `section` that the schema does not define; "" is the
    root.
    """
    if not isinstance(node, dict) or not (section == "" or is_section(section)):
        return
    for name, value in node.items():
        key = f"{section}.{name}" if section else str(name)
        if not is_known(key):
            raise _unknown(key, value)
        _refuse_unknown(key, value)


def _unknown(key: str, value: Any, where: str = "") -> ConfigError:
    if new := renamed(key):
        return ConfigError(f"{where}{key} (value {value!r}) is now called {new}")
    return ConfigError(
        f"{where}unknown key {key} (value {value!r}): did you mean {nearest_key(key)}?"
    )


def _raise_readable(error: Exception, recipe: str) -> NoReturn:
    """Turn what Hydra or OmegaConf raised into one line with key, value and reason.

    A fault in a recipe arrives as "In '<recipe>': ..." with the path of the value in a line
    `full_key: <key>`; one in an override has the OmegaConf error, which carries the value, as its
    cause.
    """
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    head, _, tail = str(cause).partition("\n    full_key: ")
    key = tail.partition("\n")[0]
    source = re.match(r"In '([^']+)': (?:\w+ raised while composing config:\n)?", head)
    where = f"recipe {source[1]}: " if source else ""
    reason = head[source.end() :] if source else head
    mistyped = re.search(r"(\S+) is not a subclass of (\w+). value: (.*)", reason)
    if isinstance(cause, MissingConfigException):
        reason = f"{reason.splitlines()[0]} (named in defaults)"
    elif "is not a ListConfig" in reason:
        reason = "a list is needed, written [a,b]"
    elif mistyped and (section := section_of(mistyped[2])):
        raise ConfigError(
            f"{where}{section}={mistyped[3]}: a section is needed, not {mistyped[1]}"
        ) from error
    if not key:
        raise ConfigError(where + _one_line(reason)) from error
    if isinstance(cause, InterpolationResolutionError):
        raise ConfigError(f"{key}: {_one_line(reason)}") from error
    value = _value_in_recipe(source[1], recipe, key) if source else getattr(cause, "value", None)
    if re.match(r"Key '.*' (is )?not in ", reason):
        raise _unknown(key, value, where) from error
    raise ConfigError(f"{where}{key}={value!r}: {_one_line(reason)}") from error


def _value_in_recipe(name: str, recipe: str, key: str) -> Any:
    for folder in (find_recipe(recipe).parent, shipped_root() / "recipes"):
        file = folder / f"{name}.yaml"
        if file.is_file():
            return OmegaConf.to_container(
                OmegaConf.create({"value": OmegaConf.select(OmegaConf.load(file), key)})
            )["value"]  # type: ignore[index,call-overload]
    return None


def _one_line(message: object) -> str:
    return " ".join(
        line
        for line in (part.strip() for part in str(message).splitlines())
        if line and "hydra.cc/docs" not in line
    )
