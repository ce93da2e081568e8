"""Weights in panels: every entry at its place, zeros behind, by the kernel and by its twin."""

from __future__ import annotations

import pytest
import torch

from torch_pagoda.runtime.ops.linear import weight_panels
from torch_pagoda.runtime.ops.linear.weight_panels import lay_out, lay_out_rows


def numbers(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture(params=[True, False], ids=["kernel", "twin"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(weight_panels, "kernel_function", lambda name: None)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("panel", weight_panels.SIZES)
@pytest.mark.parametrize("shape", [(48, 64), (50, 66), (5, 7), (130, 160), (64, 288), (1, 1)])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_panels_hold_pairs_of_inputs_of_one_output_each(shape: tuple[int, int], offset: int, panel: int) -> None:
    """Also of a weight that begins in the middle of 32 bits, as one of a file may."""
    outputs, inputs = shape
    weight = numbers(outputs * inputs + offset)[offset:].view(outputs, inputs)
    laid = lay_out(weight, panel)
    assert laid.shape == (-(-outputs // panel), -(-inputs // 32) * 16, panel, 2)
    rows = laid.transpose(1, 2).reshape(-1, laid.shape[1] * 2)
    assert torch.equal(rows[:outputs, :inputs], weight)
    assert not rows[outputs:].any() and not rows[:, inputs:].any()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_may_lie_apart(dtype: torch.dtype) -> None:
    weight = numbers(40 * 200, dtype).view(40, 200)[:, 3:80]
    assert torch.equal(lay_out(weight, 16), lay_out(weight.contiguous(), 16))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("counts", [(64, 32, 32), (32, 40), (40, 32), (5, 7, 90), (96,)])
def test_rows_of_several_weights_are_those_of_one(counts: tuple[int, ...]) -> None:
    """Also where a panel holds rows of two of them."""
    weight = numbers(sum(counts) * 70).view(-1, 70)
    assert torch.equal(lay_out_rows(weight.split(counts), 32), lay_out(weight, 32))


@pytest.mark.usefixtures("kernels")
def test_threads_share_the_panels() -> None:
    weight, before = numbers(1000 * 96).view(1000, 96), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 40):
            torch.set_num_threads(threads)
            results.append(lay_out(weight, 32))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)
