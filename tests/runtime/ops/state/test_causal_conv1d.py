"""pagoda::causal_conv1d: the reference against what models compute, the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from transformers.models.lfm2.modeling_lfm2 import causal_conv1d_fn as lfm2_convolution
from transformers.models.mamba.modeling_mamba import causal_conv1d_fn as mamba_convolution

from torch_pagoda.runtime.ops.registration import OPERATORS
from torch_pagoda.runtime.ops.state import causal_conv1d as module
from torch_pagoda.runtime.ops.state.causal_conv1d import causal_conv1d, causal_conv1d_seq

causal_conv1d_reference = OPERATORS[causal_conv1d].reference
causal_conv1d_cpu = OPERATORS[causal_conv1d].cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FUNCTIONS = [causal_conv1d_reference, causal_conv1d_cpu]


def of_models(x, weight, bias, activation):
    model = mamba_convolution if activation else lfm2_convolution
    return torch.empty(x.shape, dtype=x.dtype).copy_(model(x.mT, weight, bias, activation or None).mT)


@pytest.fixture
def assert_alike(assert_close, assert_rounded_alike):
    def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
        if expected.dtype is torch.float16:  # torch adds up in fp16 on some processors
            assert_close(actual, expected)
        else:
            # Half precision is rounded twice, and a neighbor before the activation can be one behind it.
            assert_rounded_alike(actual, expected, few=0.02)

    return check


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("taps", [2, 3, 4, 8])
def test_it_is_the_convolution_of_models(function, dtype, taps, assert_alike):
    for tokens, channels in ((1, 5), (2, 300), (7, 128), (65, 40)):
        x, weight = torch.randn(1, tokens, channels).to(dtype), torch.randn(channels, taps).to(dtype)
        for bias in (None, torch.randn(channels).to(dtype)):
            for activation in ("", "silu"):
                given = (x, weight, bias, activation)
                assert_alike(function(*given), of_models(*given))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_it_computes_in_the_dtype_of_the_weight(function):
    x, weight = torch.randn(1, 9, 16), torch.randn(16, 4).bfloat16()
    result = function(x, weight, None, "silu")
    assert result.dtype is torch.float32 and torch.equal(result, result.bfloat16().float())
    assert torch.equal(result, function(x.bfloat16(), weight, None, "silu").float())
    wide = function(x.bfloat16(), weight.float(), None, "")
    assert wide.dtype is torch.bfloat16
    torch.testing.assert_close(wide, function(x.bfloat16().float(), weight.float(), None, "").bfloat16())


MISTAKES = {
    "taps turned round": lambda x, weight, bias: (x, weight.flip(1), bias),
    "a token late": lambda x, weight, bias: (x.roll(1, 1), weight, bias),
    "no bias": lambda x, weight, bias: (x, weight, None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake, assert_rounded_alike):
    given = torch.randn(1, 9, 16), torch.randn(16, 4), torch.randn(16)
    with pytest.raises(AssertionError):
        assert_rounded_alike(causal_conv1d_cpu(*MISTAKES[mistake](*given), "silu"), of_models(*given, "silu"))


STRIDED = {
    "part of a product": lambda: torch.randn(1, 9, 100)[..., 30:70],
    "channels before tokens": lambda: torch.randn(1, 40, 9).transpose(1, 2),
    "every other channel": lambda: torch.randn(1, 9, 80)[..., ::2],
    "no tokens": lambda: torch.randn(1, 0, 40),
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides(name, dtype, assert_alike):
    x, weight = STRIDED[name]().to(dtype), torch.randn(4, 80).to(dtype).T[::2]
    for given in ((x, weight, torch.randn(80).to(dtype)[::2], ""), (x, weight.contiguous(), None, "silu")):
        result = causal_conv1d_cpu(*given)
        assert result.is_contiguous()
        assert_alike(result, causal_conv1d_reference(*given))


def test_large_and_missing_numbers():
    x = torch.zeros(1, 6, 8)
    x[0, 0], x[0, 1], x[0, 2] = 1e30, -1e30, torch.nan
    result = causal_conv1d_cpu(x, torch.tensor([[0.0, 1.0]]).expand(8, 2), None, "silu")
    assert (result[0, 0] == 1e30).all() and (result[0, 1] == 0).all()
    assert result[0, 2:4].isnan().all() and (result[0, 4:] == 0).all()  # 0 · NaN is NaN


def test_the_reference_runs_where_the_kernel_does_not(monkeypatch):
    given = (torch.randn(1, 9, 16), torch.randn(16, 4), None, "silu")
    assert (
        causal_conv1d_seq(*(x.double() if isinstance(x, torch.Tensor) else x for x in given)).dtype is torch.float64
    )
    monkeypatch.setattr(module, "kernel_function", lambda name: None)
    assert torch.equal(causal_conv1d_cpu(*given), causal_conv1d_reference(*given))


@pytest.mark.parametrize("function", [causal_conv1d_seq, *FUNCTIONS])
def test_what_does_not_fit_is_refused(function):
    x, weight = torch.randn(1, 5, 8), torch.randn(8, 4)
    wrong = [
        ((x[0], weight, None, ""), r"x \(5, 8\) and weight \(8, 4\) do not fit; make them \[1, T, C\] and \[C, K\]"),
        ((x.expand(2, 5, 8), weight, None, ""), "do not fit"),
        ((x, weight[:7], None, ""), "do not fit"),
        ((x, weight[:, :1], None, ""), "weight has 1 taps; give 2 to 8"),
        ((x, torch.randn(8, 9), None, ""), "weight has 9 taps; give 2 to 8"),
        ((x.long(), weight, None, ""), "x and weight have dtypes torch.int64 and torch.float32; give floating"),
        ((x, weight, torch.randn(7), ""), r"bias has shape \(7,\) .* make it \[8\] torch.float32"),
        ((x, weight, torch.randn(8).bfloat16(), ""), "bias has .* dtype torch.bfloat16"),
        ((x, weight, None, "gelu"), "activation is 'gelu'; give 'silu', or '' for none"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            function(*arguments)
