"""Index tables of steps with state, against what they say by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_pagoda.runtime.state_tables import (
    MOST_CHUNKED_TOKENS,
    chunk_tables,
    convolution_tables,
)
from torch_pagoda.runtime.step_metadata import StepMetadata

PARTS = st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=6)


def starts_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def reads_of(goes_on: list[bool]) -> torch.Tensor:
    return torch.tensor([i if on else -1 for i, on in enumerate(goes_on)], dtype=torch.int32)


@given(PARTS, st.integers(2, 5))
def test_convolution_tables(parts: list[tuple[int, bool]], taps: int) -> None:
    counts, goes_on = [n for n, _ in parts], [on for _, on in parts]
    kept, sequences, tokens = taps - 1, len(parts), sum(counts)
    tables = convolution_tables(starts_of(counts), reads_of(goes_on), taps)
    zeros = sequences * kept + tokens
    seen, left = [], []
    first = sequences * kept
    for s, (count, on) in enumerate(parts):
        history = [s * kept + i if on else zeros for i in range(kept)]
        rows = history + list(range(first, first + count))
        first += count
        seen += [rows[i : i + taps] for i in range(count)]
        left.append(rows[-kept:])
    assert tables["convolution_rows"].tolist() == seen
    assert tables["kept_rows"].tolist() == left
    assert all(table.dtype is torch.int64 for table in tables.values())


@given(PARTS, st.sampled_from([1, 4, 16, 64]))
def test_chunk_tables(parts: list[tuple[int, bool]], most: int) -> None:
    counts = [n for n, _ in parts]
    tables = chunk_tables(starts_of(counts), reads_of([on for _, on in parts]), most)
    width = min(most, max(1, *counts))
    chunks, links, rows, first = [], [], [], 0
    for s, count in enumerate(counts):
        tokens = list(range(first, first + count))
        first += count
        pieces = [tokens[i : i + width] for i in range(0, count, width)] or [[]]
        for i, piece in enumerate(pieces):
            rows += [len(chunks) * width + j for j in range(len(piece))]
            chunks.append((piece + [-1] * (width - len(piece)), s, len(links) - 1 if i else -1, i == len(pieces) - 1))
            if i < len(pieces) - 1:
                links.append((len(chunks) - 1, i))
    assert tables["chunk_tokens"].tolist() == [c[0] for c in chunks]
    assert tables["chunk_sequences"].tolist() == [c[1] for c in chunks]
    assert tables["chunk_links"].tolist() == [c[2] for c in chunks]
    assert tables["chunk_rows"].tolist() == rows
    assert tables["last_chunks"].tolist() == [i for i, c in enumerate(chunks) if c[3]]
    # One link at least, so that no tensor is empty.
    assert tables["link_chunks"].tolist() == ([link[0] for link in links] or [0])
    assert tables["link_positions"].tolist() == ([link[1] for link in links] or [0])


def test_a_part_that_is_too_long() -> None:
    counts = [3, MOST_CHUNKED_TOKENS + 1]
    with pytest.raises(ValueError, match=r"4097 tokens in the step, of at most 4096.*lower max_num_batched_tokens"):
        chunk_tables(starts_of(counts), reads_of([True, True]), 64)


def test_a_step_makes_each_table_once() -> None:
    none = torch.zeros(0)
    step = StepMetadata(none, none, starts_of([3, 1]), none, none, none, (), reads_of([True, False]))
    assert step.field("kept_rows_4") is step.field("kept_rows_4")
    assert step.field("kept_rows_4").shape == (2, 3) and step.field("kept_rows_3").shape == (2, 2)
    assert step.field("chunk_tokens_64").shape == (2, 3) and step.field("chunk_tokens_2").shape == (3, 2)
    stateless = StepMetadata(none, none, starts_of([3, 1]), none, none, none)
    with pytest.raises(ValueError, match="kept_rows_4 is for models that keep state"):
        stateless.field("kept_rows_4")
