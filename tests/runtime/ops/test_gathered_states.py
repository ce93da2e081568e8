"""Operators with state in ATen operators, against the references of the operators themselves, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_graphs import step_of

from torch_pagoda.runtime.ops.causal_conv1d import causal_conv1d_reference
from torch_pagoda.runtime.ops.gathered_states import gathered_causal_conv1d
from torch_pagoda.runtime.state_tables import CONVOLUTION_TABLES, chunk_tables, convolution_tables

# Tokens of each sequence of a step: decode, short parts, one that fills chunks of every width, and several of them.
STEPS = [[1], [1, 1, 1], [3, 1, 7, 2], [64, 16, 1], [70, 1, 200], [130, 64, 65, 63]]


def compared(
    reference: Callable[..., torch.Tensor],
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    given: list[Any],
    where: tuple[torch.Tensor, ...],
    tables: list[torch.Tensor],
) -> float:
    """The largest difference of results and states, both in fp64."""
    state, starts, read, write = where
    expected_state = state.clone()
    expected = reference(*given, expected_state, starts, read, write)
    before = state.clone()
    found, after = function(*given, state, read, *tables)
    assert torch.equal(state.nan_to_num(), before.nan_to_num())
    assert found.dtype is expected.dtype and found.shape == expected.shape and after.dtype is state.dtype
    kept = expected_state[write.long()]
    return max(float((found - expected).abs().max()), float((after - kept).abs().max()))


def tables_of(where: tuple[torch.Tensor, ...], number: int, names: tuple[str, ...]) -> list[torch.Tensor]:
    make = convolution_tables if names is CONVOLUTION_TABLES else chunk_tables
    found = make(where[1], where[2], number)
    return [found[name] for name in names]


def convolution(counts: list[int], taps: int, bias: bool, activation: str) -> tuple[list[Any], Any, Any]:
    tokens = sum(counts)
    weight = torch.randn(24, taps, dtype=torch.float64)
    given = [torch.randn(1, tokens, 24, dtype=torch.float64), weight]
    given += [torch.randn(24, dtype=torch.float64) if bias else None, activation]
    where = step_of(counts, (taps - 1, 24), torch.float64)
    return given, where, tables_of(where, taps, CONVOLUTION_TABLES)


@pytest.mark.parametrize("counts", STEPS, ids=str)
@pytest.mark.parametrize(("taps", "bias", "activation"), [(2, True, ""), (3, False, ""), (4, True, "silu")])
def test_convolution(counts: list[int], taps: int, bias: bool, activation: str) -> None:
    arguments = convolution(counts, taps, bias, activation)
    assert compared(causal_conv1d_reference, gathered_causal_conv1d, *arguments) < 1e-12


def test_a_convolution_of_half_precision_rounds_once() -> None:
    given, where, tables = convolution([5, 1, 9], 4, True, "silu")
    half = [x.bfloat16() if isinstance(x, torch.Tensor) else x for x in given]
    state = where[0].bfloat16()
    found, after = gathered_causal_conv1d(*half, state, where[2], *tables)
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in half]
    expected, _ = gathered_causal_conv1d(*wide, state.double(), where[2], *tables)
    assert found.dtype is torch.bfloat16 and after.dtype is torch.bfloat16
    # The sum and the activation are rounded.
    assert float(((found.double() - expected) / expected.abs().clamp(min=1)).abs().max()) < 2**-7


@pytest.mark.parametrize("mutant", ["a tap late", "a state late", "reads what begins"])
def test_wrong_tables_are_seen(mutant: str) -> None:
    given, where, (rows, kept) = convolution([3, 4, 7, 2], 4, True, "")
    if mutant == "a tap late":
        rows = rows.roll(1, 1)
    elif mutant == "a state late":
        kept = kept - (kept == kept.max()).long()
    else:
        rows, kept = tables_of((*where[:2], where[2].clamp(min=0), where[3]), 4, CONVOLUTION_TABLES)
    error = compared(causal_conv1d_reference, gathered_causal_conv1d, given, where, [rows, kept])
    assert not error < 1e-6
