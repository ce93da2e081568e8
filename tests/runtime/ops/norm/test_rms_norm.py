"""pagoda::rms_norm and add_rms_norm: the references against the models' spellings, the kernel against them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from torch_pagoda.runtime.ops.norm import norm_kernel
from torch_pagoda.runtime.ops.norm.rms_norm import (
    add_rms_norm,
    add_rms_norm_cpu,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_cpu,
    rms_norm_reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def llama_rms_norm(x, weight, eps):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + eps)
    return weight * x.to(dtype)


def gpt_oss_rms_norm(x, weight, eps):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + eps)
    return (weight * x).to(dtype)


def gemma_rms_norm(x, weight, eps):
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).type_as(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_is_what_models_write(dtype):
    x, weight = torch.randn(3, 5, 96).to(dtype), torch.randn(96).to(dtype)
    assert torch.equal(rms_norm_reference(x, weight, 1e-5, 0.0, True), llama_rms_norm(x, weight, 1e-5))
    assert torch.equal(rms_norm_reference(x, weight, 1e-5, 0.0, False), gpt_oss_rms_norm(x, weight, 1e-5))
    assert torch.equal(rms_norm_reference(x, weight, 1e-6, 1.0, False), gemma_rms_norm(x, weight, 1e-6))
    wide = weight.float()
    assert torch.equal(rms_norm_reference(x, wide, 1e-6, 1.0, False), gemma_rms_norm(x, wide, 1e-6))
    ones = torch.ones(96, dtype=dtype)
    assert torch.equal(rms_norm_reference(x, None, 1e-5, 0.0, True), llama_rms_norm(x, ones, 1e-5))
    torch.testing.assert_close(
        rms_norm_reference(x, weight, 1e-5, 0.0, False), F.rms_norm(x, (96,), weight, 1e-5), rtol=1e-6, atol=1e-6
    )
    residual = torch.randn(3, 5, 96).to(dtype)
    normed, total = add_rms_norm_reference(x, residual, weight, 1e-5, 0.0, True)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, llama_rms_norm(residual + x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 7, 64, 100, 1000, 2048])
def test_kernel_is_the_reference(dtype, dim, assert_rounded_alike):
    for rows in (1, 15):
        x, residual = torch.randn(rows, dim).to(dtype), torch.randn(rows, dim).to(dtype)
        narrow, wide = torch.randn(dim).to(dtype), torch.randn(dim)
        for weight, round_before_scale in ((narrow, True), (narrow, False), (wide, False), (None, True)):
            if weight is wide and dtype is torch.float32:
                continue
            for offset in (0.0, 1.0):
                scale = (weight, 1e-5, offset, round_before_scale)
                assert_rounded_alike(rms_norm(x, *scale), rms_norm_reference(x, *scale))
                normed, total = add_rms_norm(x, residual, *scale)
                expected, expected_total = add_rms_norm_reference(x, residual, *scale)
                assert torch.equal(total, expected_total)
                assert_rounded_alike(normed, expected)


STRIDED = {
    "rows of a wider product": lambda: torch.randn(2, 5, 300)[..., 50:130],
    "heads of a merged product": lambda: torch.randn(2, 5, 700)[..., :640].view(2, 5, 8, 80),
    "heads before tokens": lambda: torch.randn(2, 5, 640).view(2, 5, 8, 80).transpose(1, 2),
    "every other element": lambda: torch.randn(2, 5, 160)[..., ::2],
    "every third element": lambda: torch.randn(2, 5, 240)[..., 1::3],
    "columns": lambda: torch.randn(80, 6).T,
    "one row for all": lambda: torch.randn(1, 1, 80).expand(2, 3, 80),
    "five dims": lambda: torch.randn(2, 2, 3, 2, 160)[..., :80].transpose(0, 3),
    "one dim": lambda: torch.randn(80),
    "no rows": lambda: torch.randn(2, 0, 80),
}


@pytest.mark.parametrize("name", STRIDED)
def test_any_strides(name, assert_rounded_alike):
    for dtype in (torch.float32, torch.bfloat16):
        x = STRIDED[name]().to(dtype)
        assert_rounded_alike(rms_norm(x, None, 1e-5, 0.0, True), rms_norm_reference(x, None, 1e-5, 0.0, True))
        weight = torch.randn(160).to(dtype)[::2]
        residual = torch.randn_like(x, memory_format=torch.contiguous_format)
        for pair in ((x, residual), (residual, x)):
            ours = add_rms_norm(*pair, weight, 1e-5, 0.0, True)
            theirs = add_rms_norm_reference(*pair, weight, 1e-5, 0.0, True)
            assert_rounded_alike(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1]) and ours[1].is_contiguous()


def test_threads_change_nothing():
    x, residual, weight = torch.randn(70, 1000), torch.randn(70, 1000), torch.randn(1000)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(add_rms_norm_cpu(x, residual, weight, 1e-5, 0.0, True))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_results_are_new_tensors():
    x, weight = torch.randn(2, 8), torch.randn(8)
    before = x.clone()
    normed, total = add_rms_norm_cpu(x, torch.zeros(2, 8), weight, 1e-5, 0.0, True)
    assert len({t.untyped_storage().data_ptr() for t in (x, normed, total)}) == 3
    assert torch.equal(x, before)


def test_the_reference_runs_where_the_kernel_does_not(monkeypatch):
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    result = rms_norm_cpu(x, weight, 1e-5, 0.0, True)
    assert result.dtype == torch.float64
    assert torch.equal(result, weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)))
    monkeypatch.setattr(norm_kernel, "kernel_function", lambda name: None)
    x, weight = x.float(), weight.float()
    expected = add_rms_norm_reference(x, x, weight, 1e-5, 0.0, True)
    assert all(map(torch.equal, add_rms_norm_cpu(x, x, weight, 1e-5, 0.0, True), expected))


def test_nan_and_infinity_reach_the_result():
    x = torch.randn(3, 40)
    x[1, 39], x[2, 3] = torch.nan, torch.inf
    result = rms_norm_cpu(x, None, 1e-5, 0.0, True)
    assert result[0].isfinite().all() and result[1].isnan().all() and result[2, 3].isnan()
    assert (result[2, :3] == 0).all()


@pytest.mark.parametrize("function", [rms_norm, rms_norm_cpu, rms_norm_reference])
def test_what_does_not_fit_is_refused(function):
    x = torch.randn(2, 3, 8).bfloat16()
    with pytest.raises(ValueError, match=r"weight has shape \(7,\); it must have one entry for each of the 8"):
        function(x, torch.randn(7).bfloat16(), 1e-5, 0.0, True)
    with pytest.raises(ValueError, match=r"weight has shape \(1, 8\)"):
        function(x, torch.randn(1, 8).bfloat16(), 1e-5, 0.0, True)
    with pytest.raises(ValueError, match=r"weight has dtype torch.float32 and input torch.bfloat16; convert it"):
        function(x, torch.randn(8), 1e-5, 0.0, True)
    with pytest.raises(ValueError, match=r"weight has dtype torch.float16"):
        function(x, torch.randn(8).half(), 1e-5, 0.0, False)


@pytest.mark.parametrize("function", [add_rms_norm, add_rms_norm_cpu, add_rms_norm_reference])
def test_a_residual_that_does_not_fit_is_refused(function):
    x = torch.randn(2, 3, 8)
    for residual in (torch.randn(3, 8), torch.randn(2, 3, 8).double()):
        with pytest.raises(ValueError, match=r"residual has shape .* expand or convert one of them"):
            function(x, residual, None, 1e-5, 0.0, True)
    with pytest.raises(ValueError, match="weight has shape"):
        function(x, x, torch.randn(7), 1e-5, 0.0, True)
