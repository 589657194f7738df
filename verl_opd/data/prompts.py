"""Prompts, from which rollouts start. A row's `prompt` holds chat messages, or a string that is one
user message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from verl_opd.data.rows import DataRow, check_invalid, read_rows
from verl_opd.errors import ConfigError


@dataclass(frozen=True)
class Prompt:
    """The input of one rollout."""

    sample_id: str  # row number over all files, from 0; the loader puts the epoch before it
    data_source: str  # the row's, or else the name of its file
    prompt_ids: tuple[int, ...]  # [P] tokens of the chat template, generation prompt included
    messages: tuple[dict[str, Any], ...]  # what prompt_ids were made from
    teacher_key: str = ""  # the row's value of teacher.key; empty without one


@dataclass(frozen=True)
class DataReport:
    """What happened to the rows of a set of prompts."""

    rows: int  # read, at most max_samples
    dropped_overlong: int  # longer than max_prompt_length tokens
    max_prompt_length: int  # tokens of a kept prompt at most
    invalid: tuple[str, ...] = ()  # place and reason of every row that the template rejects

    @property
    def kept(self) -> int:
        return self.rows - self.dropped_overlong - len(self.invalid)

    def __str__(self) -> str:
        text = (
            f"{self.rows} rows read, {self.dropped_overlong} dropped with more than "
            f"{self.max_prompt_length} prompt tokens"
        )
        return text + (
            f", {len(self.invalid)} skipped: not valid for the chat template (first "
            f"{self.invalid[0]})"
            if self.invalid
            else ""
        )


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
    """Read the first `max_samples` rows over all files and tokenise them; prompts longer than
    `max_prompt_length` are dropped and counted.

    `tokenizer`: a transformers tokenizer; `template_kwargs` go to its chat template. `teacher_key`:
    the field that names a row's teacher, one of `teachers` where there are several. Rows that the
    template rejects are skipped and counted, up to INVALID_SHARE of all. ConfigError names file and
    line of a malformed row, and the counts when nothing is left.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            f"target.path: the tokenizer of {getattr(tokenizer, 'name_or_path', 'the target')} has "
            "no chat template"
        )
    rows = read_rows(files, prompt_key, "data.prompt_key", max_samples)
    prompts, dropped, invalid = [], 0, list[str]()
    for index, row in enumerate(rows):
        try:
            ids = _apply_template(row, tokenizer, template_kwargs or {})
        except (TemplateError, TypeError) as error:
            invalid.append(f"{row.place}: {error}")
            continue
        if len(ids) > max_prompt_length:
            dropped += 1
        else:
            prompts.append(
                Prompt(
                    str(index),
                    row.data_source,
                    ids,
                    row.messages,
                    _teacher_of(row, teacher_key, teachers),
                )
            )
    report = DataReport(len(rows), dropped, max_prompt_length, tuple(invalid))
    check_invalid(invalid, len(rows), "prompts")
    if not prompts:
        raise ConfigError(
            f"no prompt of {', '.join(map(str, files))} is left: {report}; raise "
            "data.max_prompt_length or use other files"
        )
    return prompts, report


def _teacher_of(row: DataRow, key: str, teachers: Collection[str]) -> str:
    name = row.data_source if key == "data_source" else str(row.fields.get(key, ""))
    if len(teachers) > 1 and name not in teachers:
        raise ConfigError(
            f"{row.place}: {key}={name!r} is not one of the teachers {', '.join(teachers)} "
            "(teacher.models, teacher.key)"
        )
    return name


def _apply_template(row: DataRow, tokenizer: Any, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    given = {**row.template_input(), **kwargs}
    return tuple(
        tokenizer.apply_chat_template(
            list(row.messages),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **given,
        )
    )
