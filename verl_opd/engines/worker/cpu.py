"""Fixes for vLLM's CPU engine, without which a draft cannot be trained: weights that can be loaded
again, and sampling at the requested temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_EXPAND = "vllm.v1.sample.rejection_sampler.expand_kernel"


@contextmanager
def unpacked_linears() -> Iterator[None]:
    """While active, CPU linear layers and LM heads compute with their plain weight instead of a
    prepacked copy, so that it can be loaded again.

    For linear layers this is the skip flag that vLLM's UnquantizedLinearMethod reads on CPU. An LM
    head keeps its weight and a packed copy side by side: a new weight would be read back correctly
    and never used.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    linear = UnquantizedLinearMethod.process_weights_after_loading
    head = UnquantizedEmbeddingMethod.process_weights_after_loading

    def process_linear(self: Any, layer: nn.Module) -> None:
        layer._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]
        linear(self, layer)

    def process_head(self: Any, layer: nn.Module) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    UnquantizedLinearMethod.process_weights_after_loading = process_linear  # type: ignore[method-assign]
    UnquantizedEmbeddingMethod.process_weights_after_loading = process_head  # type: ignore[method-assign]
    try:
        yield
    finally:
        UnquantizedLinearMethod.process_weights_after_loading = linear  # type: ignore[method-assign]
        UnquantizedEmbeddingMethod.process_weights_after_loading = head  # type: ignore[method-assign]


def keep_drafts_loadable() -> None:
    """On CPU, make every drafter of this process load its model with `unpacked_linears`;
    idempotent. The target keeps its fast path.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    inner: Callable[[Any], nn.Module] = SpecDecodeBaseProposer._get_model
    if getattr(inner, "opd_unpacked", False):
        return

    def get_model(self: Any) -> nn.Module:
        with unpacked_linears():
            return inner(self)

    get_model.opd_unpacked = True  # type: ignore[attr-defined]
    SpecDecodeBaseProposer._get_model = get_model  # type: ignore[method-assign]


def expand(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """Repeat each request's value (temperature, top-p, top-k) for its tokens, with `replace_from`
    turned into `replace_to`, as vLLM's kernel of this name does on other devices. [R] -> [tokens].
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())  # [R]
    values = torch.where(
        input_val == replace_from, torch.full_like(input_val, replace_to), input_val
    )  # [R]
    output.copy_(values.repeat_interleave(counts))


def fix_sampling() -> bool:
    """On CPU, check that verification receives the requests' temperatures, and fix it when it does
    not; whether it was broken.

    The stand-in of vLLM 0.32 writes into an integer copy and drops it, so that logits are divided
    by uninitialised memory and rejected proposals come back as their own replacement.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    def works() -> bool:
        # several random values, so that freed memory does not pass the check by chance
        given = torch.rand(5)
        counts = torch.randint(1, 9, (5,))
        ends = counts.cumsum(0).to(torch.int32)
        return torch.equal(
            expand_batch_to_tokens(given, ends, int(ends[-1])), given.repeat_interleave(counts)
        )

    if works():
        return False
    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels({_EXPAND: expand})
    if not works():
        raise RuntimeError(
            "this vLLM verifies sampled requests at wrong temperatures on CPU and ignores the "
            "corrected kernel"
        )
    return True
