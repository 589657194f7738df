"""Prompts: what rollouts start from. A row's `prompt` holds chat messages, or a string = one user
message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from verl_opd.data.rows import Row, check_invalid, read_rows
from verl_opd.errors import ConfigError


@dataclass(frozen=True)
class Prompt:
    """One rollout input.

    sample_id: the row number over all files, from 0; the loader puts the epoch in front.
    prompt_ids: token ids after the chat template, generation prompt included. messages: what they
    were made from. teacher_key: the row's value of teacher.key, "" without one.
    """

    sample_id: str
    data_source: str
    prompt_ids: tuple[int, ...]
    messages: tuple[dict[str, Any], ...]
    teacher_key: str = ""


@dataclass(frozen=True)
class DataReport:
    """What happened to the rows of a data set. rows: read (after max_samples). dropped_overlong:
    longer than max_prompt_length tokens. invalid: place and reason of every row that the chat
    template rejects.
    """

    rows: int
    dropped_overlong: int
    max_prompt_length: int
    invalid: tuple[str, ...] = ()

    @property
    def kept(self) -> int:
        return self.rows - self.dropped_overlong - len(self.invalid)

    def __str__(self) -> str:
        text = (
            f"{self.rows} rows read, {self.dropped_overlong} dropped for more than "
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
    """Read the first `max_samples` rows over all files and tokenise them; longer prompts than
    `max_prompt_length` are dropped and counted.

    `tokenizer` is a transformers tokenizer; `template_kwargs` go to its chat template. teacher_key:
    the field that names a row's teacher, which has to be one of `teachers` where there are several.
    Rows that the template rejects are dropped and counted while they are at most one in twenty
    (INVALID_SHARE). ConfigError names file and line of a bad row, and the counts when nothing is
    left.
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
            f"no prompt is left of {', '.join(map(str, files))}: {report}; raise "
            "data.max_prompt_length or use other files"
        )
    return prompts, report


def _teacher_of(row: Row, key: str, teachers: Collection[str]) -> str:
    name = row.data_source if key == "data_source" else str(row.fields.get(key, ""))
    if len(teachers) > 1 and name not in teachers:
        raise ConfigError(
            f"{row.place}: {key}={name!r} names none of the teachers {', '.join(teachers)} "
            "(teacher.models, teacher.key)"
        )
    return name


def _apply_template(row: Row, tokenizer: Any, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
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
