"""The dotted keys of the schema: which exist, their rules, which sections are free-form, and which
key is nearest to a misspelt one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from verl_opd.config.schema import Config
from verl_opd.opd.options import Rule, rule_of

# Keys and sections of earlier versions -> what they are called now.
RENAMED = {"warmup": "sft", "training": "compute", "trainer.warmup_steps": "sft.steps"}


@dataclass(frozen=True)
class _Tables:
    """The schema, flattened to dotted keys."""

    values: set[str] = field(default_factory=set)  # keys that hold a value
    sections: set[str] = field(default_factory=set)  # keys that hold a dataclass of the schema
    free_form: set[str] = field(default_factory=set)  # sections that are dicts
    # keys of lists and dicts whose entries are single values
    single_values: set[str] = field(default_factory=set)
    rules: dict[str, Rule] = field(default_factory=dict)  # key -> what its value may be


@cache
def _tables() -> _Tables:
    found = _Tables()

    def walk(schema: type[Any], prefix: str) -> None:
        hints = get_type_hints(schema)
        for item in fields(schema):
            key, hint = prefix + item.name, hints[item.name]
            if isinstance(hint, type) and is_dataclass(hint):
                found.sections.add(key)
                walk(hint, f"{key}.")
            elif get_origin(hint) is dict:
                found.free_form.add(key)
            else:
                found.values.add(key)
            for part in (hint, *get_args(hint)):
                if get_origin(part) in (list, tuple, dict) and get_args(part)[-1] is not Any:
                    found.single_values.add(key)
            if rule := rule_of(item):
                found.rules[key] = rule

    walk(Config, "")
    return found


def rules() -> Mapping[str, Rule]:
    """The rule of every key that has one, in the order of the schema."""
    return _tables().rules


def is_free_form(key: str) -> bool:
    """Whether `key` is a free-form section, or lies inside one."""
    return any(key == section or key.startswith(f"{section}.") for section in _tables().free_form)


def is_section(key: str) -> bool:
    return key in _tables().sections


def holds_single_values(key: str) -> bool:
    """Whether `key` is a list or mapping that holds neither lists nor mappings."""
    return key in _tables().single_values


def keys_of(section: str) -> list[str]:
    """Names of the values of a section, sorted."""
    prefix = f"{section}."
    return sorted(key.removeprefix(prefix) for key in _tables().values if key.startswith(prefix))


def is_known(key: str) -> bool:
    """Whether the schema defines `key`, as a value, a section, or an entry of a free-form
    section.
    """
    return key in _tables().values or is_section(key) or is_free_form(key)


def renamed(key: str) -> str | None:
    """Today's name of a key of an earlier version; None for every other one."""
    for old, new in RENAMED.items():
        if key == old or (key.startswith(f"{old}.") and is_known(new + key[len(old) :])):
            return new + key[len(old) :]
    return None


def nearest_key(key: str) -> str:
    """The valid key that `key` most likely stands for: the same name in another section first, else
    the closest spelling.
    """
    tables = _tables()
    sections = set() if "." in key else tables.sections
    valid = sorted(tables.values | tables.free_form | sections)
    name = key.rsplit(".", 1)[-1]
    same_name = [candidate for candidate in valid if candidate.rsplit(".", 1)[-1] == name]
    return difflib.get_close_matches(key, same_name or valid, n=1, cutoff=0.0)[0]
