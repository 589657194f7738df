"""Rows of JSONL files: chat messages under a key of the user's choice, and optionally `data_source`
and `tools` (a list, or the same as JSON text).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from verl_opd.errors import ConfigError

INVALID_SHARE = 0.05  # of a set's rows that a chat template may reject before it is an error
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names


@dataclass(frozen=True)
class DataRow:
    """One row of a file."""

    place: str  # file:line
    data_source: str  # the row's, or else the name of its file
    messages: tuple[dict[str, Any], ...]  # role, content and other fields that a template reads
    fields: dict[str, Any]  # all of the row except its messages
    tools: tuple[Any, ...] | None = None  # descriptions for the template; None = no tools

    def template_input(self) -> dict[str, Any]:
        """What a chat template gets besides the messages."""
        return {} if self.tools is None else {"tools": list(self.tools)}


def read_rows(
    files: Sequence[str | Path], key: str, option: str, max_samples: int | None = None
) -> list[DataRow]:
    """The first `max_samples` rows over all files. `option`: the configuration key that sets `key`.
    ConfigError names file and line of a malformed row.
    """
    return list(
        islice((row for file in files for row in _read(Path(file), key, option)), max_samples)
    )


def check_invalid(invalid: Sequence[str], rows: int, what: str) -> None:
    """ConfigError when the template rejects more than INVALID_SHARE of the rows."""
    if len(invalid) > INVALID_SHARE * rows:
        raise ConfigError(
            f"the chat template rejects {len(invalid)} of {rows} {what}: {'; '.join(invalid[:3])}"
        )


def _read(file: Path, key: str, option: str) -> Iterator[DataRow]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse(line, f"{file}:{number}", file.stem, key, option)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _parse(line: str, place: str, default_source: str, key: str, option: str) -> DataRow:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{place}: not valid JSON ({error.msg} at column {error.colno})"
        ) from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: a row must be a JSON object, not {type(row).__name__}")
    if key not in row:
        raise ConfigError(
            f"{place}: the row has no field {key!r} (it has {', '.join(row) or 'none'}); set "
            f"{option} to the field to use"
        )
    messages = row[key]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not (isinstance(messages, list) and messages):
        raise ConfigError(
            f"{place}: {key!r} must be a string or a non-empty list of messages with role and "
            "content"
        )
    source = row.get("data_source", default_source)
    if not isinstance(source, str):
        raise ConfigError(f"{place}: 'data_source' must be a string, not {source!r}")
    fields = {name: value for name, value in row.items() if name != key}
    return DataRow(
        place,
        source,
        tuple(_message(message, place, key) for message in messages),
        fields,
        _tools(row.get("tools"), place),
    )


def _message(given: Any, place: str, key: str) -> dict[str, Any]:
    """One message with role and content, from either spelling (`role`/`content`, or ShareGPT's
    `from`/`value`).
    """
    message = dict(given) if isinstance(given, dict) else {}
    if "role" not in message and "from" in message:
        message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
        message["role"] = _ROLES.get(str(message["role"]), message["role"])
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = message["content"] = ""  # a template would print None
    if not (isinstance(message.get("role"), str) and isinstance(content, str | list)):
        raise ConfigError(
            f"{place}: {key!r} must be a string or a non-empty list of messages with role and "
            "content"
        )
    return message


def _tools(given: Any, place: str) -> tuple[Any, ...] | None:
    """Tool descriptions for the chat template; None for a missing or empty list."""
    try:
        tools = json.loads(given) if isinstance(given, str) and given.strip() else given
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{place}: 'tools' is not valid JSON text ({error.msg} at column {error.colno})"
        ) from error
    if not tools:
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ConfigError(f"{place}: 'tools' must be a list of objects, or the same as JSON text")
    return tuple(tools)
