"""Features of the frozen transformers target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.drafts import HIDDEN, LAYERS, VOCAB, target_config
from verl_opd.errors import ConfigError
from verl_opd.targets.hf import HFSource, check_target_supported

KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def _save(directory: Path, kind: str = "llama", **changes: object) -> str:
    config_class, model_class = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model_class(target_config(config_class, initializer_range=0.2, **changes)).save_pretrained(
            directory
        )
    return str(directory)


def _target(path: str, layer_ids: list[int], dtype: str = "float32") -> HFSource:
    return HFSource(path, dtype=dtype, layer_ids=layer_ids)


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_the_layer_outputs_in_the_requested_order(tmp_path: Path, kind: str) -> None:
    path, ids = _save(tmp_path, kind), _ids(2, 9)
    features = _target(path, [1, 3, 5]).features(ids, torch.tensor([9, 9]))
    states = AutoModelForCausalLM.from_pretrained(path)(
        ids, output_hidden_states=True
    ).hidden_states
    expected = torch.cat([states[i + 1] for i in (1, 3, 5)], dim=-1)
    assert features.aux.shape == (2, 9, 3 * HIDDEN)
    torch.testing.assert_close(features.aux, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features.last_hidden, states[-1], rtol=1e-5, atol=1e-5)


def test_each_layer_is_identifiable_and_the_last_one_is_not_normed(tmp_path: Path) -> None:
    """A target whose layer i only adds 2^i to every component: its output is embedding + 2^(i+1) -
    1, also for the last layer, where transformers' own list holds the normed state.
    """
    path = _save(tmp_path)
    target = _target(path, [0, 1, LAYERS - 1])
    for index, layer in enumerate(target._decoder.layers):
        layer.forward = lambda hidden_states, *_, index=index, **__: hidden_states + 2.0**index
    ids = _ids(1, 4)
    features = target.features(ids, torch.tensor([4]))
    first, second, last = features.aux.chunk(3, dim=-1)
    embedded = target.head.embed(ids)
    torch.testing.assert_close(first - embedded, torch.full_like(first, 1.0))
    torch.testing.assert_close(second - embedded, torch.full_like(second, 3.0))
    torch.testing.assert_close(last - embedded, torch.full_like(last, 255.0))
    assert features.last_hidden.abs().max() < 10


def test_rows_do_not_depend_on_padding_or_neighbours(tmp_path: Path) -> None:
    target = _target(_save(tmp_path), [1, 3, 7])
    ids, lengths = _ids(3, 11), torch.tensor([11, 4, 7])
    ids[1, 4:], ids[2, 7:] = 0, 0
    batch = target.features(ids, lengths)
    for row, length in enumerate(lengths.tolist()):
        single = target.features(ids[row : row + 1, :length], lengths[row : row + 1])
        torch.testing.assert_close(batch.aux[row, :length], single.aux[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            batch.last_hidden[row, :length], single.last_hidden[0], rtol=1e-5, atol=1e-5
        )
    other = ids.clone()
    other[1, 4:] = 5
    assert torch.equal(target.features(other, lengths).aux[1, :4], batch.aux[1, :4])


@pytest.mark.parametrize("tied", [True, False])
def test_head_and_embedding(tmp_path: Path, tied: bool) -> None:
    """B15: the last hidden state is the one after the final norm, so that the head gives the
    model's own logits.
    """
    path = _save(tmp_path, tie_word_embeddings=tied)
    target, model = _target(path, [1]), AutoModelForCausalLM.from_pretrained(path)
    ids = _ids(1, 6)
    logits = target.features(ids, torch.tensor([6])).last_hidden @ target.head.weight.T
    torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert target.head.weight.shape == (VOCAB, HIDDEN)
    embeddings = model.get_input_embeddings().weight
    assert torch.equal(target.head.embed(ids), embeddings[ids])
    assert torch.equal(target.head.embed(torch.tensor(3)), embeddings[3])
    assert torch.equal(embeddings, target.head.weight) == tied


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_takes_no_memory_of_its_own(tmp_path: Path, tied: bool) -> None:
    target = _target(_save(tmp_path, tie_word_embeddings=tied), [1])
    table, head = target.head.embedding, target.head.weight
    assert table.data_ptr() == target._decoder.embed_tokens.weight.data_ptr()
    assert (head.data_ptr() == table.data_ptr()) == tied


def test_frozen_and_in_the_requested_dtype(tmp_path: Path) -> None:
    path = _save(tmp_path)
    target = _target(path, [1, 2], "bfloat16")
    features = target.features(_ids(1, 5), torch.tensor([5]))
    tensors = [features.aux, features.last_hidden, target.head.weight, target.head.embed(_ids(2))]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert not any(tensor.requires_grad for tensor in tensors)
    assert not target._decoder.training


def test_missing_weights_are_not_left_random(tmp_path: Path) -> None:
    path = _save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights: model\.layers\.2\.mlp\.up_proj\.weight"):
        _target(path, [1])


def test_supported_targets() -> None:
    for config in (LlamaConfig(), Qwen2Config(), Qwen3Config()):
        check_target_supported(config)
    with pytest.raises(
        ConfigError,
        match=r"'gpt2' model \(GPT2LMHeadModel\); drafting is supported for llama, qwen2, qwen3",
    ):
        check_target_supported(GPT2Config(architectures=["GPT2LMHeadModel"]))
