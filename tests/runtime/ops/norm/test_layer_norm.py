"""pagoda::layer_norm and add_layer_norm: the reference against torch, the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from torch_pagoda.runtime.ops.norm import norm_kernel
from torch_pagoda.runtime.ops.norm.layer_norm import (
    add_layer_norm,
    add_layer_norm_cpu,
    add_layer_norm_reference,
    layer_norm,
    layer_norm_cpu,
    layer_norm_reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_is_torch_s(dtype):
    x, residual = torch.randn(3, 5, 96).to(dtype), torch.randn(3, 5, 96).to(dtype)
    weight, bias = torch.randn(96).to(dtype), torch.randn(96).to(dtype)
    for w in (weight, None):
        for b in (bias, None):
            assert torch.equal(layer_norm_reference(x, w, b, 1e-5), F.layer_norm(x, (96,), w, b, 1e-5))
            normed, total = add_layer_norm_reference(x, residual, w, b, 1e-5)
            assert torch.equal(total, x + residual)
            assert torch.equal(normed, F.layer_norm(x + residual, (96,), w, b, 1e-5))
    mixed = layer_norm_reference(x, weight, bias.float(), 1e-5)
    torch.testing.assert_close(mixed, F.layer_norm(x, (96,), weight, bias, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [5, 64, 100, 1000, 2048])
def test_kernel_is_the_reference(dtype, dim, assert_rounded_alike):
    for rows in (1, 15):
        # Off center: the mean must be taken away before squaring.
        x, residual = (torch.randn(rows, dim) + 1).to(dtype), torch.randn(rows, dim).to(dtype)
        weight, bias = torch.randn(dim), torch.randn(dim)
        for parameters in (
            (weight.to(dtype), bias.to(dtype)),
            (weight.to(dtype), None),
            (None, bias.to(dtype)),
            (None, None),
            (weight, bias),
            (weight.to(dtype), bias),
        ):
            assert_rounded_alike(layer_norm(x, *parameters, 1e-5), layer_norm_reference(x, *parameters, 1e-5))
            normed, total = add_layer_norm(x, residual, *parameters, 1e-5)
            expected, expected_total = add_layer_norm_reference(x, residual, *parameters, 1e-5)
            assert torch.equal(total, expected_total)
            assert_rounded_alike(normed, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 5, 300)[..., 50:130],
        lambda: torch.randn(2, 5, 640).view(2, 5, 8, 80).transpose(1, 2),
        lambda: torch.randn(2, 5, 160)[..., ::2],
        lambda: torch.randn(2, 2, 3, 2, 80).transpose(0, 3),
        lambda: torch.randn(80),
        lambda: torch.randn(2, 0, 80),
    ],
)
def test_any_strides(make, assert_rounded_alike):
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = make().to(dtype), torch.randn(160).to(dtype)[::2]
        assert_rounded_alike(layer_norm(x, weight, None, 1e-5), layer_norm_reference(x, weight, None, 1e-5))
        residual = torch.randn_like(x, memory_format=torch.contiguous_format)
        ours = add_layer_norm(residual, x, weight, weight, 1e-5)
        theirs = add_layer_norm_reference(residual, x, weight, weight, 1e-5)
        assert_rounded_alike(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1]) and ours[1].is_contiguous()


def test_a_far_mean_costs_no_accuracy():
    x = torch.randn(4, 512) + 1000
    exact = F.layer_norm(x.double(), (512,))
    assert (layer_norm_cpu(x, None, None, 1e-5) - exact).abs().max() < 5e-4


def test_the_reference_runs_where_the_kernel_does_not(monkeypatch):
    x = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(layer_norm_cpu(x, x[0], None, 1e-5), F.layer_norm(x, (8,), x[0], None, 1e-5))
    monkeypatch.setattr(norm_kernel, "kernel_function", lambda name: None)
    x = x.float()
    expected = add_layer_norm_reference(x, x, x[0], None, 1e-5)
    assert all(map(torch.equal, add_layer_norm_cpu(x, x, x[0], None, 1e-5), expected))


@pytest.mark.parametrize("function", [layer_norm, layer_norm_cpu, layer_norm_reference])
def test_what_does_not_fit_is_refused(function):
    x = torch.randn(2, 3, 8).bfloat16()
    right = torch.randn(8).bfloat16()
    with pytest.raises(ValueError, match=r"weight has shape \(7,\); it must have one entry for each of the 8"):
        function(x, right[:7], right, 1e-5)
    with pytest.raises(ValueError, match=r"bias has shape \(2, 8\)"):
        function(x, right, right.expand(2, 8), 1e-5)
    with pytest.raises(ValueError, match=r"bias has dtype torch.float16 and input torch.bfloat16; convert it"):
        function(x, right, right.half(), 1e-5)


@pytest.mark.parametrize("function", [add_layer_norm, add_layer_norm_cpu, add_layer_norm_reference])
def test_a_residual_that_does_not_fit_is_refused(function):
    with pytest.raises(ValueError, match=r"residual has shape .* expand or convert one of them"):
        function(torch.randn(2, 3, 8), torch.randn(3, 8), None, None, 1e-5)
