"""The CPU engine's mended kernel on hand-made values."""

from __future__ import annotations

import pytest
import torch

from verl_opd.engines.worker.cpu import expand


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([0.25, 0.0, 0.9], torch.float32, [0.25, 0.25, 1.0, 0.9, 0.9, 0.9]),
        ([5, 0, 7], torch.int32, [5, 5, 1, 7, 7, 7]),
    ],
)
def test_each_request_gives_its_tokens_its_value_and_greedy_ones_one(
    values: list[float], dtype: torch.dtype, expected: list[float]
):
    output = torch.full((6,), 99, dtype=dtype)
    expand(
        output,
        torch.tensor(values, dtype=dtype),
        torch.tensor([2, 3, 6], dtype=torch.int32),
        0,
        1,
        MAX_NUM_TOKENS=32,
    )
    assert output.tolist() == pytest.approx(expected)
