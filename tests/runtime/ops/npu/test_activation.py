"""Activations against their formulas in fp64, rounded once."""

from __future__ import annotations

import math

import pytest
import torch

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators

npu = torch.ops.npu

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(params=DTYPES, ids=str)
def x(request):
    return (torch.randn(2, 6, 8) * 2).to(request.param)


def assert_near(actual, exact):
    """Equal to the fp64 value but for the dtype's own rounding; 1 + erf(x) cancels, so fp32 gets an absolute part."""
    eps = {torch.float64: 1e-12, torch.float32: 1e-6}.get(actual.dtype, torch.finfo(actual.dtype).eps * 0.6)
    floor = 1e-12 if actual.dtype is torch.float64 else 2e-6
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= eps * exact.abs() + floor).all()


def gelu(values, approximate):
    values = values.double()
    if approximate == "tanh":
        return values / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (values + 0.044715 * values**3)))
    return values / 2 * (1 + torch.erf(values / math.sqrt(2)))


def silu(values):
    return values.double() / (1 + torch.exp(-values.double()))


def test_swiglu_activates_the_left_half(x):
    assert_near(npu.npu_swiglu(x), silu(x[..., :4]) * x[..., 4:].double())
    assert_near(npu.npu_swiglu(x, 1), silu(x[:, :3]) * x[:, 3:].double())


@pytest.mark.parametrize("approximate", [0, 1])
def test_geglu_activates_the_right_half_unless_told(x, approximate):
    form = "tanh" if approximate else "none"
    product, activated = npu.npu_geglu(x, -1, approximate)
    assert_near(activated, gelu(x[..., 4:], form))
    assert_near(product, gelu(x[..., 4:], form) * x[..., :4].double())
    product, activated = npu.npu_geglu(x, 1, approximate, True)
    assert_near(activated, gelu(x[:, :3], form))
    assert_near(product, gelu(x[:, :3], form) * x[:, 3:].double())


def test_geglu_uses_tanh_by_default():
    x = torch.linspace(-3, 3, 64).reshape(4, 16)
    assert torch.equal(npu.npu_geglu(x)[0], npu.npu_geglu(x, -1, 1)[0]) and not torch.equal(
        npu.npu_geglu(x)[0], npu.npu_geglu(x, -1, 0)[0]
    )


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(x, approximate):
    assert_near(npu.npu_gelu(x, approximate=approximate), gelu(x, approximate))
    product = npu.npu_gelu_mul(x, approximate=approximate)
    assert_near(product, gelu(x[..., :4], approximate) * x[..., 4:].double())


def test_silu_and_fast_gelu(x):
    assert_near(npu.npu_silu(x), silu(x))
    assert_near(npu.npu_fast_gelu(x), x.double() / (1 + torch.exp(-1.702 * x.double())))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("groups", [None, [2, 0, 1], [9]], ids=str)
def test_clipped_swiglu(x, interleaved, groups):
    x = x.flatten(0, 1) * 2
    group_index = None if groups is None else torch.tensor(groups)
    result = npu.npu_clipped_swiglu(
        x, group_index=group_index, alpha=1.5, limit=3.0, bias=0.5, interleaved=interleaved
    )
    gate, linear = (x[:, 0::2], x[:, 1::2]) if interleaved else (x[:, :4], x[:, 4:])
    gate, linear = gate.double().clamp(max=3), linear.double().clamp(-3, 3)
    exact = gate / (1 + torch.exp(-1.5 * gate)) * (linear + 0.5)
    if groups is not None:
        exact[sum(groups) :] = 0
    assert_near(result, exact)


def test_clipped_swiglu_along_another_dim():
    x = torch.randn(2, 6, 4)
    assert_near(
        npu.npu_clipped_swiglu(x, dim=1, interleaved=False),
        npu.npu_clipped_swiglu(x.transpose(1, 2).contiguous(), interleaved=False).transpose(1, 2).double(),
    )
    # Interleaved, the dims from dim on are one axis: neighbors are taken there, not along dim.
    flat = npu.npu_clipped_swiglu(x.reshape(2, 24)).reshape(2, 3, 4)
    assert torch.equal(npu.npu_clipped_swiglu(x, dim=1), flat)
    assert torch.equal(npu.npu_clipped_swiglu(x, dim=0), npu.npu_clipped_swiglu(x.reshape(1, -1)).reshape(1, 6, 4))


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda x: npu.npu_swiglu(x), "dim -1 is 7; it must be even"),
        (lambda x: npu.npu_swiglu(x, 3), "dim 3 is None; it must be even"),
        (lambda x: npu.npu_geglu(x, 0, 2), "approximate is 2"),
        (lambda x: npu.npu_gelu(x, approximate="erf"), "approximate is 'erf'"),
        (lambda x: npu.npu_gelu_mul(x), "must be even"),
        (lambda x: npu.npu_clipped_swiglu(x), "dim -1 is 7; it must be even"),
        (lambda x: npu.npu_clipped_swiglu(x[0]), r"x \(7,\) do not fit x \[\*B, M, N\]"),
    ],
)
def test_refusals(call, match):
    with pytest.raises(ValueError, match=match):
        call(torch.randn(2, 7))
