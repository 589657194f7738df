"""How Hydra reads recipes: each is checked to be a mapping, and its keys of earlier versions get
today's names.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from verl_opd.config.keys import RENAMED
from verl_opd.errors import ConfigError

log = logging.getLogger(__name__)

_MISSING = object()
_OLD_REFERENCE = re.compile(rf"\$\{{({'|'.join(map(re.escape, RENAMED))})(?=[.}}])")


class RecipeSource(FileConfigSource):
    """A folder of recipes, as `recipe://<folder>` in Hydra's search path."""

    @staticmethod
    def scheme() -> str:
        return "recipe"

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path))
        content, renamed = read_recipe(file)
        result = super().load_config(config_path)
        package = result.header.get("package") or ("_global_" if "/" not in config_path else "")
        if package == "_global_":  # Hydra puts the content of any other file below a section
            for old, new in renamed:
                log.warning(f"{title(file)}: {old} is now called {new}")
            result.config = OmegaConf.create(content)
        return result


def register() -> None:
    """Make `recipe://` known to Hydra."""
    Plugins.instance().register(RecipeSource)


def title(file: Path) -> str:
    """How messages name a recipe file."""
    return f"recipe {file.stem} ({file})"


def read_recipe(file: Path) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The content of a recipe in today's keys, interpolations unresolved, and the (old, new) names
    of the keys that were renamed. ConfigError for a file that is not a mapping.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{title(file)} cannot be read: {error}") from error
    if not isinstance(content, dict | None):
        raise ConfigError(
            f"{title(file)} holds {content!r:.80}, but a recipe holds sections, such as "
            "data: {seed: 1}"
        )
    content = _with_new_references(OmegaConf.to_container(OmegaConf.load(file)))
    renamed = list[tuple[str, str]]()
    for old, new in RENAMED.items():
        value = _pop(content, old)
        if isinstance(value, dict):
            moves = [(f"{old}.{name}", f"{new}.{name}", entry) for name, entry in value.items()]
        else:
            moves = [] if value is _MISSING else [(old, new, value)]
        for former, present, entry in moves:
            if not _set(content, present, entry):
                raise ConfigError(
                    f"{title(file)}: {former} (value {entry!r}) is now called {present}, which is "
                    "given too: keep one of them"
                )
            renamed.append((former, present))
    return content, renamed


def _with_new_references(node: Any) -> Any:
    """The node, with today's names in interpolations such as ${training.attention}."""
    if isinstance(node, dict):
        return {key: _with_new_references(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_new_references(value) for value in node]
    if isinstance(node, str):
        return _OLD_REFERENCE.sub(lambda match: "${" + RENAMED[match[1]], node)
    return node


def _pop(content: dict[str, Any], key: str) -> Any:
    *sections, name = key.split(".")
    for section in sections:
        content = content.get(section, {})
        if not isinstance(content, dict):
            return _MISSING
    return content.pop(name, _MISSING)


def _set(content: dict[str, Any], key: str, value: Any) -> bool:
    """Whether the key was free, and now has the value."""
    *sections, name = key.split(".")
    for section in sections:
        content = content.setdefault(section, {})
        if not isinstance(content, dict):
            return False
    if name in content:
        return False
    content[name] = value
    return True
