"""Cuts: dealt in equal parts, followed through views, and told as plain data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_pagoda.passes.graph.cut import (
    ZERO,
    Cut,
    Refused,
    counted_once,
    deal,
    deal_heads,
    first_only,
    groups_read,
    through_view,
)


def taken(array: np.ndarray, dim: int, held: np.ndarray) -> np.ndarray:
    part = np.take(array, np.maximum(held, 0), dim)
    zeros = np.expand_dims(held == ZERO, [i for i in range(array.ndim) if i != dim])
    return np.where(zeros, 0, part)


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 9))
def test_every_index_is_dealt_once_in_equal_parts_of_whole_units(size: int, unit: int, ranks: int) -> None:
    parts = deal(size, unit, ranks)
    assert len(parts) == ranks
    assert len({len(part) for part in parts}) == 1
    assert np.concatenate(parts)[np.concatenate(parts) != ZERO].tolist() == list(range(size))
    assert len(parts[0]) % unit == 0
    assert all((part[part != ZERO][:1] % unit == 0).all() for part in parts)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 5), st.integers(1, 9))
def test_heads_are_dealt_so_that_each_rank_reads_its_own_kv_heads(
    kv_heads: int, group: int, head_dim: int, ranks: int
) -> None:
    heads = kv_heads * group
    columns = [part.reshape(-1, head_dim) for part in deal_heads(heads, kv_heads, head_dim, ranks)]
    assert all(
        part.tolist() == (part[:, :1] + np.arange(head_dim) * (part[:, :1] != ZERO)).tolist() for part in columns
    )
    dealt = tuple(np.where(part[:, 0] == ZERO, ZERO, part[:, 0] // head_dim) for part in columns)
    given_heads = np.concatenate(dealt)
    assert sorted(given_heads[given_heads != ZERO].tolist()) == list(range(heads))
    read = groups_read(dealt, heads, kv_heads)
    for own, few in zip(dealt, read, strict=True):
        per = len(own) // len(few)
        assert all(head == ZERO or few[i // per] == head // group for i, head in enumerate(own.tolist()))


@given(st.data())
def test_a_cut_of_a_view_is_the_same_elements_of_its_source(data: st.DataObject) -> None:
    factors = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    total = math.prod(factors)
    split = data.draw(st.integers(0, len(factors)))
    shapes = [factors, [math.prod(factors[:split]), math.prod(factors[split:])], [total]]
    source, result = (data.draw(st.sampled_from(shapes)) for _ in range(2))
    dim = data.draw(st.integers(0, len(result) - 1))
    ranks = data.draw(st.integers(1, 3))
    cut = Cut(dim, deal(result[dim], data.draw(st.sampled_from([1, 2, 3])), ranks))
    try:
        found = through_view(source, result, cut)
    except Refused:
        return
    array = np.arange(1, total + 1)
    for own, held in zip(found.indices, cut.indices, strict=True):
        part = taken(array.reshape(source), found.dim, own)
        assert part.ravel().tolist() == taken(array.reshape(result), dim, held).ravel().tolist()


def test_a_view_that_would_part_a_head_names_the_unit() -> None:
    with pytest.raises(Refused) as refused:
        through_view([1, "s70", 3, 16], [1, "s70", 48], Cut(2, deal(48, 1, 2)))
    assert refused.value.unit == 16


def test_a_view_may_not_mix_tokens_with_what_is_cut() -> None:
    with pytest.raises(Refused, match="tokens"):
        through_view([1, "s70", 4, 16], ["4*s70", 16], Cut(0, deal(4, 1, 2)))


def test_the_only_one_of_a_dim_that_all_ranks_hold_is_whole_in_its_source() -> None:
    everywhere = (np.arange(1), np.arange(1))
    found = through_view([1, "s70", 16], [1, "s70", 1, 16], Cut(2, everywhere))
    assert [part.tolist() for part in found.indices] == [list(range(16))] * 2


@given(st.lists(st.lists(st.integers(-1, 9), min_size=4, max_size=4), min_size=1, max_size=3))
def test_cuts_survive_as_plain_data(parts: list[list[int]]) -> None:
    cut = Cut(1, tuple(np.array(part, dtype=np.int64) for part in parts))
    assert Cut.of_runs(1, cut.runs, 10) == cut


@pytest.mark.parametrize("runs", [(((0, 4),), ((8, 4),)), (((-2, 4),),), (((0, 0),),), (((0, 4),), ((4, 3),))])
def test_plain_data_that_are_no_cut_of_the_dim_are_refused(runs: tuple[tuple[tuple[int, int], ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"hold|runs"):
        Cut.of_runs(0, runs, 10)


def test_what_several_ranks_hold_counts_on_the_first() -> None:
    counted = counted_once(Cut(2, (np.array([0, 1]), np.array([1, 2]), np.array([2, ZERO]))))
    assert [part.tolist() for part in counted.indices] == [[0, 1], [ZERO, 2], [ZERO, ZERO]]


def test_what_is_added_once_is_zero_on_all_ranks_but_the_first() -> None:
    assert [part.tolist() for part in first_only(2, 3)] == [[0, 1], [ZERO, ZERO], [ZERO, ZERO]]
