"""Which tokens may stand for a masked slot."""

from __future__ import annotations

import pytest

from tests.tiny import EOS_TOKEN_ID, MASK_TOKEN_ID, VOCAB_SIZE, tiny_tokenizer
from verl_opd.errors import ConfigError
from verl_opd.targets.tokens import check_mask_token, mask_candidates


def test_candidates_are_special_tokens_that_nothing_writes() -> None:
    """Of <|endoftext|> (padding), <|im_start|> (template), <|im_end|> (end of turn) and <|mask|>,
    only the last is free.
    """
    assert mask_candidates(tiny_tokenizer(), VOCAB_SIZE, limit=2) == [
        (MASK_TOKEN_ID, "<|mask|>"),
        (260, "<|reserved_0|>"),
    ]
    assert len(mask_candidates(tiny_tokenizer(), VOCAB_SIZE)) == 5


def test_rows_without_a_token_come_last() -> None:
    tokenizer = tiny_tokenizer()
    rows = mask_candidates(tokenizer, VOCAB_SIZE + 2, limit=1000)
    assert rows[-2:] == [
        (VOCAB_SIZE, "(row without a token)"),
        (VOCAB_SIZE + 1, "(row without a token)"),
    ]
    check_mask_token(VOCAB_SIZE, tokenizer, VOCAB_SIZE + 2)


def test_special_tokens_come_before_other_added_ones() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["word"])
    ids = [i for i, _ in mask_candidates(tokenizer, len(tokenizer), limit=1000)]
    assert ids[0] == MASK_TOKEN_ID
    assert ids[-1] == len(tokenizer) - 1


def test_free_tokens_pass() -> None:
    for mask in (MASK_TOKEN_ID, 260):
        check_mask_token(mask, tiny_tokenizer(), VOCAB_SIZE)


@pytest.mark.parametrize("mask", [0, 1, EOS_TOKEN_ID, 100])
def test_tokens_in_use_are_an_error_with_candidates(mask: int) -> None:
    token = tiny_tokenizer().convert_ids_to_tokens(mask)
    with pytest.raises(ConfigError) as caught:
        check_mask_token(mask, tiny_tokenizer(), VOCAB_SIZE)
    assert f"draft.mask_token_id={mask} is {token!r}, which text uses" in str(caught.value)
    assert "3 <|mask|>" in str(caught.value)


@pytest.mark.parametrize("mask", [-1, VOCAB_SIZE])
def test_a_mask_token_without_an_embedding_row_is_an_error(mask: int) -> None:
    with pytest.raises(
        ConfigError,
        match=f"draft.mask_token_id={mask} is not a row of the target's {VOCAB_SIZE}-row embedding",
    ):
        check_mask_token(mask, tiny_tokenizer(), VOCAB_SIZE)


def test_further_end_tokens_are_in_use() -> None:
    with pytest.raises(ConfigError, match="which text uses; candidates: 260 "):
        check_mask_token(MASK_TOKEN_ID, tiny_tokenizer(), VOCAB_SIZE, eos_ids=[MASK_TOKEN_ID])


def test_tokens_that_the_template_writes_in_other_chats_are_in_use() -> None:
    """A tool-call marker appears in no plain chat, only in the template's source."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{% if tools %}<|reserved_0|>{% endif %}"
    with pytest.raises(ConfigError, match="which text uses"):
        check_mask_token(260, tokenizer, VOCAB_SIZE)
