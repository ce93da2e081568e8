"""pagoda::masked_argmax and apply_bitmask_: the kernels against the references, and these against loops."""

from __future__ import annotations

import math

import pytest
import torch

from torch_pagoda.runtime.ops import structured
from torch_pagoda.runtime.ops.structured import (
    apply_bitmask_,
    apply_bitmask_reference,
    masked_argmax,
    masked_argmax_reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 31, 32, 33, 64, 257, 511, 513, 1000, 1056]
QWEN = 151_936


def packed(allowed: torch.Tensor) -> torch.Tensor:
    """``[S, V]`` bool → ``[S, ceil(V / 32)]`` int32."""
    allowed = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32)).unflatten(1, (-1, 32)).long()
    words = (allowed << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def random_mask(rows: int, vocab: int, density: float) -> torch.Tensor:
    return packed(torch.rand(rows, vocab) < density)


def test_the_reference_says_what_a_loop_says():
    logits = torch.randn(3, 70).bfloat16()
    allowed = torch.rand(4, 70) < 0.3
    rows = torch.tensor([2, 0, 0, 1])
    expected = []
    for mask, row in zip(allowed, rows.tolist(), strict=True):
        best, place = -math.inf, -1
        for token in range(70):
            if mask[token] and float(logits[row, token]) > best:
                best, place = float(logits[row, token]), token
        expected.append(place)
    assert masked_argmax_reference(logits, packed(allowed), rows).tolist() == expected
    changed = logits.clone()
    apply_bitmask_reference(changed, packed(allowed[:2]), rows[:2])
    assert torch.equal(changed[2], logits[2].masked_fill(~allowed[0], -torch.inf))
    assert torch.equal(changed[1], logits[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [*SIZES, QWEN])
def test_the_kernels_are_the_references(dtype, vocab):
    for density in (0.0, 0.01, 0.5, 0.99, 1.0):
        logits = torch.randn(5, vocab).to(dtype)
        logits[0] = logits[0].round()  # many equals
        rows = torch.tensor([3, 0, 4])
        bitmask = random_mask(3, vocab, density)
        agree(logits, bitmask, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_counts_only_where_it_is_allowed(dtype, value):
    for vocab in (33, 1000):
        for place in (0, 16, vocab // 2, vocab - 1):
            logits = torch.randn(2, vocab).to(dtype)
            logits[:, place] = value
            allowed = torch.ones(2, vocab, dtype=torch.bool)
            allowed[1, place] = False
            chosen = agree(logits, packed(allowed), torch.arange(2))
            assert int(chosen[1]) >= 0
            assert (int(chosen[0]) >= 0) == (value == -math.inf)
            only = torch.zeros(2, vocab, dtype=torch.bool)
            only[:, place] = True
            assert agree(logits, packed(only), torch.arange(2)).tolist() == [-1, -1]
    nothing_but_it = torch.full((1, 100), value, dtype=dtype)
    assert agree(nothing_but_it, random_mask(1, 100, 0.5), torch.zeros(1, dtype=torch.int64)).tolist() == [-1]


def test_no_token_is_allowed():
    logits = torch.randn(2, QWEN)
    assert agree(logits, torch.zeros(2, QWEN // 32, dtype=torch.int32), torch.arange(2)).tolist() == [-1, -1]
    assert agree(logits, torch.empty(2, 0, dtype=torch.int32), torch.arange(2)).tolist() == [-1, -1]


def test_masks_that_are_shorter_and_longer_than_the_logits():
    logits = torch.randn(2, 1000)
    logits[:, 999] = 9.0
    short, long = torch.full((2, 5), -1, dtype=torch.int32), torch.full((2, 50), -1, dtype=torch.int32)
    assert int(agree(logits, short, torch.arange(2)).max()) < 160
    assert agree(logits, long, torch.arange(2)).tolist() == [999, 999]


def test_bits_behind_the_last_token_are_not_looked_at():
    """A row that lies directly before another: what a bit too many would read is the next row's first logit."""
    logits = torch.zeros(2, 33)
    logits[1, 0] = 9.0
    bitmask = torch.tensor([[-1, -1], [-1, -1]], dtype=torch.int32)
    assert agree(logits, bitmask, torch.arange(2)).tolist() == [0, 0]
    sparse = torch.tensor([[0, -2], [0, -2]], dtype=torch.int32)  # nothing but bits behind the last token
    assert agree(logits, sparse, torch.arange(2)).tolist() == [-1, -1]


STRIDED = {
    "every other row": lambda: torch.randn(6, 300)[::2],
    "part of a row": lambda: torch.randn(3, 700)[:, 50:350],
    "every other token": lambda: torch.randn(3, 600)[:, ::2],
    "columns": lambda: torch.randn(300, 3).T,
    "one row for all": lambda: torch.randn(1, 300).expand(3, 300),
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides(name, dtype):
    logits = STRIDED[name]().to(dtype)
    bitmask = random_mask(3, 300, 0.5)
    rows = torch.tensor([2, 0, 1])
    expected = masked_argmax_reference(logits.contiguous(), bitmask, rows)
    assert torch.equal(masked_argmax(logits, bitmask, rows), expected)
    wide = random_mask(3, 700, 0.5)[:, ::2]
    assert torch.equal(masked_argmax(logits, wide, rows), masked_argmax_reference(logits, wide, rows))
    if name != "one row for all":
        changed = STRIDED[name]().to(dtype)
        same = changed.clone()
        apply_bitmask_(changed, bitmask, rows)
        apply_bitmask_reference(same, bitmask, rows)
        assert torch.equal(changed, same)


def test_no_rows():
    none = torch.empty(0, dtype=torch.int64)
    assert masked_argmax(torch.randn(2, 40), torch.empty(0, 2, dtype=torch.int32), none).tolist() == []
    apply_bitmask_(torch.randn(2, 40), torch.empty(0, 2, dtype=torch.int32), none)


def test_without_kernels(monkeypatch):
    monkeypatch.setattr(structured, "kernel_function", lambda name: None)
    logits, bitmask, rows = torch.randn(4, 100), random_mask(4, 100, 0.5), torch.arange(4)
    assert torch.equal(masked_argmax(logits, bitmask, rows), masked_argmax_reference(logits, bitmask, rows))
    agree(logits.double(), bitmask, rows)  # no kernel takes that


@pytest.mark.parametrize(
    ("logits", "bitmask", "rows", "words"),
    [
        (torch.zeros(4), torch.zeros(1, 1).int(), torch.tensor([0]), "logits has shape"),
        (torch.zeros(2, 4).long(), torch.zeros(1, 1).int(), torch.tensor([0]), "logits has shape"),
        (torch.zeros(2, 4), torch.zeros(1, 1), torch.tensor([0]), "bitmask has shape"),
        (torch.zeros(2, 4), torch.zeros(1, 1).int(), torch.tensor([0, 1]), "rows has shape"),
        (torch.zeros(2, 4), torch.zeros(1, 1).int(), torch.tensor([2]), "logits has 2 rows"),
        (torch.zeros(2, 4), torch.zeros(1, 1).int(), torch.tensor([-1]), "logits has 2 rows"),
    ],
)
def test_bad_arguments_are_refused(logits, bitmask, rows, words):
    for act in (masked_argmax, apply_bitmask_, masked_argmax_reference, apply_bitmask_reference):
        with pytest.raises(ValueError, match=words):
            act(logits, bitmask, rows)


@pytest.mark.parametrize("mutant", ["a word further", "a bit further", "all allowed"])
def test_a_shifted_mask_is_found(mutant):
    def wrong(logits, bitmask, rows):
        shifted = {
            "a word further": torch.roll(bitmask, 1, 1),
            "a bit further": (bitmask << 1) | ((torch.roll(bitmask, 1, 1) >> 31) & 1),
            "all allowed": torch.full_like(bitmask, -1),
        }[mutant]
        return masked_argmax_reference(logits, shifted, rows)

    logits, bitmask, rows = torch.randn(4, 1000), random_mask(4, 1000, 0.1), torch.arange(4)
    assert not torch.equal(wrong(logits, bitmask, rows), masked_argmax(logits, bitmask, rows))


def agree(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Hold the kernels against the references; returns the tokens."""
    chosen = masked_argmax(logits, bitmask, rows)
    assert torch.equal(chosen, masked_argmax_reference(logits, bitmask, rows))
    changed, same = logits.clone(), logits.clone()
    apply_bitmask_(changed, bitmask, rows)
    apply_bitmask_reference(same, bitmask, rows)
    assert torch.equal(changed.isnan(), same.isnan()) and torch.equal(changed.nan_to_num(), same.nan_to_num())
    return chosen
