"""Tiny random models and their tokenizer, built on the spot: what unit and engine tests serve and
train without any download.

Small enough for seconds on a CPU, and with head sizes that vLLM's CPU attention accepts.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 320
EOS_TOKEN_ID = 2
MASK_TOKEN_ID = 3
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}-\n{% endif %}{% endif %}"
)
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte after four special tokens, padded with reserved tokens to VOCAB_SIZE; chat
    template in ChatML style.

    The template knows one switch, `enable_thinking=False`, which appends "-\\n" to the generation
    prompt.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    reserved = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|reserved_{i}|>" for i in range(reserved)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny_qwen3(
    directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **shape: object
) -> Path:
    """Write a random Qwen3 target with its tokenizer; `shape` overrides entries of SHAPE."""
    return _save(Qwen3ForCausalLM, Qwen3Config(**{**SHAPE, **shape}), directory, seed, dtype)


def save_tiny_llama(
    directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **shape: object
) -> Path:
    """Write a random Llama target with its tokenizer; `shape` overrides entries of SHAPE."""
    return _save(LlamaForCausalLM, LlamaConfig(**{**SHAPE, **shape}), directory, seed, dtype)


def _save(
    model_class: type, config: PreTrainedConfig, directory: Path, seed: int, dtype: torch.dtype
) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(dtype)
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory
