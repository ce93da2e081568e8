"""Operators with state in ATen operators, against the references of the operators themselves, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_graphs import step_of

from torch_pagoda.runtime.ops.registration import OPERATORS
from torch_pagoda.runtime.ops.state.causal_conv1d import causal_conv1d
from torch_pagoda.runtime.ops.state.chunked_recurrence import Chunks, chunk_width, chunked_recurrence
from torch_pagoda.runtime.ops.state.chunked_scan import SCAN_CHUNK, chunked_scan
from torch_pagoda.runtime.ops.state.gathered_states import gathered_causal_conv1d
from torch_pagoda.runtime.ops.state.linear_recurrence import linear_recurrence
from torch_pagoda.runtime.ops.state.selective_scan import selective_scan
from torch_pagoda.runtime.state_tables import (
    CHUNK_TABLES,
    CONVOLUTION_TABLES,
    MOST_CHUNKED_TOKENS,
    chunk_tables,
    convolution_tables,
)

linear_recurrence_reference = OPERATORS[linear_recurrence].reference
selective_scan_reference = OPERATORS[selective_scan].reference
causal_conv1d_reference = OPERATORS[causal_conv1d].reference

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


def gathered(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *others: Any) -> Any:
    """It takes taps and bias as lowering makes them, once for all steps."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return gathered_causal_conv1d(x, weight.t().to(wide), None if bias is None else bias.to(wide), *others)


@pytest.mark.parametrize("counts", STEPS, ids=str)
@pytest.mark.parametrize(("taps", "bias", "activation"), [(2, True, ""), (3, False, ""), (4, True, "silu")])
def test_convolution(counts: list[int], taps: int, bias: bool, activation: str) -> None:
    arguments = convolution(counts, taps, bias, activation)
    assert compared(causal_conv1d_reference, gathered, *arguments) < 1e-12


def test_a_convolution_of_half_precision_rounds_once() -> None:
    given, where, tables = convolution([5, 1, 9], 4, True, "silu")
    half = [x.bfloat16() if isinstance(x, torch.Tensor) else x for x in given]
    state = where[0].bfloat16()
    found, after = gathered(*half, state, where[2], *tables)
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in half]
    expected, _ = gathered(*wide, state.double(), where[2], *tables)
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
    error = compared(causal_conv1d_reference, gathered, given, where, [rows, kept])
    assert not error < 1e-6


# Key heads, value heads, size of keys, of values.
HEADS = [(2, 4, 16, 8), (3, 3, 8, 24)]
KINDS = ["head", "channel", "constant"]


def recurrence(
    counts: list[int],
    kind: str = "head",
    delta: bool = True,
    heads: tuple[int, int, int, int] = HEADS[0],
    strong: bool = False,
) -> tuple[list[Any], Any, Any]:
    """A recurrence whose keys are alike for half of the step, as those of repeated tokens are."""
    key_heads, value_heads, dim, value_dim = heads
    tokens = sum(counts)
    query, key = torch.randn(2, 1, tokens, key_heads, dim, dtype=torch.float64)
    key[:, : tokens // 2] = key[:, :1]
    value = torch.randn(1, tokens, value_heads, value_dim, dtype=torch.float64)
    shape = {"head": (1, tokens, value_heads), "channel": (1, tokens, value_heads, dim), "constant": (value_heads,)}
    decay = -torch.rand(shape[kind], dtype=torch.float64) * (30 if strong else 0.2)
    beta = torch.rand(1, tokens, value_heads, dtype=torch.float64) if delta else None
    given = [query, key, value, decay, beta.round() if beta is not None and strong else beta, 0.25, 1e-6]
    where = step_of(counts, (value_heads, value_dim, dim), torch.float64)
    return given, where, tables_of(where, chunk_width(decay), CHUNK_TABLES)


@pytest.mark.parametrize("counts", STEPS, ids=str)
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrence(counts: list[int], delta: bool, kind: str) -> None:
    for heads in HEADS:
        arguments = recurrence(counts, kind, delta, heads)
        assert compared(linear_recurrence_reference, chunked_recurrence, *arguments) < 1e-11


@pytest.mark.parametrize("kind", KINDS)
def test_states_that_are_forgotten_at_once(kind: str) -> None:
    arguments = recurrence([70, 5, 200], kind, strong=True)
    assert compared(linear_recurrence_reference, chunked_recurrence, *arguments) < 1e-11


@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrence_in_float32_is_as_near_as_the_reference(kind: str) -> None:
    given, where, tables = recurrence([300, 1, 64], kind)
    exact = compared_with_float32(given, where, tables)
    assert exact < 1e-5


@pytest.mark.parametrize("kind", ["head", "channel"])
def test_tokens_that_forget_everything_leave_later_decays_exact(kind: str) -> None:
    """In float32 a difference of running sums of -50,000 is off by 4e-3, and so was what it decays."""
    given, where, tables = recurrence([64, 130], kind)
    given[3][:, 3::20] = -50_000.0
    assert compared_with_float32(given, where, tables) < 1e-5


def compared_with_float32(given: list[Any], where: tuple[torch.Tensor, ...], tables: list[torch.Tensor]) -> float:
    expected, behind = chunked_recurrence(*given, where[0], where[2], *tables)
    narrow = [x.float() if isinstance(x, torch.Tensor) else x for x in given]
    found, after = chunked_recurrence(*narrow, where[0].float(), where[2], *tables)
    assert found.dtype is after.dtype is torch.float32
    return max(float((found - expected).abs().max()), float((after - behind).abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrence_of_the_sizes_and_lengths_that_people_run(kind: str) -> None:
    arguments = recurrence([MOST_CHUNKED_TOKENS, 1, 700], kind, heads=(2, 2, 128, 128))
    assert compared(linear_recurrence_reference, chunked_recurrence, *arguments) < 1e-10


def scan(counts: list[int], size: int = 24, kept: int = 5) -> tuple[list[Any], Any, Any]:
    tokens = sum(counts)
    x, dt = torch.randn(2, 1, tokens, size, dtype=torch.float64)
    writes, reads = torch.randn(2, 1, tokens, kept, dtype=torch.float64)
    rates = -torch.rand(size, kept, dtype=torch.float64) * 8
    where = step_of(counts, (size, kept), torch.float64)
    return [x, dt.exp(), rates, writes, reads, True], where, tables_of(where, SCAN_CHUNK, CHUNK_TABLES)


@pytest.mark.parametrize("counts", STEPS, ids=str)
def test_scan(counts: list[int]) -> None:
    assert compared(selective_scan_reference, chunked_scan, *scan(counts)) < 1e-12


@pytest.mark.slow
def test_a_scan_of_the_lengths_that_people_run() -> None:
    assert compared(selective_scan_reference, chunked_scan, *scan([MOST_CHUNKED_TOKENS, 1, 700], 64, 16)) < 1e-11


def test_a_scan_rounds_the_states_that_it_reads_and_keeps_them_whole() -> None:
    given, where, tables = scan([20, 3])
    half = [x.bfloat16() if isinstance(x, torch.Tensor) else x for x in given]
    expected_state, state = where[0].float(), where[0].float()
    expected = selective_scan_reference(*half, expected_state, *where[1:])
    found, after = chunked_scan(*half, state, where[2], *tables)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)
    torch.testing.assert_close(after, expected_state[where[3].long()], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mutant", ["links", "first", "positions", "last"])
@pytest.mark.parametrize("kind", ["delta", "plain", "scan"])
def test_wrong_tables_of_chunks_are_seen(mutant: str, kind: str) -> None:
    """States that are handed on from another chunk, or not at all, and the state of another chunk than the last."""
    counts = [200, 3, 150]
    given, where, tables = scan(counts) if kind == "scan" else recurrence(counts, delta=kind == "delta")
    chunks = Chunks(*tables)
    wrong = {
        "links": chunks._replace(links=chunks.links.where(chunks.links < 1, chunks.links - 1)),
        "first": chunks._replace(links=torch.full_like(chunks.links, -1)),
        "positions": chunks._replace(link_positions=torch.zeros_like(chunks.link_positions)),
        "last": chunks._replace(last=(chunks.last - 1).clamp(min=0)),
    }[mutant]
    function, reference = chunked_recurrence, linear_recurrence_reference
    if kind == "scan":
        function, reference = chunked_scan, selective_scan_reference
    assert not compared(reference, function, given, where, list(wrong)) < 1e-6
