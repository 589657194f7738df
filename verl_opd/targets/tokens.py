"""Which token may stand for a masked slot."""

from __future__ import annotations

from typing import Any

from verl_opd.errors import ConfigError

_PROBE = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]


def mask_candidates(tokenizer: Any, rows: int, limit: int = 5) -> list[tuple[int, str]]:
    """Up to `limit` (id, token) of embedding rows that ordinary text and the chat template never produce."""
    used = _used_ids(tokenizer)
    special = sorted(i for i in tokenizer.added_tokens_decoder if i < rows and i not in used)
    beyond = range(len(tokenizer), rows)
    named = [(i, tokenizer.convert_ids_to_tokens(i)) for i in special] + [(i, "(row without a token)") for i in beyond]
    return named[:limit]


def _used_ids(tokenizer: Any) -> set[int]:
    ids = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(_PROBE, tokenize=False)
        ids.update(tokenizer(text, add_special_tokens=False)["input_ids"])
    return {i for i in ids if i is not None}


def check_mask_token(mask_id: int, tokenizer: Any, rows: int) -> None:
    """ConfigError unless `mask_id` is an embedding row (0 <= id < rows) that neither text nor the chat template uses."""
    candidates = ", ".join(f"{i} {token}" for i, token in mask_candidates(tokenizer, rows)) or "none found"
    if not 0 <= mask_id < rows:
        raise ConfigError(f"draft.mask_token_id={mask_id} is not a row of the target's {rows}-row embedding; candidates: {candidates}")
    special = mask_id >= len(tokenizer) or mask_id in tokenizer.added_tokens_decoder
    if not special or mask_id in _used_ids(tokenizer):
        token = tokenizer.convert_ids_to_tokens(mask_id) if mask_id < len(tokenizer) else "?"
        raise ConfigError(f"draft.mask_token_id={mask_id} is {token!r}, which text uses; candidates: {candidates}")
