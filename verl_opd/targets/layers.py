"""The one place for target layer ids.

Everywhere in this package a layer id is 0-based and means the *output* of that decoder layer
(residual stream, before the final norm). Others count as follows:

    transformers   hidden_states[id + 1]; hidden_states[0] is the output of the embedding
    vLLM           aux hidden state id + 1: the input of layer id + 1, which is the same tensor
    SGLang         the same id, in the `eagle_config` of a draft
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from verl_opd.errors import ConfigError


def to_vllm_aux_ids(layer_ids: Iterable[int]) -> list[int]:
    """vLLM's aux ids of our layer ids.

    >>> to_vllm_aux_ids([1, 17, 33])
    [2, 18, 34]
    """
    return [layer_id + 1 for layer_id in layer_ids]


def from_vllm_aux_ids(aux_ids: Iterable[int]) -> list[int]:
    """Our layer ids of vLLM's aux ids. Aux id 0, the embedding, becomes -1, which is not a layer.

    >>> from_vllm_aux_ids([2, 18, 34])
    [1, 17, 33]
    """
    return [int(aux_id) - 1 for aux_id in aux_ids]


def default_layer_ids(num_layers: int, count: int) -> list[int]:
    """`count` layers spread from 1 to num_layers - 3, as DFlash and Draft-OPD choose them; a single
    one is the middle.

    >>> default_layer_ids(36, 5)
    [1, 9, 17, 25, 33]
    """
    if count == 1:
        return [num_layers // 2]
    ids = [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)] if count > 1 else []
    if not ids or ids[0] >= num_layers or any(a >= b for a, b in itertools.pairwise(ids)):
        raise ConfigError(
            f"draft.num_target_features={count} does not fit a target of {num_layers} layers: set "
            "draft.target_layer_ids"
        )
    return ids


def eagle3_default_layer_ids(num_layers: int) -> list[int]:
    """An early, the middle and a late layer: vLLM's aux ids 2, num_layers / 2 and num_layers - 3
    (get_eagle3_default_aux_hidden_state_layers).

    >>> eagle3_default_layer_ids(36)
    [1, 17, 32]
    """
    return from_vllm_aux_ids((2, num_layers // 2, num_layers - 3))
