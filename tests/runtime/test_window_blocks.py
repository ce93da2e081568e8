"""The blocks that a window touches: every token that is seen is there once, and all others there are hidden."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_pagoda.runtime.step_metadata import StepMetadata
from torch_pagoda.runtime.window_blocks import window_blocks, window_lens


@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=4), st.integers(1, 300), st.sampled_from([1, 3, 16, 32, 128])
)
def test_what_is_read_and_not_hidden_is_the_window(lengths, window, block_size):
    width = -(-max(lengths) // block_size)
    table = torch.arange(len(lengths) * width, dtype=torch.int32).view(-1, width).flip(1)
    given = table.clone()
    for row, length in zip(given, lengths, strict=True):  # what it must not name
        row[: max(0, length - window) // block_size] = -1
        row[-(-length // block_size) :] = -1
    part, hidden = window_blocks(given, torch.tensor(lengths, dtype=torch.int32), window, block_size)
    count = -(-(window + block_size - 1) // block_size)
    assert part.shape == (len(lengths), count) and part.dtype is torch.int32 and int(part.min()) >= 0
    assert hidden.shape == (len(lengths), 1, 1, count * block_size) and hidden.dtype is torch.bool
    for s, (length, held) in enumerate(zip(lengths, window_lens(lengths, window, block_size), strict=True)):
        assert 0 < held <= count * block_size
        slots = (part[s, :, None] * block_size + torch.arange(block_size)).flatten()[:held]
        seen = slots[~hidden[s, 0, 0, :held]]
        places = torch.arange(max(0, length - window), length)
        assert torch.equal(seen, table[s, places // block_size] * block_size + places % block_size)


@pytest.mark.parametrize(("window", "expected"), [(8, [1, 20, 9]), (100, [1, 116, 41])])
def test_a_step_has_the_lengths_by_name(window, expected):
    tokens = torch.arange(3)
    step = StepMetadata(
        slot_mapping=tokens,
        block_table=torch.zeros(3, 8, dtype=torch.int32),
        query_start_loc=torch.arange(4, dtype=torch.int32),
        seq_lens=torch.tensor([1, 116, 41], dtype=torch.int32),
        logits_rows=tokens,
        token_lengths=tokens,
    )
    assert step.field(f"window_lens_32_{window}") == expected
    assert step.field("kv_lens") == [1, 116, 41]
