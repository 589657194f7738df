"""Layer ids: which layers are read by default, and how each library counts them."""

from __future__ import annotations

import pytest

from verl_opd.errors import ConfigError
from verl_opd.targets.layers import (
    default_layer_ids,
    eagle3_layer_ids,
    layer_id_of_vllm_aux,
    vllm_aux_layer_id,
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


def test_conventions() -> None:
    assert [vllm_aux_layer_id(i) for i in (0, 35)] == [1, 36]


def test_aux_ids_of_vllm_lead_back_to_the_layers() -> None:
    assert [layer_id_of_vllm_aux(i) for i in (1, 36)] == [0, 35]
    assert layer_id_of_vllm_aux("3") == 2  # type: ignore[arg-type] # as some config.json have it
    assert all(layer_id_of_vllm_aux(vllm_aux_layer_id(i)) == i for i in range(80))


@pytest.mark.parametrize(
    ("layers", "aux"), [(36, (2, 18, 33)), (28, (2, 14, 25)), (61, (2, 30, 58))]
)
def test_eagle3_reads_the_aux_states_that_vllm_takes_by_default(
    layers: int, aux: tuple[int, ...]
) -> None:
    assert tuple(vllm_aux_layer_id(i) for i in eagle3_layer_ids(layers)] == aux
