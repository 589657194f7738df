"""From override lines in verl's, Draft-OPD's or former names to lines in our keys, by the table of
aliases.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from verl_opd.compat.aliases import TABLE, AliasRow, Drop, To, Unsupported, With
from verl_opd.compat.values import UNREADABLE, Given, parsed, quoted
from verl_opd.config.keys import is_known
from verl_opd.errors import ConfigError


@dataclass(frozen=True)
class Translation:
    """How one override line was translated."""

    old: str  # the line as given
    new: tuple[str, ...]  # the lines in our keys; empty = dropped
    reason: str  # why, as printed; empty for a plain rename


def translate(overrides: list[str]) -> tuple[list[str], list[Translation]]:
    """The override lines in our keys, and the translation of each line with another key. Lines with
    our keys, or with keys that are not in the table, pass unchanged.

    Of several lines with one old key the last one counts, as in Hydra. ConfigError for a value that
    is not supported, and for two lines that decide one key differently.
    """
    lines = [_Line.of(text) for text in overrides]
    counting = {line.key: line for line in lines}
    given = {key: line.value for key, line in counting.items() if line.value is not UNREADABLE}
    news = {key: _new_lines(line, given) for key, line in counting.items() if line.row is not None}
    _check_agreement(counting, news)
    translated, translations = list[str](), list[Translation]()
    written = {key for key, line in counting.items() if line.row is None}
    for line in lines:
        if line.row is None:
            translated.append(line.text)
        elif counting[line.key] is line:
            new = news[line.key]
            translated += [f"{key}={text}" for key, text in new.items() if key not in written]
            written |= set(new)
            translations.append(
                Translation(
                    line.text,
                    tuple(f"{key}={text}" for key, text in new.items()),
                    _reason(line.row, new),
                )
            )
    return translated, translations


@dataclass(frozen=True, kw_only=True)
class _Line:
    """An override line."""

    text: str  # as given
    key: str = ""  # without the prefix + or ++; empty where the line has another form
    raw: str = ""  # the text of the value
    value: Any = None  # the value that Hydra's grammar reads in it, or UNREADABLE
    row: AliasRow | None = None  # None = the line passes unchanged
    tail: str = ""  # what the last `*` of the row matched

    @staticmethod
    def of(text: str) -> _Line:
        match = re.fullmatch(r"\+{0,2}([^+~=][^=]*)=(.*)", text, re.DOTALL)
        if not match:
            return _Line(text=text)
        key, raw = match[1], match[2]
        row, tail = _find(key)
        if row is None and not is_known(key):
            return _Line(text=text)
        value = parsed(key, raw)
        if value is UNREADABLE and isinstance(row, To) and row.new.endswith("*") and _is_json(raw):
            raw = quoted(raw)
            value = parsed(key, raw)
        line = _Line(text=text, key=key, raw=raw, value=value, row=row, tail=tail)
        unchanged = value is UNREADABLE or (
            isinstance(row, To) and row.new == key and _new_text(line, row) == raw
        )
        return _Line(text=text, key=key, raw=raw, value=value) if unchanged else line


def _is_json(raw: str) -> bool:
    try:
        return isinstance(json.loads(raw), dict | list)
    except ValueError:
        return False


@cache
def _patterns() -> list[tuple[re.Pattern[str], AliasRow]]:
    """Rows whose key holds a `*`: one part of a key, at the end any number of them."""
    starred = [(key, row) for key, row in TABLE.items() if "*" in key]
    return [
        (re.compile(re.sub(r"\\\*$", "(.+)", re.escape(key)).replace(r"\*", "([^.]+)")), row)
        for key, row in starred
    ]


def _find(key: str) -> tuple[AliasRow | None, str]:
    """The row of `key` (None if the table has none) and what its last `*` matched."""
    if key in TABLE:
        return TABLE[key], ""
    matches = ((pattern.fullmatch(key), row) for pattern, row in _patterns())
    return next(((row, match[match.lastindex or 0]) for match, row in matches if match), (None, ""))


def _new_lines(line: _Line, given: Given) -> dict[str, str]:
    """New keys and their texts; empty when the line is dropped."""
    row, shown = line.row, f"{line.key}={line.raw}"
    if isinstance(row, Unsupported):
        raise ConfigError(f"{shown} is not supported ({row.why}): leave it out")
    if isinstance(row, Drop):
        if row.only and line.value not in row.only:
            accepted = " or ".join(map(in_words, row.only))
            raise ConfigError(
                f"{shown} is not supported ({row.why}): use {accepted}, or leave it out"
            )
        return {}
    if isinstance(row, With):
        resolved = row.resolve(given)
        return {key: resolved[key] for key in row.news if key in resolved}
    assert isinstance(row, To)
    return {row.new.replace("*", line.tail): _new_text(line, row)}


def _new_text(line: _Line, row: To) -> str:
    if isinstance(row.value, dict):
        if str(line.value) not in row.value:
            raise ConfigError(f"{line.key}={line.raw} is not one of {', '.join(row.value)}")
        return row.value[str(line.value)]
    try:
        text = row.value(line.value) if row.value else None
    except ValueError as error:
        raise ConfigError(f"{line.key}={line.raw} must be {error}") from error
    return line.raw if text is None else text


def _check_agreement(counting: Mapping[str, _Line], news: Mapping[str, Mapping[str, str]]) -> None:
    """ConfigError when two lines give one of our keys different values."""
    claims = {key: line for key, line in counting.items() if line.row is None}
    for old, new in news.items():
        for key, raw in new.items():
            line = _Line(text=counting[old].text, key=key, raw=raw, value=parsed(key, raw))
            other = claims.setdefault(key, line)
            if line.value != other.value:
                raise ConfigError(
                    f"{other.text} and {line.text} both set {key}, to {in_words(other.value)} "
                    f"and {in_words(line.value)}: keep one"
                )


def _reason(row: AliasRow, new: Mapping[str, str]) -> str:
    if isinstance(row, Drop):
        return row.why
    note = row.note if isinstance(row, To | With) else ""
    return note if new or not note else f"has no effect beside the other lines ({note})"


def in_words(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def notices(translations: list[Translation]) -> str:
    """`old -> new`, a line each, aligned up to a width; empty for none."""
    width = min(88, max((len(entry.old) for entry in translations), default=0))
    rows = (
        f"  {entry.old:<{width}} -> {'  '.join(entry.new) or f'dropped: {entry.reason}'}"
        for entry in translations
    )
    return "".join(f"{row}\n" for row in rows)
