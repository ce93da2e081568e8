"""pagoda::linear_recurrence: the reference against what models compute, the kernel against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from torch_pagoda.runtime.ops.registration import OPERATORS
from torch_pagoda.runtime.ops.state import linear_recurrence as module
from torch_pagoda.runtime.ops.state.linear_recurrence import linear_recurrence, linear_recurrence_seq

linear_recurrence_reference = OPERATORS[linear_recurrence].reference
linear_recurrence_cpu = OPERATORS[linear_recurrence].cpu

# Key heads, value heads, size of keys, of values.
HEADS = [(1, 1, 128, 128), (2, 4, 64, 32), (4, 4, 16, 24), (1, 4, 20, 7)]
LENGTHS = [1, 2, 7, 63, 64, 65, 130]
FUNCTIONS = [linear_recurrence_reference, linear_recurrence_cpu]


def delta_case(tokens, heads, dtype=torch.float32, by_channel=False, strong=False):
    """Arguments of a gated delta rule whose keys are normalized inside."""
    key_heads, value_heads, dim, value_dim = heads
    query, key = (torch.randn(1, tokens, key_heads, dim).to(dtype) for _ in range(2))
    value = torch.randn(1, tokens, value_heads, value_dim).to(dtype)
    decay = -torch.rand(1, tokens, value_heads, *([dim] if by_channel else [])) * (30 if strong else 0.5)
    beta = torch.rand(1, tokens, value_heads)
    if strong:
        beta = beta.round()  # nothing is written, or all is overwritten
    return [query, key, value, decay, beta.to(dtype), dim**-0.5, 1e-6]


def qwen(query, key, value, decay, beta, scale, eps):
    return torch_chunk_gated_delta_rule(query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)[0]


def kimi(query, key, value, decay, beta, scale, eps):
    groups = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(groups, 2) for x in (query, key))
    return chunk_kimi_delta_attention(query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)[0]


def exact(given):
    wide = (x.double() if isinstance(x, torch.Tensor) else x for x in given)
    return linear_recurrence_reference(*wide).to(given[2].dtype)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_it_is_the_delta_rule_of_models(by_channel, heads, assert_close):
    model = kimi if by_channel else qwen
    for tokens in LENGTHS if heads[2] < 64 else (65,):
        given = delta_case(tokens, heads, by_channel=by_channel)
        strong = delta_case(tokens, heads, by_channel=by_channel, strong=True)
        half = delta_case(tokens, heads, torch.bfloat16, by_channel)
        for arguments, expected in ((given, model(*given)), (strong, exact(strong)), (half, model(*half))):
            assert_close(linear_recurrence_reference(*arguments), expected)
            assert_close(linear_recurrence_cpu(*arguments), expected)
        # Models subtract sums of logarithms, which are large by now.
        torch.testing.assert_close(linear_recurrence_cpu(*strong), model(*strong), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("heads", HEADS)
def test_it_is_the_scan_of_mamba2(heads, assert_close):
    groups, count, dim, head_dim = heads
    for tokens in LENGTHS if dim < 64 else (65,):
        x, dt = torch.randn(1, tokens, count, head_dim), torch.rand(1, tokens, count)
        A, (B, C) = -torch.rand(count) * 4, torch.randn(2, 1, tokens, groups, dim)
        expected = mamba2_chunk_scan(x, dt, A, B, C, 64)
        for function in FUNCTIONS:
            assert_close(function(C, B, x * dt[..., None], A * dt, None, 1.0, None), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_it_is_lightning_attention(function, assert_close):
    tokens, heads, dim = 70, 4, 16
    query, key, value = torch.randn(3, 1, tokens, heads, dim)
    slope = torch.tensor([0.5, 0.1, 0.01, 0.0])
    apart = torch.arange(tokens)[:, None] - torch.arange(tokens)
    weight = torch.exp(-slope[:, None, None].double() * apart).tril()
    scores = torch.einsum("bthn,bshn->bhts", query.double(), key.double()) * weight
    expected = torch.einsum("bhts,bshp->bthp", scores, value.double()).float()
    assert_close(function(query, key, value, -slope, None, 1.0, None), expected)


def test_fp64_is_computed_in_fp64():
    given = [x.double() if isinstance(x, torch.Tensor) else x for x in delta_case(9, HEADS[1])]
    result = linear_recurrence_seq(*given)
    assert result.dtype is torch.float64
    query, key, value, decay, beta, scale, eps = given
    query, key = (x / (x.square().sum(-1, keepdim=True) + eps).sqrt() for x in (query, key))
    state = torch.zeros(4, 32, 64, dtype=torch.float64)
    for t in range(9):
        k, q = (x[0, t].repeat_interleave(2, 0) for x in (key, query))
        forget = torch.eye(64) - beta[0, t, :, None, None] * k[:, :, None] * k[:, None, :]
        state = decay[0, t, :, None, None].exp() * state @ forget
        state = state + beta[0, t, :, None, None] * value[0, t, :, :, None] * k[:, None, :]
        torch.testing.assert_close(result[0, t], scale * torch.einsum("hpn,hn->hp", state, q))


MISTAKES: dict[str, Callable[[list[Any]], None]] = {
    "scale": lambda given: given.__setitem__(5, given[5] * 1.001),
    "no norm": lambda given: given.__setitem__(6, None),
    "no decay": lambda given: given.__setitem__(3, given[3] * 0),
    "one decay early": lambda given: given.__setitem__(3, given[3].roll(1, 1)),
    "one beta late": lambda given: given.__setitem__(4, given[4].roll(1, 1)),
    "plain": lambda given: given.__setitem__(4, None),
    "heads dealt out in turn": lambda given: (
        [given.__setitem__(i, given[i].repeat(1, 1, 2, 1)) for i in (0, 1)] and None
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake, assert_close):
    given = delta_case(65, HEADS[1])
    expected = qwen(*given)
    MISTAKES[mistake](given)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(linear_recurrence_cpu(*given), expected)


STRIDED = {
    "parts of one product": lambda: torch.randn(1, 9, 2, 200)[..., 30:94],
    "heads before tokens": lambda: torch.randn(1, 2, 9, 64).transpose(1, 2),
    "every other element": lambda: torch.randn(1, 9, 2, 128)[..., ::2],
    "one token for all": lambda: torch.randn(1, 1, 2, 64).expand(1, 9, 2, 64),
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_strides_and_dtypes(name, dtype, assert_close):
    query, key, value = (STRIDED[name]().to(dtype) for _ in range(3))
    decay = -torch.rand(1, 2, 9).transpose(1, 2)
    for given in (decay, -torch.rand(1, 9, 4).to(dtype)[..., ::2], -torch.rand(1, 9, 64, 2).transpose(2, 3)):
        for beta in (None, torch.rand(1, 9, 4)[..., ::2]):
            arguments = (query, key, value, given, beta, 0.3, 1e-6)
            assert_close(linear_recurrence_cpu(*arguments), linear_recurrence_reference(*arguments))


def test_the_reference_runs_where_the_kernel_does_not(monkeypatch):
    given = delta_case(9, HEADS[1])
    monkeypatch.setattr(module, "kernel_function", lambda name: None)
    assert torch.equal(linear_recurrence_cpu(*given), linear_recurrence_reference(*given))


def test_a_state_in_bf16_is_rounded_once_a_step(assert_close):
    given = delta_case(40, HEADS[0])
    starts, none, slot = (torch.tensor(x, dtype=torch.int32) for x in ([0, 40], [-1], [1]))
    states = [torch.zeros(2, 1, 128, 128, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    results = [linear_recurrence_cpu(*given, state, starts, none, slot) for state in states]
    assert torch.equal(*results) and torch.equal(states[0].bfloat16(), states[1])
    again = [linear_recurrence_cpu(*given, state, starts, slot, none) for state in states]
    assert_close(again[1], linear_recurrence_reference(*given, states[1], starts, slot, none))
    assert not torch.equal(*again)


@pytest.mark.parametrize("function", [linear_recurrence_seq, *FUNCTIONS])
def test_what_does_not_fit_is_refused(function):
    given = delta_case(5, HEADS[1])
    wrong: list[tuple[int, torch.Tensor, str]] = [
        (0, torch.randn(1, 5, 3, 64), r"query \(1, 5, 3, 64\), key .* do not fit; make them \[1, T, Hk, N\]"),
        (1, torch.randn(1, 4, 2, 64), r"do not fit"),
        (2, torch.randn(1, 5, 3, 32), r"do not fit.*Hk dividing Hv"),
        (2, torch.randn(5, 4, 32), r"do not fit"),
        (3, torch.randn(1, 5, 2), r"log_decay has shape \(1, 5, 2\); make it \(1, 5, 4\), \(1, 5, 4, 64\) or \(4,\)"),
        (3, torch.zeros(1, 5, 4, dtype=torch.int32), r"log_decay has dtype torch.int32; give floating-point"),
        (4, torch.rand(1, 5, 2), r"beta has shape \(1, 5, 2\); make it \(1, 5, 4\)"),
    ]
    for place, tensor, message in wrong:
        arguments = list(given)
        arguments[place] = tensor
        with pytest.raises(ValueError, match=message):
            function(*arguments)
    arguments = list(given)
    arguments[:3] = (x.expand(2, *x.shape[1:]) for x in arguments[:3])
    with pytest.raises(ValueError, match="do not fit"):
        function(*arguments)
