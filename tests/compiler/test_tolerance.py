"""The numeric error that all comparisons share: in standard deviations of a row, infinite for NaN."""

from __future__ import annotations

import math

import pytest
import torch

from torch_pagoda.compiler.tolerance import row_errors, typical


@pytest.fixture
def rows():
    return torch.randn(20, 64, generator=torch.Generator().manual_seed(0))


def test_an_error_counts_in_standard_deviations_of_its_row(rows):
    rows[3] *= 100
    found = rows.clone()
    found[3, 7] += 50 * rows[3].std() / 100
    found[5, 0] -= 2 * rows[5].std()
    errors = row_errors(found, rows)
    assert errors[3] == pytest.approx(0.5) and errors[5] == pytest.approx(2)
    assert errors.count_nonzero() == 2
    assert row_errors(found, rows, rows.std())[5] < 1, "of all rows, one of which is large"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_single_row_that_is_no_number_is_never_typical(rows, value):
    found = rows.clone()
    found[4, 2] = value
    assert typical(row_errors(found, rows).tolist(), 0.9) == math.inf


def test_a_row_that_flips_is_not_typical(rows):
    found = rows.clone()
    found[4] = -rows[4]
    errors = row_errors(found, rows).tolist()
    assert typical(errors, 0.9) == 0 and typical(errors, 1.0) > 1
