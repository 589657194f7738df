"""Registry of draft families: every sub-package that defines FAMILY is one."""

from __future__ import annotations

import importlib
import pkgutil

from verl_opd.drafts.base import DraftFamily
from verl_opd.errors import ConfigError


def family_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)


def get_family(name: str) -> DraftFamily:
    """The family called `name`; ConfigError lists the known ones."""
    if name not in family_names():
        raise ConfigError(
            f"draft.family={name!r} is unknown; available: {', '.join(family_names())}"
        )
    family: DraftFamily = importlib.import_module(f"{__name__}.{name}").FAMILY
    return family
