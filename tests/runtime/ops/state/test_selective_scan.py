"""pagoda::selective_scan: the reference against what models compute, the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from torch_pagoda.runtime.ops.registration import OPERATORS
from torch_pagoda.runtime.ops.state import selective_scan as module
from torch_pagoda.runtime.ops.state.selective_scan import selective_scan, selective_scan_seq

selective_scan_reference = OPERATORS[selective_scan].reference
selective_scan_cpu = OPERATORS[selective_scan].cpu

FUNCTIONS = [selective_scan_reference, selective_scan_cpu]


def scan_case(tokens, channels, dim, dtype=torch.float32):
    x, dt = torch.randn(1, tokens, channels).to(dtype), (torch.rand(1, tokens, channels) * 2).to(dtype)
    B, C = torch.randn(2, 1, tokens, dim).to(dtype)
    return [x, dt, -torch.rand(channels, dim) * 16, B, C, True]


def mamba(x, dt, A, B, C, round_state):
    return mamba_selective_scan(*(y.transpose(1, 2) for y in (x, dt)), A, B.transpose(1, 2), C.transpose(1, 2)).mT


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels, dim", [(64, 16), (130, 16), (7, 3), (20, 24)])
def test_it_is_the_scan_of_mamba(function, dtype, channels, dim, assert_close):
    for tokens in (1, 2, 7, 63, 65):
        given = scan_case(tokens, channels, dim, dtype)
        assert_close(function(*given), mamba(*given))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_state_is_rounded_only_if_asked(function):
    given = scan_case(33, 64, 16, torch.bfloat16)
    exact = selective_scan_reference(*(x.double() if isinstance(x, torch.Tensor) else x for x in given))
    errors = [(function(*given[:-1], flag).double() - exact).abs().mean() for flag in (False, True)]
    assert 1.2 * errors[0] < errors[1] < 0.02


MISTAKES = {
    "a step late": (1, lambda dt: dt.roll(1, 1)),
    "rates": (2, lambda A: A * 1.01),
    "a token written late": (3, lambda B: B.roll(1, 1)),
    "read too early": (4, lambda C: C.roll(-1, 1)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake, assert_close):
    given = scan_case(33, 64, 16)
    expected = mamba(*given)
    place, change = MISTAKES[mistake]
    given[place] = change(given[place])
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(selective_scan_cpu(*given), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_strides(dtype, assert_close):
    x, dt = torch.randn(1, 40, 9).to(dtype).mT, torch.rand(1, 9, 120)[..., ::3]
    merged = torch.randn(1, 9, 50).to(dtype)
    given = (x, dt, -torch.rand(16, 40).T, merged[..., 2:18], merged[..., 20:36], False)
    result = selective_scan_cpu(*given)
    assert result.is_contiguous()
    assert_close(result, selective_scan_reference(*given))
    assert selective_scan_cpu(x[:, :0], dt[:, :0], given[2], *(y[:, :0] for y in given[3:5]), True).numel() == 0


def test_the_reference_runs_where_the_kernel_does_not(monkeypatch):
    given = scan_case(9, 16, 8)
    wide = selective_scan_seq(*(x.double() if isinstance(x, torch.Tensor) else x for x in given))
    assert wide.dtype is torch.float64
    torch.testing.assert_close(wide.float(), selective_scan_seq(*given), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(module, "kernel_function", lambda name: None)
    assert torch.equal(selective_scan_cpu(*given), selective_scan_reference(*given))


@pytest.mark.parametrize("function", [selective_scan_seq, *FUNCTIONS])
def test_what_does_not_fit_is_refused(function):
    given = scan_case(5, 8, 4)
    wrong: list[tuple[int, torch.Tensor, str]] = [
        (0, torch.randn(5, 8), r"x \(5, 8\), dt .* do not fit; make them \[1, T, E\]"),
        (1, torch.randn(1, 4, 8), "do not fit"),
        (2, torch.randn(7, 4), "do not fit"),
        (3, torch.randn(1, 5, 5), r"B \(1, 5, 5\) and C \(1, 5, 4\) must be \(1, 5, 4\)"),
        (4, torch.randn(1, 4, 4), r"C \(1, 4, 4\) must be"),
        (2, torch.zeros(8, 4, dtype=torch.int32), "A has dtype torch.int32; give floating-point numbers"),
    ]
    for place, tensor, message in wrong:
        arguments = list(given)
        arguments[place] = tensor
        with pytest.raises(ValueError, match=message):
            function(*arguments)
