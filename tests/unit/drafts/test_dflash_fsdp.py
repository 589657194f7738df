"""A draft sharded over two gloo ranks, layer by layer, is the draft of one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.drafts import build_draft, draft_config, make_layout, random_inputs
from verl_opd.drafts import get_family

FAMILY = get_family("dflash")
LENGTHS, ANCHORS = [12, 7], [[3, 7], [5]]


def _forward_backward(draft: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    layout = make_layout(LENGTHS, ANCHORS)
    hidden = FAMILY.replay(draft, *random_inputs(layout), layout)
    hidden.float().square().sum().backward()
    gradients = {
        name: parameter.grad
        for name, parameter in draft.named_parameters()
        if parameter.grad is not None
    }
    return hidden.detach(), {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in gradients.items()
    }


CASES = {
    "float32": (torch.float32, False),
    "checkpointing": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False),
}
Result = tuple[Tensor, dict[str, Tensor]]


def _sharded(dtype: torch.dtype, checkpointing: bool) -> Result:
    draft = build_draft(draft_config()).train()
    draft.gradient_checkpointing = checkpointing
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in [*FAMILY.shard_units(draft), draft]:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    assert all(isinstance(parameter, DTensor) for parameter in draft.parameters())
    return _forward_backward(draft)


def _rank(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2
    )
    for name, case in CASES.items():
        torch.save(_sharded(*case), f"{directory}/{name}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    """Outputs and gradients of every case, per rank; one pair of processes runs them all."""
    directory = tmp_path_factory.mktemp("fsdp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]),
        )
        mp.spawn(_rank, (str(directory),), nprocs=2)
    return {
        name: [torch.load(directory / f"{name}-{rank}.pt") for rank in (0, 1)] for name in CASES
    }


@pytest.mark.parametrize("case", ["float32", "checkpointing"])
def test_float32_shards_equal_the_whole(results: dict[str, list[Result]], case: str) -> None:
    whole, expected = _forward_backward(build_draft(draft_config()))
    for hidden, gradients in results[case]:
        torch.testing.assert_close(hidden, whole, rtol=1e-5, atol=1e-5)
        assert gradients.keys() == expected.keys()
        for (
            name,
            gradient,
        ) in (
            gradients.items()
        ):  # both ranks hold the same samples, so the average over ranks is the plain gradient
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4)


def test_mixed_precision_equals_a_bfloat16_draft(results: dict[str, list[Result]]) -> None:
    """Rotary tables included: FSDP casts the inputs of every layer, so float32 tables would differ
    between the two.
    """
    narrow = build_draft(draft_config()).bfloat16()
    layout = make_layout(LENGTHS, ANCHORS)
    expected = FAMILY.replay(narrow, *random_inputs(layout), layout)
    for hidden, gradients in results["bfloat16"]:
        assert hidden.dtype == torch.bfloat16
        assert torch.equal(hidden, expected)
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
