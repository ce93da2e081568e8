"""Norms against torch's own in fp64, rounded once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators

npu = torch.ops.npu

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EPS = 1e-3


def tensors(dtype, *shapes):
    return [torch.randn(shape).to(dtype) for shape in shapes]


def near(actual, exact):
    """Equal to the fp64 value but for the dtype's own rounding."""
    assert actual.shape == exact.shape
    spacing = {torch.float64: 1e-12, torch.float32: 3e-6}.get(actual.dtype, torch.finfo(actual.dtype).eps * 0.6)
    error = (actual.double() - exact).abs() / exact.abs().clamp(min=0.1)
    assert error.max() <= spacing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gamma_shape", [(8,), (3, 8)], ids=str)
def test_rms_norm(dtype, gamma_shape):
    x, gamma = tensors(dtype, (2, 3, 8), gamma_shape)
    normed, rstd = npu.npu_rms_norm(x, gamma, EPS)
    near(normed, F.rms_norm(x.double(), gamma_shape, gamma.double(), EPS))
    near(npu.npu_gemma_rms_norm(x, gamma, EPS)[0], F.rms_norm(x.double(), gamma_shape, 1 + gamma.double(), EPS))
    dims = tuple(range(-len(gamma_shape), 0))
    near(rstd, (x.double().square().mean(dims, keepdim=True) + EPS) ** -0.5)
    assert normed.dtype is dtype and rstd.dtype is torch.float32


def test_gamma_may_be_wider_than_the_input():
    x, gamma = torch.randn(2, 8).bfloat16(), torch.randn(8)
    near(npu.npu_rms_norm(x, gamma, EPS)[0], F.rms_norm(x.double(), (8,), gamma.double(), EPS))
    with pytest.raises(ValueError, match="gamma"):
        npu.npu_add_rms_norm(x, x, gamma)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_rounds_the_sum_first(dtype):
    x1, x2, gamma = tensors(dtype, (4, 8), (4, 8), (8,))
    normed, rstd, total = npu.npu_add_rms_norm(x1, x2, gamma, EPS)
    assert torch.equal(total, x1 + x2)
    near(normed, F.rms_norm((x1 + x2).double(), (8,), gamma.double(), EPS))
    near(rstd, ((x1 + x2).double().square().mean(-1, keepdim=True) + EPS) ** -0.5)
    wide, again, rstd_again, total_again = npu.npu_add_rms_norm_cast(x1, x2, gamma, EPS)
    assert wide.dtype is torch.float32
    near(wide, F.rms_norm((x1 + x2).double(), (8,), gamma.double(), EPS))
    for ours, theirs in ((again, normed), (rstd_again, rstd), (total_again, total)):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_layer_norm(dtype):
    x1, x2, gamma, beta = tensors(dtype, (4, 8), (4, 8), (8,), (8,))
    normed, mean, rstd, total = npu.npu_add_layer_norm(x1, x2, gamma, beta, EPS, True)
    exact = F.layer_norm((x1 + x2).double(), (8,), gamma.double(), beta.double(), EPS)
    assert torch.allclose(
        normed.double(), exact, rtol=0, atol=2 * max(torch.finfo(dtype).eps, 1e-7) * exact.abs().max()
    )
    assert torch.equal(total, x1 + x2)
    near(mean, (x1 + x2).double().mean(-1, keepdim=True))
    near(rstd, ((x1 + x2).double().var(-1, correction=0, keepdim=True) + EPS) ** -0.5)
    assert npu.npu_add_layer_norm(x1, x2, gamma, beta, EPS)[3].isnan().all()


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda x: npu.npu_rms_norm(x, torch.ones(7)), r"gamma \(7,\), input"),
        (lambda x: npu.npu_rms_norm(x, torch.ones(8).half()), "gamma is torch.float16"),
        (lambda x: npu.npu_gemma_rms_norm(x, torch.ones(())), r"gamma \(\), input"),
        (lambda x: npu.npu_add_rms_norm(x, x[:1], torch.ones(8)), r"x2 \(1, 8\) do not fit"),
        (lambda x: npu.npu_add_rms_norm_cast(x, x.half(), torch.ones(8)), "x2 torch.float16"),
        (lambda x: npu.npu_add_layer_norm(x, x, torch.ones(8), torch.ones(7)), r"beta \(7,\), x1"),
    ],
)
def test_refusals(call, match):
    with pytest.raises(ValueError, match=match):
        call(torch.randn(2, 8))


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_add_layer_norm_of_two_dtypes_is_in_fp32(dtypes, assert_close):
    """As op-plugin's own test of it expects."""
    x1, x2 = (100 * torch.rand(3, 5, 64).to(dtype) for dtype in dtypes)
    gamma, beta = torch.rand(64), torch.rand(64)
    y, mean, rstd, total = torch.ops.npu.npu_add_layer_norm(x1, x2, gamma, beta, 1e-5, True)
    assert {t.dtype for t in (y, mean, rstd, total)} == {torch.float32}
    wanted = x1.double() + x2.double()
    assert_close(total, wanted.float())
    assert_close(mean, wanted.mean(-1, keepdim=True).float())
    assert_close(y, torch.nn.functional.layer_norm(wanted, (64,), gamma.double(), beta.double(), 1e-5).float())


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda i, f: torch.ops.npu.npu_rms_norm(i, f[0]), "input is torch.int32"),
        (lambda i, f: torch.ops.npu.npu_add_rms_norm(i, i, i[0]), "x1 is torch.int32"),
        (
            lambda i, f: torch.ops.npu.npu_add_layer_norm(f.half(), f.bfloat16(), f[0], f[0]),
            "x1 is torch.float16 and x2 torch.bfloat16",
        ),
        (lambda i, f: torch.ops.npu.npu_swiglu(i), "input is torch.int32"),
    ],
)
def test_what_is_no_floating_point_number_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call(torch.ones(2, 64, dtype=torch.int32), torch.ones(2, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_that_rounds_to_int8(dtype):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, 3, 64, generator=generator).to(dtype) for _ in range(2))
    gamma = (torch.rand(64, generator=generator) + 0.5).to(dtype)
    y, none, total, scale, no_scale = npu.npu_add_rms_norm_dynamic_quant(
        a, b, gamma, epsilon=1e-3, output_mask=[True, False]
    )
    assert none.numel() == no_scale.numel() == 0 and y.dtype is torch.int8 and scale.dtype is torch.float32
    wide = a.double() + b.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gamma.double()
    torch.testing.assert_close(scale.double(), normed.abs().amax(-1) / 127, rtol=1e-5, atol=0)
    off = (y.double() * scale.double()[..., None] - normed).abs()
    assert (off <= 0.5001 * scale.double()[..., None]).all()
    assert torch.equal(total, (a.float() + b.float()).to(dtype))


def test_a_second_rounded_norm_is_refused():
    x = torch.randn(2, 8)
    for given in ({"output_mask": [True, True]}, {"smooth_scale1": x[0]}, {"beta": x[0]}, {"y_dtype": 16}):
        with pytest.raises(NotImplementedError, match=next(iter(given))):
            npu.npu_add_rms_norm_dynamic_quant(x, x, x[0], **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [None, -7])
def test_a_norm_that_rounds_by_scales(dtype, offset):
    """In float64; a quarter of the numbers is clamped. Each place has a scale of its own here."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, 3, 512, generator=generator).to(dtype) for _ in range(2))
    gamma, scales = ((torch.rand(512, generator=generator) + 0.5).to(dtype) for _ in range(2))
    scales = scales.float() / 100 if dtype is torch.float16 else scales / 100
    given = (
        None if offset is None else torch.full((512,), offset).to(torch.int32 if dtype is torch.float16 else dtype)
    )
    found, other, total = npu.npu_add_rms_norm_quant(a, b, gamma, scales, given, epsilon=1e-3)
    wide = a.double() + b.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gamma.double() / scales.double()
    exact = (exact + (offset or 0)).clamp(-128, 127)
    assert found.dtype is other.dtype is torch.int8 and other.shape == a.shape
    assert ((found.double() - exact).abs() <= 0.5001).all() and (found == 127).any() and (found == -128).any()
    assert torch.equal(total, (a.float() + b.float()).to(dtype))
    elsewhere = npu.npu_add_rms_norm_quant(a, b, gamma, scales.roll(1), given, epsilon=1e-3)[0]
    assert ((elsewhere.double() - exact).abs() > 0.6).any(), "scales of other places"


def test_other_norms_by_scales_are_refused():
    x = torch.randn(2, 8)
    for given in ({"beta": x[0]}, {"scales2": x[0]}, {"axis": 0}, {"div_mode": False}, {"dst_type": 292}):
        with pytest.raises(NotImplementedError, match=next(iter(given))):
            npu.npu_add_rms_norm_quant(x, x, x[0], x[0], None, **given)
    for given in ((x[0, :1], None), (x[0], x[0, :1])):
        with pytest.raises(ValueError, match=r"\(1,\) do not fit gamma \[\*G, N\]"):
            npu.npu_add_rms_norm_quant(x, x, x[0], *given)
