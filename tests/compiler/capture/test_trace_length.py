"""How many tokens a model is traced at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from torch_pagoda.compiler.capture.trace import SHORTEST_TRACE, trace_length


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, SHORTEST_TRACE),
        ({"sliding_window": 4096}, 2 * 4096 + 9),
        ({"sliding_window": 4096, "max_position_embeddings": 32768}, 2 * 4096 + 9),
        # A slice of all 8192 rows of a table would be taken for the table.
        ({"window_size": 4096, "max_position_embeddings": 8192}, 8191),
        ({"max_position_embeddings": 16}, 15),
    ],
)
def test_above_windows_and_below_the_number_of_positions(config, length):
    model = nn.Module()
    model.config = SimpleNamespace(**config)
    assert trace_length(model) == length
