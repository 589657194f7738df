"""Conversations: which tokens the assistant would have generated, by golden masks; which rows are
errors, and which are dropped and counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tests.tiny import tiny_tokenizer
from verl_opd.data.conversations import load_conversations, mask_conversation
from verl_opd.data.rows import read_rows
from verl_opd.errors import ConfigError
from verl_opd.opd.plan import item_rng, plan_counts, plan_sft
from verl_opd.opd.trace import RolloutSample, VerifyTrace
from verl_opd.targets.tokens import stop_token_ids

GOLDEN = Path(__file__).parents[2] / "golden" / "masks"
CASES = json.loads((GOLDEN / "masks.json").read_text())
STOPS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>")


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                "<|eot_id|>",
                "<end_of_turn>",
                "<start_of_turn>",
                "<|start_header_id|>",
                "<|end_header_id|>",
                "<bos>",
            ]
        }
    )
    tokenizer.chat_template = (GOLDEN / f"{template}.jinja").read_text()
    return tokenizer


def stops_of(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    return frozenset(tokenizer.convert_tokens_to_ids(list(STOPS)))


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(file: Path, tokenizer: PreTrainedTokenizerFast, **given: Any) -> Any:
    return load_conversations(
        [file],
        tokenizer,
        **{"key": "messages", "max_length": 999, "stop_ids": stops_of(tokenizer), **given},
    )


def turns(*contents: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": ("user", "assistant")[i % 2], "content": content}
            for i, content in enumerate(contents)
        ]
    }


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_masks_are_the_golden_ones(case: dict[str, Any], tmp_path: Path) -> None:
    """A1, A2, A3, A5, A9, A18: thinking, generation prompts, tools and stop tokens, for four styles
    of template.
    """
    tokenizer = tokenizer_of(case["template"])
    row = {"messages": case["messages"], "tools": case.get("tools")}
    (parsed,) = read_rows([write(tmp_path / "a.jsonl", row)], "messages", "key")
    masked = mask_conversation(parsed, tokenizer, stops_of(tokenizer), case.get("kwargs", {}))
    pieces: list[list[Any]] = []
    for token, learned in zip(masked.ids, masked.mask, strict=True):
        kind = "learned" if learned else "context"
        if not pieces or pieces[-1][0] != kind:
            pieces.append([kind, []])
        pieces[-1][1].append(token)
    assert [[kind, tokenizer.decode(ids)] for kind, ids in pieces] == case["pieces"]
    assert (masked.context_turns, masked.open_turns) == (case.get("context_turns", 0), 0)


def test_tools_as_list_and_as_json_text_are_the_same_conversation(tmp_path: Path) -> None:
    case = next(case for case in CASES if "tools" in case)
    rows = [
        {"messages": case["messages"], "tools": tools}
        for tools in (case["tools"], json.dumps(case["tools"]))
    ]
    samples, _ = load(write(tmp_path / "a.jsonl", *rows), tokenizer_of(case["template"]))
    assert samples[0].prompt_ids == samples[1].prompt_ids


def test_a_conversation_becomes_a_response_from_its_first_to_its_last_learned_token(
    tmp_path: Path,
) -> None:
    tokenizer = tokenizer_of("smollm2")
    (sample,), report = load(write(tmp_path / "mine.jsonl", turns("hi", "ab", "?", "c")), tokenizer)
    assert sample.data_source == "mine"
    assert tokenizer.decode(sample.prompt_ids).endswith("<|im_start|>assistant\n")
    between = "\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(sample.response_ids) == "ab<|im_end|>" + between + "c<|im_end|>"
    gap = len(tokenizer(between)["input_ids"])
    assert sample.supervised == (True,) * 3 + (False,) * gap + (True,) * 2
    assert (report.supervised, report.tokens) == (5, len(sample.prompt_ids) + 5 + gap + 1)


def test_blocks_of_given_text_stay_within_a_turn() -> None:
    """Anchors are generated tokens with a generated token behind them; labels end where the turn
    ends.
    """
    mask = (True, True, True, False, False, True, True, False, True)
    sample = RolloutSample(
        sample_id="0",
        data_source="s",
        prompt_ids=(1,),
        response_ids=tuple(range(9)),
        trace=VerifyTrace(9, ()),
        draft_version=0,
        finish_reason="stop",
        supervised=mask,
    )
    plan = plan_sft(sample, block_size=4, anchors_per_sample=99, rng=item_rng(0, 0, "x"))
    slots = [
        (plan.anchors[block], offset)
        for block, offset in zip(plan.response_block, plan.response_offset, strict=True)
    ]
    assert slots == [(0, 1), (0, 2), (1, 1), (5, 1)]
    assert plan.response_label == (1, 2, 2, 6)
    whole = RolloutSample(
        sample_id="0",
        data_source="s",
        prompt_ids=(1,),
        response_ids=tuple(range(9)),
        trace=VerifyTrace(9, ()),
        draft_version=0,
        finish_reason="stop",
        supervised=(True,) * 9,
    )
    fresh = RolloutSample(
        sample_id="0",
        data_source="s",
        prompt_ids=(1,),
        response_ids=tuple(range(9)),
        trace=VerifyTrace(9, ()),
        draft_version=0,
        finish_reason="stop",
    )
    plans = [
        plan_sft(given, block_size=4, anchors_per_sample=3, rng=item_rng(0, 0, "x"))
        for given in (whole, fresh)
    ]
    assert plans[0] == plans[1]
    assert plan_counts(plan, sample).sums["actor/distillation/opd_effective_token_count"] == 3


def test_what_is_dropped_is_counted(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("gemma")
    bad = {"messages": [{"role": "system", "content": "x"}, *turns("a", "b")["messages"]]}
    rows = [
        turns("hi", "x" * 200),
        turns("only a question"),
        bad,
        *[turns("hi", str(i)) for i in range(20)],
    ]
    samples, report = load(write(tmp_path / "a.jsonl", *rows), tokenizer, max_length=100)
    assert [sample.sample_id for sample in samples] == [str(i) for i in range(3, 23)]
    assert (
        report.rows,
        report.dropped_overlong,
        report.dropped_unsupervised,
        len(report.invalid),
    ) == (23, 1, 1, 1)
    assert "a.jsonl:3: no system role" in str(report)
    with pytest.raises(
        ConfigError,
        match=r"the chat template rejects 2 of 22 conversations: .*b\.jsonl:1: no system role",
    ):
        load(write(tmp_path / "b.jsonl", bad, bad, *rows[3:]), tokenizer)


def test_a_set_without_anything_to_learn_is_an_error(tmp_path: Path) -> None:
    """A1: an all-zero mask trains happily."""
    with pytest.raises(
        ConfigError,
        match=r"no conversation of .* is left: 2 rows read, 0 dropped with more than 999 tokens, "
        r"2 dropped with nothing to learn",
    ):
        load(write(tmp_path / "a.jsonl", turns("a"), turns("b")), tokenizer_of("smollm2"))


def test_an_unknown_role_is_named(tmp_path: Path) -> None:
    """A6: a turn under the model's own name must not vanish."""
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "laguna_s", "content": "b"}]}
    with pytest.raises(
        ConfigError, match=r"a\.jsonl:2: unknown role 'laguna_s'; a role is one of system"
    ):
        load(write(tmp_path / "a.jsonl", turns("a", "b"), row), tokenizer_of("smollm2"))


def test_turns_without_a_stop_token_are_reported(tmp_path: Path) -> None:
    """A18: such a draft would propose endless text."""
    tokenizer = tokenizer_of("llama3")
    file = write(tmp_path / "a.jsonl", turns("hi", "yo"))
    samples, report = load(
        file, tokenizer, stop_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")]
    )
    assert tokenizer.decode(samples[0].response_ids) == "yo<|eot_id|>"
    assert "1 supervised turns end without a stop token" in str(report)
    assert "stop token" not in str(load(file, tokenizer)[1])
    spaced = tokenizer_of("smollm2")
    (sample,), _ = load(file, spaced, stop_ids=[spaced.convert_tokens_to_ids("<|eot_id|>")])
    assert spaced.decode(sample.response_ids) == "yo<|im_end|>", (
        "the line break behind it is the template's"
    )


def test_every_stop_token_of_the_target_counts(tiny_qwen3_dir: Path, tmp_path: Path) -> None:
    """Chat models often have several: those of the generation config, of the config and of the
    tokenizer.
    """
    tokenizer, config = (
        AutoTokenizer.from_pretrained(tiny_qwen3_dir),
        AutoConfig.from_pretrained(tiny_qwen3_dir),
    )
    config.eos_token_id = 5
    GenerationConfig(eos_token_id=[6, 7]).save_pretrained(tmp_path)
    assert stop_token_ids(str(tmp_path), config, tokenizer) == {5, 6, 7, tokenizer.eos_token_id}
    assert stop_token_ids(str(tmp_path / "none"), config, tokenizer) == {5, tokenizer.eos_token_id}


def test_a_tokenizer_that_gives_no_positions_is_unsupported(tmp_path: Path) -> None:
    plain = tokenizer_of("smollm2")
    plain.chat_template = None
    with pytest.raises(
        ConfigError, match=r"sft\.files needs a target with a fast tokenizer and a chat template"
    ):
        load(write(tmp_path / "a.jsonl", turns("a", "b")), plain)
