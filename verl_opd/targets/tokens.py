"""Special tokens: which ones end a response, and which one may fill a masked slot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from verl_opd.errors import ConfigError

_PROBE = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "c"},
]


def mask_candidates(
    tokenizer: Any, rows: int, eos_ids: Iterable[int] = (), limit: int = 5
) -> list[tuple[int, str]]:
    """Up to `limit` (id, token) of embedding rows that ordinary text and the chat template never
    produce; special tokens first.
    """
    used = _used_ids(tokenizer, eos_ids)
    added = [
        (not token.special, i, token.content)
        for i, token in tokenizer.added_tokens_decoder.items()
        if i < rows and i not in used
    ]
    named = [(i, content) for _, i, content in sorted(added)]
    return (named + [(i, "(row without a token)") for i in range(len(tokenizer), rows)])[:limit]


def _used_ids(tokenizer: Any, eos_ids: Iterable[int]) -> set[int]:
    """Ids that end, start or pad text, or that the chat template writes: in a plain chat, or
    anywhere in its source (tool calls, thinking).
    """
    ids = {
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
        *eos_ids,
    }
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(_PROBE, tokenize=False)
        ids.update(tokenizer(text, add_special_tokens=False)["input_ids"])
        source = str(tokenizer.chat_template)
        ids.update(
            i for i, token in tokenizer.added_tokens_decoder.items() if token.content in source
        )
    return {i for i in ids if i is not None}


def stop_token_ids(path: str, config: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a response of the target at `path`, from three places: its generation
    config, as the engine reads it; `config`, its AutoConfig; its tokenizer. Chat models often have
    several.
    """
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a model without a generation config
        generation = None
    given = (generation, getattr(config, "eos_token_id", None), tokenizer.eos_token_id)
    return frozenset(
        i for ids in given if ids is not None for i in (ids if isinstance(ids, list) else [ids])
    )


def check_mask_token(mask_id: int, tokenizer: Any, rows: int, eos_ids: Iterable[int] = ()) -> None:
    """ConfigError unless `mask_id` is an embedding row (0 <= id < rows) that neither text nor the
    chat template uses.

    eos_ids: further ids that end a response, such as those of a generation config.
    """
    eos_ids = tuple(eos_ids)
    candidates = (
        ", ".join(f"{i} {token}" for i, token in mask_candidates(tokenizer, rows, eos_ids))
        or "none found"
    )
    if not 0 <= mask_id < rows:
        raise ConfigError(
            f"draft.mask_token_id={mask_id} is not a row of the target's {rows}-row embedding; "
            f"candidates: {candidates}"
        )
    spare = mask_id >= len(tokenizer) or mask_id in tokenizer.added_tokens_decoder
    if not spare or mask_id in _used_ids(tokenizer, eos_ids):
        token = tokenizer.convert_ids_to_tokens(mask_id) if mask_id < len(tokenizer) else "?"
        raise ConfigError(
            f"draft.mask_token_id={mask_id} is {token!r}, which text uses; candidates: {candidates}"
        )


def check_same_vocabulary(
    key: str, model: str, tokenizer: Any, rows: int, trust_remote_code: bool
) -> None:
    """ConfigError unless the model that `key` names has the token ids of the target, which has
    `tokenizer` and `rows` embedding rows.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        theirs = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={model} cannot be read: {error}") from error
    ours, other = tokenizer.get_vocab(), theirs.get_vocab()
    if config.vocab_size < len(ours) or ours != other:
        differing = sorted({token for token, _ in ours.items() ^ other.items()})[:3]
        raise ConfigError(
            f"{key}={model} has a different vocabulary from the target's ({config.vocab_size} "
            f"against {rows} rows; differing tokens: "
            f"{', '.join(map(repr, differing)) or 'none'}): it cannot score the target's tokens"
        )
