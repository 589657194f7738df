"""Conversations as supervision: each is rendered once by the chat template, and a mask marks the
tokens that its assistant would have generated.

An assistant turn is supervised if the rendering contains it exactly as it was generated: after the
generation prompt that the template writes for the turns before it, up to its stop token. A turn
that the template changes later (Qwen3 drops the thinking of earlier turns) is context. Templates
need no generation tags for this, and no template is known by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from verl_opd.data.rows import DataRow, check_invalid, read_rows
from verl_opd.errors import ConfigError
from verl_opd.opd.trace import RolloutSample, VerifyTrace

ROLES = ("system", "developer", "user", "assistant", "tool")
_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, kw_only=True)
class ConversationReport:
    """What happened to the rows of a set of conversations."""

    rows: int  # read
    dropped_overlong: int  # longer than max_length tokens
    dropped_unsupervised: int  # without a token to learn
    invalid: tuple[str, ...]  # place and reason of every row that the template rejects
    max_length: int  # tokens of a kept conversation at most
    context_turns: int  # assistant turns, of kept rows, that are context only
    open_turns: int  # supervised turns, of kept rows, without a stop token
    supervised: int  # tokens to learn, of kept rows
    tokens: int  # all tokens of kept rows

    def __str__(self) -> str:
        text = (
            f"{self.rows} rows read, {self.dropped_overlong} dropped with more than "
            f"{self.max_length} tokens, {self.dropped_unsupervised} dropped with nothing to learn; "
            f"{self.supervised} of {self.tokens} tokens supervised"
        )
        if self.context_turns:
            text += (
                f"; {self.context_turns} assistant turns are context only: the template does not "
                "show them as they were generated"
            )
        if self.open_turns:
            text += (
                f"; {self.open_turns} supervised turns end without a stop token: the draft does "
                "not learn from them where to stop"
            )
        return text + (
            f"; {len(self.invalid)} skipped: not valid for the chat template (first "
            f"{self.invalid[0]})"
            if self.invalid
            else ""
        )


@dataclass(frozen=True)
class Masked:
    """One rendered conversation."""

    ids: tuple[int, ...]  # [S] tokens
    mask: tuple[bool, ...]  # [S] whether the assistant generated the token
    context_turns: int  # see ConversationReport
    open_turns: int  # see ConversationReport


def load_conversations(
    files: Sequence[str | Path],
    tokenizer: Any,
    *,
    key: str,
    max_length: int,
    stop_ids: Collection[int],
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[RolloutSample], ConversationReport]:
    """The conversations of JSONL files as finished responses: prompt_ids are all tokens before the
    first supervised one, response_ids the rest up to the last supervised one.

    `tokenizer`: a fast transformers tokenizer with a chat template. `stop_ids`: every token that
    ends a response of the target. ConfigError names file and line of a malformed row, and the
    counts when the template rejects many rows or nothing is left to learn.
    """
    _check_tokenizer(tokenizer)
    rows = read_rows(files, key, "sft.messages_key")
    samples, invalid, counts = list[RolloutSample](), list[str](), Counter[str]()
    for index, row in enumerate(rows):
        _check_roles(row)
        try:
            masked = mask_conversation(row, tokenizer, stop_ids, template_kwargs or {})
        except (TemplateError, TypeError) as error:
            invalid.append(f"{row.place}: {error}")
            continue
        if len(masked.ids) > max_length:
            counts["dropped_overlong"] += 1
        elif not any(masked.mask[1:]):
            counts["dropped_unsupervised"] += 1
        else:
            samples.append(_sample(str(index), row.data_source, masked))
            counts["tokens"] += len(masked.ids)
            counts["context_turns"] += masked.context_turns
            counts["open_turns"] += masked.open_turns
    report = ConversationReport(
        rows=len(rows),
        dropped_overlong=counts["dropped_overlong"],
        dropped_unsupervised=counts["dropped_unsupervised"],
        invalid=tuple(invalid),
        max_length=max_length,
        context_turns=counts["context_turns"],
        open_turns=counts["open_turns"],
        supervised=sum(sum(sample.supervised or ()) for sample in samples),
        tokens=counts["tokens"],
    )
    check_invalid(invalid, len(rows), "conversations")
    if not samples:
        raise ConfigError(
            f"no conversation of {', '.join(map(str, files))} is left: {report}; check "
            "sft.files and data.max_*_length"
        )
    return samples, report


def _check_tokenizer(tokenizer: Any) -> None:
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if not (getattr(tokenizer, "is_fast", False) and has_template):
        raise ConfigError(
            "sft.files needs a target with a fast tokenizer and a chat template: loss masks are "
            "computed from both"
        )


def mask_conversation(
    row: DataRow, tokenizer: Any, stop_ids: Collection[int], template_kwargs: Mapping[str, Any]
) -> Masked:
    """Render and tokenise one conversation, and mark the tokens that its assistant generated, the
    stop token of each turn included.
    """
    kwargs = {**row.template_input(), **template_kwargs}
    messages = [_canonical(message, tokenizer, template_kwargs) for message in row.messages]

    def render(count: int, prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages[:count], add_generation_prompt=prompt, tokenize=False, **kwargs
            )
        )

    text = render(len(messages), False)
    spans, context = list[tuple[int, int]](), 0  # [start, end) of supervised turns, in characters
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = render(index, True), render(index + 1, False)
            if text.startswith(end) and end.startswith(start):
                spans.append((len(start), len(end)))
            else:
                context += 1
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = tuple(encoded["input_ids"]), encoded["offset_mapping"]  # [S], [S] of characters
    mask, open_turns = [False] * len(ids), 0
    for begin, stop in spans:
        turn = [
            i
            for i, (low, high) in enumerate(offsets)
            if begin <= low and high <= stop and low < high
        ]
        stops = [i for i in turn if ids[i] in stop_ids]
        open_turns += not stops
        # without a stop token the turn ends before the white space that templates put after it
        written = len(text[:stop].rstrip())
        for i in turn:
            mask[i] = i <= stops[-1] if stops else offsets[i][1] <= written
    return Masked(ids, tuple(mask), context, open_turns)


def _canonical(
    message: dict[str, Any], tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """An assistant message with its thinking in the field that this template reads, or without
    thinking when that is switched off.

    Tags in the content are thinking only for templates that use them; for others they are text.
    """
    content, template = message["content"], str(tokenizer.chat_template)
    if message["role"] != "assistant" or not isinstance(content, str):
        return message
    field = "reasoning_content" in template
    before, closed, after = (
        content.rpartition(_CLOSE) if field or _CLOSE in template else ("", "", content)
    )
    thinking = message.get("reasoning_content") or before.removeprefix("\n").removeprefix(
        _OPEN
    ).strip("\n")
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    rest["content"] = after.lstrip("\n") if closed else content
    if not thinking or template_kwargs.get("enable_thinking") is False:
        return rest
    if field:
        return {**rest, "reasoning_content": thinking}
    return {**rest, "content": f"{_OPEN}\n{thinking}\n{_CLOSE}\n\n{rest['content']}"}


def _check_roles(row: DataRow) -> None:
    unknown = sorted({message["role"] for message in row.messages} - set(ROLES))
    if unknown:
        raise ConfigError(
            f"{row.place}: unknown role {', '.join(map(repr, unknown))}; a role is one of "
            f"{', '.join(ROLES)}, human or gpt"
        )


def _sample(index: str, source: str, masked: Masked) -> RolloutSample:
    first = max(1, masked.mask.index(True))  # a prompt has at least one token
    end = len(masked.mask) - masked.mask[::-1].index(True)
    response = masked.ids[first:end]
    trace = VerifyTrace(len(response), ())
    return RolloutSample(
        sample_id=index,
        data_source=source,
        prompt_ids=masked.ids[:first],
        response_ids=response,
        trace=trace,
        draft_version=0,
        finish_reason="stop",
        supervised=masked.mask[first:end],
    )
