"""The one place for target layer ids.

Everywhere in this package a layer id is 0-based and means the *output* of that decoder layer
(residual stream, before the final norm). Transformers returns it as hidden_states[id + 1] (index 0
is the embedding output); vLLM's aux hidden state `id + 1` is the input of layer id + 1, the same
tensor.
"""

from __future__ import annotations

import itertools

from verl_opd.errors import ConfigError


def vllm_aux_layer_id(layer_id: int) -> int:
    """vLLM's id of the aux hidden state that holds a layer's output."""
    return layer_id + 1


def layer_id_of_vllm_aux(aux_layer_id: int) -> int:
    """The layer whose output an aux hidden state of vLLM holds; -1 is the embedding.

    >>> layer_id_of_vllm_aux(vllm_aux_layer_id(7))
    7
    """
    return int(aux_layer_id) - 1


def eagle3_layer_ids(num_layers: int) -> list[int]:
    """Outputs of an early, the middle and a late layer: vLLM's aux states 2, L/2 and L-3
    (get_eagle3_default_aux_hidden_state_layers).

    >>> eagle3_layer_ids(36)
    [1, 17, 32]
    """
    return [layer_id_of_vllm_aux(i) for i in (2, num_layers // 2, num_layers - 3)]


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
