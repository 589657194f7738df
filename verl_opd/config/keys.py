"""The dotted keys of the schema: which exist, which sections are free-form, and which is nearest to
a misspelt one.
"""

from __future__ import annotations

import difflib
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_origin, get_type_hints

from verl_opd.config.schema import Config

# Keys and sections of earlier versions -> what they are called now.
RENAMED = {"warmup": "sft", "training": "compute", "trainer.warmup_steps": "sft.steps"}


@cache
def _tables() -> tuple[frozenset[str], dict[str, str], frozenset[str]]:
    """Leaves, sections (with the name of their dataclass), free-form sections (dicts)."""
    leaves: set[str] = set()
    sections: dict[str, str] = {}
    free: set[str] = set()

    def walk(schema: type[Any], prefix: str) -> None:
        hints = get_type_hints(schema)
        for item in fields(schema):
            key, hint = prefix + item.name, hints[item.name]
            if isinstance(hint, type) and is_dataclass(hint):
                sections[key] = hint.__name__
                walk(hint, f"{key}.")
            elif get_origin(hint) is dict:
                free.add(key)
            else:
                leaves.add(key)

    walk(Config, "")
    return frozenset(leaves), sections, frozenset(free)


def is_free_form(key: str) -> bool:
    """Whether `key` is a free-form section, or lies inside one."""
    return any(key == section or key.startswith(f"{section}.") for section in _tables()[2])


def is_section(key: str) -> bool:
    return key in _tables()[1]


def section_of(dataclass_name: str) -> str | None:
    """The section that a dataclass of the schema describes."""
    return next((key for key, name in _tables()[1].items() if name == dataclass_name), None)


def is_known(key: str) -> bool:
    """Whether the schema defines `key`, as a value, a section, or an entry of a
    free-form section.
    """
    return key in _tables()[0] or is_section(key) or is_free_form(key)


def renamed(key: str) -> str | None:
    """Today's name of a key of an earlier version; None for every other one."""
    for old, new in RENAMED.items():
        if key == old or (key.startswith(f"{old}.") and is_known(new + key[len(old) :])):
            return new + key[len(old) :]
    return None


def keys_of(section: str) -> list[str]:
    """Names of the values of a section, sorted."""
    prefix = f"{section}."
    return sorted(key.removeprefix(prefix) for key in _tables()[0] if key.startswith(prefix))


def nearest_key(key: str) -> str:
    """The valid key that `key` most likely stands for: the same name in another section first, else
    the closest spelling.
    """
    leaves, sections, free = _tables()
    valid = sorted(leaves | free | (set() if "." in key else set(sections)))
    name = key.rsplit(".", 1)[-1]
    same_name = [candidate for candidate in valid if candidate.rsplit(".", 1)[-1] == name]
    return difflib.get_close_matches(key, same_name or valid, n=1, cutoff=0.0)[0]
