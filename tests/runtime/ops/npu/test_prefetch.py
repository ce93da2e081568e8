"""Fetches into the L2 cache on a CPU: nothing happens, and what is no fetch is refused."""

from __future__ import annotations

import pytest
import torch

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators


def test_nothing_is_computed_and_what_is_no_fetch_is_refused():
    x = torch.randn(4, 4)
    before = x.clone()
    assert torch.ops.npu.npu_prefetch(x, None, 64) is None and torch.ops.npu.npu_prefetch(x, x, 1 << 40, 8) is None
    assert torch.equal(x, before)
    for size, offset, words in ((0, 0, "max_size=0 is not positive"), (64, -1, "offset=-1 is negative")):
        with pytest.raises(ValueError, match=words):
            torch.ops.npu.npu_prefetch(x, None, size, offset)
