"""Reading prompt files: which rows are accepted, which are errors with file and line, and which are
dropped and counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_tokenizer
from verl_opd.data.prompts import DataReport, Prompt, load_prompts
from verl_opd.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


def _write(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def _user(text: str) -> dict[str, Any]:
    return {"data_source": "made_up", "prompt": [{"role": "user", "content": text}]}


def test_rows_become_templated_token_ids(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = _write(tmp_path / "mine.jsonl", _user("hé"), "", {"prompt": "hi", "extra": 1})
    prompts, report = load_prompts([file], tokenizer, max_prompt_length=100)
    assert [prompt.sample_id for prompt in prompts] == ["0", "1"]
    assert [prompt.data_source for prompt in prompts] == ["made_up", "mine"]
    assert prompts[1].messages == ({"role": "user", "content": "hi"},)
    text = "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert prompts[0].prompt_ids == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(prompts[0].prompt_ids) == text
    assert report == DataReport(rows=2, dropped_overlong=0, max_prompt_length=100)


def test_template_switches_reach_the_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = _write(tmp_path / "a.jsonl", _user("x"))
    thinking, _ = load_prompts([file], tokenizer, max_prompt_length=100)
    plain, _ = load_prompts(
        [file], tokenizer, max_prompt_length=100, template_kwargs={"enable_thinking": False}
    )
    assert tokenizer.decode(plain[0].prompt_ids) == tokenizer.decode(thinking[0].prompt_ids) + "-\n"


def test_overlong_prompts_are_dropped_and_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = _write(tmp_path / "a.jsonl", _user("x" * 50), _user("x"), _user("xx"))
    _, short, _ = load_prompts([file], tokenizer, max_prompt_length=100)[0]
    limit = len(short.prompt_ids)
    prompts, report = load_prompts([file], tokenizer, max_prompt_length=limit)
    assert [prompt.sample_id for prompt in prompts] == [
        "1"
    ]  # a prompt of exactly the limit stays; rows keep their number
    assert (report.rows, report.dropped_overlong, report.kept) == (3, 2, 1)
    assert "3 rows" in str(report)
    assert "2 dropped" in str(report)


def test_max_samples_counts_rows_over_all_files_before_filters(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    first = _write(tmp_path / "a.jsonl", _user("x" * 50), _user("a"))
    second = _write(tmp_path / "b.jsonl", _user("b"), _user("c"))
    prompts, report = load_prompts([first, second], tokenizer, max_prompt_length=60, max_samples=3)
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["a", "b"]
    assert (report.rows, report.dropped_overlong) == (3, 1)


def test_nothing_left_after_filters(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """I10: the counts say which filter took the rows."""
    file = _write(tmp_path / "a.jsonl", _user("x"), _user("y"))
    with pytest.raises(
        ConfigError,
        match=r"a\.jsonl is left: 2 rows read, 2 dropped with more than 3 prompt tokens; raise "
        r"data\.max_prompt_length",
    ):
        load_prompts([file], tokenizer, max_prompt_length=3)
    with pytest.raises(ConfigError, match="0 rows read"):
        load_prompts([_write(tmp_path / "empty.jsonl")], tokenizer, max_prompt_length=3)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"prompt": "x"', "not valid JSON"),
        ("[1, 2]", "must be a JSON object, not list"),
        (
            {"question": "x", "answer": "y"},
            "the row has no field 'prompt' .it has question, answer.; set data.prompt_key",
        ),
        ({"prompt": []}, "non-empty list of messages"),
        ({"prompt": [{"role": "user"}]}, "messages with role and content"),
        ({"prompt": 3}, "must be a string or"),
        ({"prompt": "x", "data_source": 3}, "'data_source' must be a string"),
        ({"prompt": [{"role": "user", "content": {"a": 1}}]}, "messages with role and content"),
    ],
)
def test_bad_rows_name_file_and_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, row: Any, reason: str
) -> None:
    file = _write(tmp_path / "a.jsonl", _user("x"), "", row)
    with pytest.raises(ConfigError, match=rf"a\.jsonl:3: .*{reason}"):
        load_prompts([file], tokenizer, max_prompt_length=100)


def test_few_rows_that_the_template_rejects_are_counted_and_many_are_an_error(
    tmp_path: Path,
) -> None:
    """A11: one bad row must neither end the run nor vanish."""
    strict = tiny_tokenizer()
    strict.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif "
        "%}{{ messages[0].content }}"
    )
    bad = {"prompt": [{"role": "system", "content": "x"}]}
    file = _write(tmp_path / "a.jsonl", *[_user(str(i)) for i in range(19)], bad)
    prompts, report = load_prompts([file], strict, max_prompt_length=100)
    assert (len(prompts), report.kept) == (19, 19)
    assert len(report.invalid) == 1
    assert (
        f"1 skipped: not valid for the chat template (first {file}:20: no system messages)"
        in str(report)
    )
    with pytest.raises(
        ConfigError,
        match=r"the chat template rejects 2 of 20 prompts: .*b\.jsonl:1: no system messages",
    ):
        load_prompts(
            [_write(tmp_path / "b.jsonl", bad, bad, *[_user(str(i)) for i in range(18)])],
            strict,
            max_prompt_length=100,
        )


def test_tools_as_list_and_as_json_text_are_the_same_tokens(tmp_path: Path) -> None:
    """A9."""
    handy = tiny_tokenizer()
    handy.chat_template = (
        "{% for tool in tools or [] %}<{{ tool['name'] }}>{% endfor %}{{ messages[0]['content'] }}"
    )
    tools = [{"name": "look"}, {"name": "add"}]
    rows = [
        {**_user("x"), "tools": tools},
        {**_user("x"), "tools": json.dumps(tools)},
        {**_user("x"), "tools": "[]"},
        _user("x"),
    ]
    prompts, _ = load_prompts([_write(tmp_path / "a.jsonl", *rows)], handy, max_prompt_length=100)
    assert prompts[0].prompt_ids == prompts[1].prompt_ids
    assert handy.decode(prompts[0].prompt_ids) == "<look><add>x"
    assert prompts[2].prompt_ids == prompts[3].prompt_ids
    for wrong, reason in (
        ("{", "is not valid JSON text"),
        ({"name": "x"}, "must be a list of objects"),
        (["look"], "must be a list of objects"),
    ):
        with pytest.raises(ConfigError, match=rf"b\.jsonl:1: 'tools' {reason}"):
            load_prompts(
                [_write(tmp_path / "b.jsonl", {**_user("x"), "tools": wrong})],
                handy,
                max_prompt_length=100,
            )


def test_files_that_cannot_be_read(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "binary.jsonl", tmp_path / "nowhere.jsonl"):
        with pytest.raises(ConfigError, match=f"{file.name} cannot be read"):
            load_prompts([file], tokenizer, max_prompt_length=100)


def test_another_prompt_key(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = _write(tmp_path / "a.jsonl", {"question": "x"})
    (prompt,), _ = load_prompts([file], tokenizer, prompt_key="question", max_prompt_length=100)
    assert isinstance(prompt, Prompt)
    assert prompt.messages[0]["content"] == "x"


def test_a_tokenizer_without_a_chat_template(tmp_path: Path) -> None:
    plain = tiny_tokenizer()
    plain.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        load_prompts([_write(tmp_path / "a.jsonl", _user("x"))], plain, max_prompt_length=100)
