"""Layer ids: which layers are read by default, and how each library counts them."""

from __future__ import annotations

from typing import Any

import pytest

from verl_opd.errors import ConfigError
from verl_opd.targets.layers import (
    default_layer_ids,
    eagle3_default_layer_ids,
    from_vllm_aux_ids,
    to_vllm_aux_ids,
)


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (36, 5, [1, 9, 17, 25, 33]),  # Qwen3-4B
        (30, 5, [1, 8, 14, 20, 27]),
        (36, 2, [1, 33]),
        (36, 1, [18]),
        (8, 3, [1, 3, 5]),
        (5, 2, [1, 2]),
        (1, 1, [0]),
    ],
)
def test_default_layers(layers: int, count: int, ids: list[int]) -> None:
    assert default_layer_ids(layers, count) == ids


@pytest.mark.parametrize(("layers", "count"), [(6, 5), (4, 2), (3, 2), (2, 2), (36, 0)])
def test_more_features_than_layers_can_give(layers: int, count: int) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"draft\.num_target_features={count} does not fit a target of {layers} layers",
    ):
        default_layer_ids(layers, count)


def test_vllm_counts_layer_inputs_from_one() -> None:
    assert to_vllm_aux_ids([0, 35]) == [1, 36]
    assert from_vllm_aux_ids([1, 36]) == [0, 35]
    written: list[Any] = ["2", 18.0]  # as a config.json may have them
    assert from_vllm_aux_ids(written) == [1, 17]


@pytest.mark.parametrize(
    ("layers", "ids"),
    [
        (36, [1, 17, 32]),  # Qwen3-4B: aux ids 2, 18, 33
        (32, [1, 15, 28]),  # Llama-3.1-8B: aux ids 2, 16, 29
        (9, [1, 3, 5]),  # aux ids 2, 4, 6
    ],
)
def test_the_default_layers_of_eagle3_are_those_of_vllm(layers: int, ids: list[int]) -> None:
    assert eagle3_default_layer_ids(layers) == ids
    assert to_vllm_aux_ids(ids) == [2, layers // 2, layers - 3]
