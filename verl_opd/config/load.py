"""From a recipe and command-line overrides to a `Config`: composed with Hydra and checked against
the schema. Every mistake becomes a ConfigError of one line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from verl_opd.config.keys import (
    holds_single_values,
    is_free_form,
    is_known,
    is_section,
    nearest_key,
    renamed,
)
from verl_opd.config.recipes import find_recipe, resolve_path, shipped_root
from verl_opd.config.schema import Config
from verl_opd.config.source import read_recipe, register, title
from verl_opd.config.validate import validate
from verl_opd.errors import ConfigError

__all__ = ["compose_config", "load_config", "to_yaml", "validate"]

_SCHEMA = "verl_opd_schema"
_JOB = "verl_opd_job"


def load_config(recipe: str, overrides: list[str]) -> Config:
    """The configuration of a run, from a recipe (name or path) and `key=value` overrides in Hydra's
    grammar.

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
    # OmegaConf returns tuples as lists
    cfg.optim.betas = tuple(cfg.optim.betas)  # type: ignore[assignment]
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
    prepared = [
        _prepare(override, text)
        for text, override in zip(overrides, _parse(overrides), strict=True)
    ]
    store = ConfigStore.instance()
    store.store(name=_SCHEMA, node=Config)
    # a user's recipe may extend a shipped one
    folders = [f"recipe://{folder}" for folder in _folders(path)]
    job = {"defaults": [_SCHEMA, path.stem, "_self_"], "hydra": {"searchpath": folders}}
    store.store(name=_JOB, node=job)
    register()
    try:
        with initialize(version_base="1.3", config_path=None):
            composed = compose(_JOB, prepared)
        _check_known("", OmegaConf.to_container(composed, resolve=True))
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {recipe} is not valid YAML: {_one_line(error)}") from error
    except (HydraException, OmegaConfBaseException) as error:
        _raise_readable(error, recipe)
    return composed


def _folders(recipe: Path) -> tuple[Path, Path]:
    """Where `recipe` and the recipes that it extends are looked up."""
    return recipe.parent, shipped_root() / "recipes"


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
    """The override as Hydra takes it: entries of free-form sections may come without the `+` that
    Hydra needs. ConfigError for keys that the schema does not define.
    """
    key = override.key_or_group
    if not key:
        raise ConfigError(f"override {text!r} has no key: overrides look like section.key=value")
    if not is_known(key) or override.package is not None:
        raise _unknown(text.lstrip("+~").split("=")[0], override.value())
    if override.is_sweep_override():
        raise ConfigError(
            f"{text} has several values: write a list as [a,b], a string with a comma as '\"a,b\"'"
        )
    if override.is_delete() and not is_free_form(key):
        raise ConfigError(
            f"{text}: only entries of free-form sections can be deleted; set {key} to another "
            "value instead"
        )
    _check_known(key, override.value())
    return f"++{text.lstrip('+')}" if is_free_form(key) and not text.startswith("~") else text


def _check_known(section: str, node: Any) -> None:
    """ConfigError for the first key below `section` that the schema does not define, or whose list
    or mapping holds more than single values; "" is the root.
    """
    if holds_single_values(section):
        _check_entries(section, node)
    if not isinstance(node, dict) or not (section == "" or is_section(section)):
        return
    for name, value in node.items():
        key = f"{section}.{name}" if section else str(name)
        if not is_known(key):
            raise _unknown(key, value)
        _check_known(key, value)


def _check_entries(key: str, node: Any) -> None:
    """OmegaConf does not check what lies inside the entries of a typed list or mapping."""
    entries = {f"[{i}]": entry for i, entry in enumerate(node)} if isinstance(node, list) else {}
    if isinstance(node, dict):
        entries = {f".{name}": entry for name, entry in node.items()}
    for name, entry in entries.items():
        if isinstance(entry, list | dict):
            raise ConfigError(
                f"{key}{name}={entry!r}: a single value is needed, not a {_kind(entry)}"
            )


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "mapping"
    return type(value).__name__


def _unknown(key: str, value: Any, where: str = "") -> ConfigError:
    if new := renamed(key):
        return ConfigError(f"{where}{key} (value {value!r}) is now called {new}")
    return ConfigError(
        f"{where}unknown key {key} (value {value!r}): did you mean {nearest_key(key)}?"
    )


def _raise_readable(error: Exception, recipe: str) -> NoReturn:
    """Turn what Hydra or OmegaConf raised into one line with recipe, key, value and reason."""
    name = _recipe_named_by(error)
    file = _file(name, recipe) if name else None
    where = f"{title(file)}: " if file else f"recipe {name}: " if name else ""
    if isinstance(error, MissingConfigException):
        missing = error.missing_cfg_file
        raise ConfigError(f"{where}{missing!r}, named in defaults, does not exist") from error
    # Hydra wraps an error about an override as a cause, and one about a recipe as the context
    causes = (error, error.__cause__, error.__context__)
    cause = next((e for e in causes if isinstance(e, OmegaConfBaseException)), None)
    if cause is None:
        raise ConfigError(where + _one_line(error)) from error
    content = read_recipe(file)[0] if file else {}
    key = cause.full_key or _scalar_section(content)
    if not key:
        raise ConfigError(where + _reason(cause)) from error
    if isinstance(cause, InterpolationResolutionError):
        raise ConfigError(f"{key}: {_reason(cause)}") from error
    value = _select(content, key) if cause.value is None else cause.value
    if isinstance(value, AnyNode):
        value = value._value()
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        raise _unknown(key, value, where) from error
    if is_section(key):
        needed = "a section is needed"
    elif is_free_form(key):
        needed = "a mapping is needed, {a: b}"
    else:
        needed = "a list is needed, written [a,b]"
    if isinstance(cause, ConfigTypeError):  # a list given for a mapping, or the reverse; no value
        raise ConfigError(f"{where}{key}: {needed}") from error
    if value is None and (is_section(key) or is_free_form(key)):
        remedy = "add keys below it, or remove it" if file else "give it keys, or leave it out"
        raise ConfigError(f"{where}{key} is empty, but {needed}: {remedy}") from error
    reason = _reason(cause)
    if is_section(key):
        reason = f"{needed}, not {_kind(value)}"
    elif isinstance(cause.child_node, ListConfig):
        reason = needed
    raise ConfigError(f"{where}{key}={value!r}: {reason}") from error


def _recipe_named_by(error: Exception) -> str | None:
    """The recipe that an error of Hydra is about. Only its text has the name, as "In '<name>': ..."
    (hydra/_internal/config_loader_impl.py and defaults_list.py).
    """
    match = re.match(r"In '([^']+)': ", str(error))
    return match[1] if match else None


def _reason(error: OmegaConfBaseException) -> str:
    """The sentence of an OmegaConf error, without the key and types that format_and_raise of
    omegaconf/_utils.py appends to it.
    """
    return _one_line(str(error).partition("\n    full_key: ")[0])


def _file(name: str, recipe: str) -> Path | None:
    """The YAML file `name`, which `recipe` is or extends; None if not found."""
    files = (folder / f"{name}.yaml" for folder in _folders(find_recipe(recipe)))
    return next((file for file in files if file.is_file()), None)


def _select(content: Any, key: str) -> Any:
    for name in key.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    return content


def _scalar_section(content: Any, prefix: str = "") -> str:
    """The first section whose content is not a mapping; "" when there is none."""
    for name, value in content.items() if isinstance(content, dict) else ():
        key = f"{prefix}{name}"
        if is_section(key):
            found = _scalar_section(value, f"{key}.") if isinstance(value, dict) else key
            if found:
                return found
    return ""


def _one_line(message: object) -> str:
    return " ".join(
        line
        for line in (part.strip() for part in str(message).splitlines())
        if line and "hydra.cc/docs" not in line
    )
