"""Loads a pushed draft into a live drafter in place, and reads back what the engine really holds.

vLLM's DFlash model fuses q/k/v and gate/up, and keeps a fused copy of all layers' K/V weights
(`_fused_kv_weight`) that `load_weights` rebuilds. The rebuilt values are copied into the previous
tensor, because captured graphs keep its address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from verl_opd.snapshot import checksum

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_BUFFERS = ("_fused_kv_weight", "_fused_kv_bias", "_k_norm_weights")


def draft_model(runner: Any) -> nn.Module:
    """The live drafter's model; RuntimeError when the engine runs without speculation."""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)  # V1, V2
    model = getattr(drafter, "model", None)
    if model is None:
        raise RuntimeError("the engine has no drafter: it was started without a speculative_config")
    return model  # type: ignore[no-any-return]


Names = Sequence[tuple[str, str]]


def live_tensors(model: nn.Module, target: nn.Module, names: Names = ()) -> dict[str, Tensor]:
    """The draft's own parameters under public checkpoint names, as views into the engine's fused
    ones (tensor parallel size 1).

    Parameters shared with the frozen `target` are left out, whatever their name. names: see
    DraftFamily.engine_names.
    """
    tensors: dict[str, Tensor] = {}
    borrowed = {id(parameter) for parameter in target.parameters()}
    for full, parameter in model.named_parameters():
        name = full.removeprefix("model.")
        if id(parameter) in borrowed or name in ("mask_embedding", "draft_id_to_target_id"):
            continue
        rows = getattr(model.get_submodule(full.rpartition(".")[0]), "org_vocab_size", None)
        # vLLM pads vocabularies to a multiple of 64 rows (VocabParallelEmbedding)
        own = parameter if rows is None else parameter[:rows]
        module, _, leaf = name.rpartition(".")
        if module.endswith("qkv_proj"):
            attention = model.get_submodule("model." + module.rpartition(".")[0])
            sizes = [attention.q_size, attention.kv_size, attention.kv_size]
            # q [q_size, hidden], k and v [kv_size, hidden] of [q_size + 2 * kv_size, hidden]
            parts = zip(_QKV, parameter.split(sizes), strict=True)
            tensors.update(
                {f"{module.removesuffix('qkv_proj')}{part}.{leaf}": value for part, value in parts}
            )
        elif module.endswith("gate_up_proj"):
            # two of [intermediate, hidden] of [2 * intermediate, hidden]
            parts = zip(_GATE_UP, parameter.chunk(2), strict=True)
            tensors.update(
                {
                    f"{module.removesuffix('gate_up_proj')}{part}.{leaf}": value
                    for part, value in parts
                }
            )
        else:
            tensors[name] = own
    for prefix, public in names:
        tensors = {
            public + name.removeprefix(prefix) if name.startswith(prefix) else name: value
            for name, value in tensors.items()
        }
    return tensors


class DraftLoader:
    """Loads pushed drafts and keeps the version of the last one. A file that is not exactly the
    draft is rejected before anything changes.
    """

    def __init__(self, runner: Any, names: Names = ()) -> None:
        self._runner, self._names = runner, names
        self.version = -1  # as loaded from the draft directory; nothing pushed yet

    def load(self, path: str, version: int, expected_checksum: str) -> dict[str, Any]:
        """Load the safetensors file `path` and return the read-back; ValueError, with the old draft
        untouched, when it does not fit.
        """
        model = draft_model(self._runner)
        tensors = load_file(path)
        self._check(tensors, expected_checksum, path)
        inner = model.model
        assert isinstance(inner, nn.Module)
        held = _fused(inner)
        with torch.no_grad():
            model.load_weights(iter(tensors.items()))  # type: ignore[operator]
            rebuilt = _fused(inner)
            for name, tensor in held.items():
                tensor.copy_(rebuilt[name])
                setattr(inner, name, tensor)
        self.version = version
        return self.read_back()

    def _live(self) -> dict[str, Tensor]:
        return live_tensors(draft_model(self._runner), self._runner.get_model(), self._names)

    def _check(self, tensors: Mapping[str, Tensor], expected_checksum: str, path: str) -> None:
        live = self._live()
        problems = [f"missing {name}" for name in sorted(live.keys() - tensors.keys())]
        problems += [
            f"unexpected {name} (not one of the draft's own tensors in this engine: unknown, or "
            "shared with the frozen target)"
            for name in sorted(tensors.keys() - live.keys())
        ]
        problems += [
            f"{name} is {tuple(tensors[name].shape)} {tensors[name].dtype}, the engine holds "
            f"{tuple(live[name].shape)}"
            for name in sorted(live.keys() & tensors.keys())
            if tensors[name].shape != live[name].shape or tensors[name].dtype != torch.bfloat16
        ]
        if not problems and (found := checksum(tensors)) != expected_checksum:
            problems.append(f"checksum of the file is {found}, expected {expected_checksum}")
        if problems:
            raise ValueError(f"draft push rejected, {Path(path).name}: {'; '.join(problems[:8])}")

    def read_back(self) -> dict[str, Any]:
        """Version, checksum (in bf16) and count of the tensors that the engine computes with, and
        whether its fused K/V copy agrees with them.
        """
        model = draft_model(self._runner)
        live = {name: tensor.detach().to(torch.bfloat16) for name, tensor in self._live().items()}
        return {
            "version": self.version,
            "checksum": checksum(live),
            "tensors": len(live),
            "fused_consistent": _fused_consistent(model.model),  # type: ignore[arg-type]
        }


def _fused(inner: nn.Module) -> dict[str, Tensor]:
    return {
        name: value for name in _BUFFERS if isinstance(value := getattr(inner, name, None), Tensor)
    }


def _fused_consistent(inner: Any) -> bool:
    """Whether building the fused copies again gives the same values; the tensors that captured
    graphs may hold stay in place.
    """
    held = _fused(inner)
    if not held:
        return True
    inner._build_fused_kv_buffers()
    rebuilt = _fused(inner)
    for name, tensor in held.items():
        setattr(inner, name, tensor)
    return all(torch.equal(tensor, rebuilt[name]) for name, tensor in held.items())


def target_checksum(runner: Any) -> str:
    """Digest of every parameter of the frozen target that the engine holds as a tensor."""
    return checksum(
        {
            name: parameter
            for name, parameter in runner.get_model().named_parameters()
            if parameter.numel()
        }
    )
