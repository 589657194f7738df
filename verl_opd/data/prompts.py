"""Prompts from JSONL files: a row holds `prompt` (chat messages, or a string = one user message) and optionally `data_source` and `tools` (a
list, or the same as JSON text)."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from verl_opd.errors import ConfigError

_REFUSED_SHARE = 0.05


@dataclass(frozen=True)
class Prompt:
    """One rollout input.

    sample_id: the row number over all files, from 0; the loader puts the epoch in front. prompt_ids: token ids after the chat template,
    generation prompt included. messages: what they were made from. teacher_key: the row's value of teacher.key, "" without one.
    """

    sample_id: str
    data_source: str
    prompt_ids: tuple[int, ...]
    messages: tuple[dict[str, Any], ...]
    teacher_key: str = ""


@dataclass(frozen=True)
class DataReport:
    """What happened to the rows of a data set. rows: read (after max_samples). dropped_overlong: longer than max_prompt_length tokens. refused:
    place and reason of every row that the chat template refuses."""

    rows: int
    dropped_overlong: int
    max_prompt_length: int
    refused: tuple[str, ...] = ()

    @property
    def kept(self) -> int:
        return self.rows - self.dropped_overlong - len(self.refused)

    def __str__(self) -> str:
        text = f"{self.rows} rows read, {self.dropped_overlong} dropped for more than {self.max_prompt_length} prompt tokens"
        return text + (f", {len(self.refused)} refused by the chat template (first {self.refused[0]})" if self.refused else "")


@dataclass(frozen=True)
class _Row:
    place: str  # file:line
    data_source: str
    messages: tuple[dict[str, Any], ...]
    fields: dict[str, Any]
    tools: tuple[Any, ...] | None = None


def load_prompts(
    files: Sequence[str | Path],
    tokenizer: Any,
    *,
    prompt_key: str = "prompt",
    max_prompt_length: int,
    max_samples: int | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    teacher_key: str = "data_source",
    teachers: Collection[str] = (),
) -> tuple[list[Prompt], DataReport]:
    """Read the first `max_samples` rows over all files and tokenise them; longer prompts than `max_prompt_length` are dropped and counted.

    `tokenizer` is a transformers tokenizer; `template_kwargs` go to its chat template. teacher_key: the field that names a row's teacher, which
    has to be one of `teachers` where there are several. Rows that the template refuses are dropped and counted while they are at most one in twenty
    (_REFUSED_SHARE). ConfigError names file and line of a bad row,
    and the counts when nothing is left.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(f"target.path: the tokenizer of {getattr(tokenizer, 'name_or_path', 'the target')} has no chat template")
    rows = list(islice((row for file in files for row in _read(Path(file), prompt_key)), max_samples))
    prompts, dropped, refused = [], 0, list[str]()
    for index, row in enumerate(rows):
        try:
            ids = _apply_template(row, tokenizer, template_kwargs or {})
        except (TemplateError, TypeError) as error:
            refused.append(f"{row.place}: {error}")
            continue
        if len(ids) > max_prompt_length:
            dropped += 1
        else:
            prompts.append(Prompt(str(index), row.data_source, ids, row.messages, _teacher_of(row, teacher_key, teachers)))
    report = DataReport(len(rows), dropped, max_prompt_length, tuple(refused))
    if len(refused) > _REFUSED_SHARE * len(rows):
        raise ConfigError(f"the chat template refuses {len(refused)} of {len(rows)} prompts: {'; '.join(refused[:3])}")
    if not prompts:
        raise ConfigError(f"no prompt is left of {', '.join(map(str, files))}: {report}; raise data.max_prompt_length or use other files")
    return prompts, report


def _teacher_of(row: _Row, key: str, teachers: Collection[str]) -> str:
    name = row.data_source if key == "data_source" else str(row.fields.get(key, ""))
    if len(teachers) > 1 and name not in teachers:
        raise ConfigError(f"{row.place}: {key}={name!r} names none of the teachers {', '.join(teachers)} (teacher.models, teacher.key)")
    return name


def _read(file: Path, prompt_key: str) -> Iterator[_Row]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse(line, f"{file}:{number}", file.stem, prompt_key)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _parse(line: str, place: str, default_source: str, prompt_key: str) -> _Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: not valid JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: a row must be a JSON object, not {type(row).__name__}")
    if prompt_key not in row:
        raise ConfigError(
            f"{place}: row has no {prompt_key!r} (it has {', '.join(row) or 'nothing'}); data.prompt_key names the field to use"
        )
    messages = row[prompt_key]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise ConfigError(f"{place}: {prompt_key!r} must be a string or a non-empty list of messages with role and content")
    source = row.get("data_source", default_source)
    if not isinstance(source, str):
        raise ConfigError(f"{place}: 'data_source' must be a string, not {source!r}")
    fields = {name: value for name, value in row.items() if name != prompt_key}
    return _Row(place, source, tuple(messages), fields, _tools(row.get("tools"), place))


def _tools(given: Any, place: str) -> tuple[Any, ...] | None:
    """Tool descriptions for the chat template; None and an empty list alike mean that there are none."""
    try:
        tools = json.loads(given) if isinstance(given, str) and given.strip() else given
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: 'tools' is text that is no JSON ({error.msg} at column {error.colno})") from error
    if not tools:
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ConfigError(f"{place}: 'tools' must be a list of objects, or the same as JSON text")
    return tuple(tools)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str | list)


def _apply_template(row: _Row, tokenizer: Any, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    tools = {} if row.tools is None else {"tools": list(row.tools)}
    ids = tokenizer.apply_chat_template(list(row.messages), add_generation_prompt=True, tokenize=True, return_dict=False, **tools, **kwargs)
    return tuple(ids)
