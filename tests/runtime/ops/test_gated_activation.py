"""pagoda::gated_activation and activation: the references against the models' spellings, the kernel against them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from torch_pagoda.runtime.ops import gated_activation as gated_module
from torch_pagoda.runtime.ops.gated_activation import (
    activation,
    activation_cpu,
    activation_reference,
    gated_activation,
    gated_activation_cpu,
    gated_activation_reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# As transformers' activations.py has them.
SPELLINGS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: torch.square(F.relu(x)),
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
ALL = [*SPELLINGS, "clipped_swiglu"]


def gpt_oss_gate(gate, up, alpha, limit):
    gate = gate.clamp(min=None, max=limit)
    up = up.clamp(min=-limit, max=limit)
    glu = gate * torch.sigmoid(gate * alpha)
    return (up + 1) * glu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_is_what_models_write(dtype):
    gate, up = 3 * torch.randn(2, 5, 40).to(dtype), 3 * torch.randn(2, 5, 40).to(dtype)
    for name, spelling in SPELLINGS.items():
        assert torch.equal(gated_activation_reference(gate, up, name, 0.0, 0.0), spelling(gate) * up)
        assert torch.equal(activation_reference(gate, name), spelling(gate))
    expected = gpt_oss_gate(gate, up, 1.702, 2.3)
    assert torch.equal(gated_activation_reference(gate, up, "clipped_swiglu", 1.702, 2.3), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_kernel_is_the_reference(dtype, name, assert_rounded_alike):
    for shape in ((1, 1, 1), (3, 7), (1, 1, 64), (4, 2500), (2, 3, 5, 100)):
        gate, up = 3 * torch.randn(shape).to(dtype), 3 * torch.randn(shape).to(dtype)
        arguments = (gate, up, name, 1.702, 2.3)
        if name == "gelu_tanh":
            # torch's own loses digits where it is close to 0, and more of them on an aarch64 with bf16 instructions.
            precise = activation_reference(gate.double(), name).to(dtype)
            assert_rounded_alike(activation(gate, name), precise, 0.02)
            assert_rounded_alike(gated_activation(*arguments), precise * up, 0.02)
            continue
        few = 0.1 if "gelu" in name else 0.01  # digits that torch's own loses by cancellation
        assert_rounded_alike(gated_activation(*arguments), gated_activation_reference(*arguments), few)
        if name != "clipped_swiglu":
            assert_rounded_alike(activation(gate, name), activation_reference(gate, name), few)


@pytest.mark.parametrize("name", SPELLINGS)
def test_kernel_over_the_whole_range(name):
    x = torch.cat((torch.linspace(-100, 100, 10001), torch.linspace(-6, 6, 10001), -torch.logspace(-30, 1, 1001)))
    exact = activation_reference(x.double(), name)
    assert ((activation_cpu(x, name) - exact).abs() / exact.abs().clamp(min=1.0)).max() < 1e-6
    for dtype in (torch.bfloat16, torch.float16):
        ours, theirs = activation_cpu(x.to(dtype), name).float(), activation_reference(x.to(dtype), name).float()
        torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("name", SPELLINGS)
def test_nan_and_infinity(name):
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.0])
    for dtype in (torch.float32, torch.bfloat16):
        ours = activation_cpu(x.to(dtype), name)
        assert ours[0].isnan() and ours[1] == (1.0 if name == "sigmoid" else math.inf)
        assert abs(ours[4]) < 1e-30 and ours[5] == (0.5 if name == "sigmoid" else 0.0)


STRIDED = {
    "halves of a merged product": lambda p: p.chunk(2, -1),
    "even and odd": lambda p: (p[..., ::2], p[..., 1::2]),
    "every third": lambda p: (p[..., : p.shape[-1] // 3 * 3 : 3], p[..., 1 : p.shape[-1] // 3 * 3 : 3]),
    "heads": lambda p: p.view(2, 3, 4, -1).transpose(1, 2).chunk(2, -1),
    "only one strided": lambda p: (p.chunk(2, -1)[0], p.chunk(2, -1)[1].contiguous()),
    "columns": lambda p: p[0].T.chunk(2, -1),
    "one row for all": lambda p: (p[:, :1].expand(2, 3, -1), p),
    "five dims": lambda p: p.view(2, 3, 2, 2, -1).transpose(0, 3).chunk(2, -1),
    "one dim": lambda p: p[0, 0].chunk(2),
    "no rows": lambda p: p[:, :0].chunk(2, -1),
    "one element": lambda p: (p[0, 0, 0], p[1, 1, 1]),
}


@pytest.mark.parametrize("name", STRIDED)
def test_any_strides(name, assert_rounded_alike):
    for dtype in (torch.float32, torch.bfloat16):
        for width in (64, 4800):
            product = torch.randn(2, 3, width).to(dtype)
            gate, up = STRIDED[name](product)
            if name == "columns":
                gate, up = product[0].T[:, :1], product[0].T[:, 2:]
            for kind in ("silu", "clipped_swiglu"):
                arguments = (gate, up, kind, 1.702, 2.3)
                ours = gated_activation(*arguments)
                assert_rounded_alike(ours, gated_activation_reference(*arguments))
                assert ours.is_contiguous()
            assert_rounded_alike(activation(gate, "relu2"), activation_reference(gate, "relu2"))


def test_threads_change_nothing():
    gate, up = torch.randn(7, 12000).chunk(2, -1)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(gated_activation_cpu(gate, up, "silu", 0.0, 0.0))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_the_reference_runs_where_the_kernel_does_not(monkeypatch):
    x = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(gated_activation_cpu(x, x, "silu", 0.0, 0.0), F.silu(x) * x)
    assert torch.equal(activation_cpu(x, "gelu"), F.gelu(x))
    monkeypatch.setattr(gated_module, "kernel_function", lambda name: None)
    x = x.float()
    assert torch.equal(gated_activation_cpu(x, x, "silu", 0.0, 0.0), F.silu(x) * x)
    assert torch.equal(activation_cpu(x, "relu2"), SPELLINGS["relu2"](x))


@pytest.mark.parametrize("function", [gated_activation, gated_activation_cpu, gated_activation_reference])
def test_what_does_not_fit_is_refused(function):
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match=r"activation is 'swish'; it must be one of silu, .* clipped_swiglu"):
        function(x, x, "swish", 0.0, 0.0)
    for up in (torch.randn(8), torch.randn(2, 8).half()):
        with pytest.raises(ValueError, match=r"up has shape .* gate \(2, 8\) and torch.float32; expand"):
            function(x, up, "silu", 0.0, 0.0)


@pytest.mark.parametrize("function", [activation, activation_cpu, activation_reference])
def test_unknown_kinds_are_refused(function):
    for kind in ("swish", "clipped_swiglu"):
        with pytest.raises(ValueError, match=f"kind is '{kind}'; it must be one of silu, .* quick_gelu$"):
            function(torch.randn(2, 8), kind)
