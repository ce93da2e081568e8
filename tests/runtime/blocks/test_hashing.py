from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_pagoda.runtime.blocks import chain_start, extend_chain


def chain(tokens: list[int], size: int = 4, salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, tokens, 0, size, chain_start(salt))
    return hashes


def test_only_full_blocks_have_a_name() -> None:
    assert [len(chain(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@given(st.lists(st.integers(0, 3), max_size=24), st.lists(st.integers(0, 3), max_size=24), st.integers(1, 4))
def test_names_agree_as_far_as_the_tokens_do(a: list[int], b: list[int], size: int) -> None:
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    left, right = chain(a, size), chain(b, size)
    assert left[: same // size] == right[: same // size]
    assert set(left[same // size :]).isdisjoint(right)


@given(st.lists(st.integers(0, 2**31), max_size=30), st.lists(st.integers(0, 30), max_size=5), st.integers(1, 5))
def test_a_chain_grows_piecewise_to_the_same(tokens: list[int], cuts: list[int], size: int) -> None:
    hashes: list[bytes] = []
    for end in sorted(min(cut, len(tokens)) for cut in [*cuts, len(tokens)]):
        first = len(hashes) * size
        extend_chain(hashes, tokens[first:end], first, size, chain_start("x"))
    assert hashes == chain(tokens, size, "x")


def test_tokens_before_the_ones_asked_for_may_come_along() -> None:
    hashes = chain(list(range(4)))
    extend_chain(hashes, list(range(2, 12)), 2, 4, chain_start(""))
    assert hashes == chain(list(range(12)))


def test_salts_share_nothing() -> None:
    tokens = list(range(16))
    assert set(chain(tokens, salt="a")).isdisjoint(chain(tokens, salt="b"))
    assert set(chain(tokens, salt="a")).isdisjoint(chain(tokens))


def test_any_text_is_a_salt() -> None:
    texts = ["", "a", "é", "\ud800", "a" * 5000, "\0"]
    assert len({chain_start(text) for text in texts}) == len(texts)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_arrays_have_the_names_of_lists(dtype: type) -> None:
    hashes: list[bytes] = []
    extend_chain(hashes, np.arange(9).astype(dtype)[:], 0, 4, chain_start(""))
    assert hashes == chain(list(range(9)))


def test_equal_blocks_at_other_places_have_other_names() -> None:
    assert len(set(chain([7] * 40))) == 10
