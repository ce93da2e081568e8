"""What operators with state are said to compute and to move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from torch_pagoda.compiler.costs.flops import flops
from torch_pagoda.compiler.costs.traffic import Moved, Step, moved
from torch_pagoda.passes.graph.notes import GraphNotes
from torch_pagoda.runtime.program import StateSpec

TOKENS, KEY_HEADS, HEADS, DIM, VALUE_DIM = 5, 2, 4, 16, 8


@pytest.mark.parametrize("is_delta", [False, True])
def test_a_recurrence_reads_and_writes_one_state_whatever_the_context(is_delta: bool) -> None:
    graph = fx.Graph()

    def placeholder(name: str, *shape: int) -> fx.Node:
        node = graph.placeholder(name)
        node.meta["example_value"] = torch.empty(shape, device="meta")
        return node

    query, key = (placeholder(name, 1, TOKENS, KEY_HEADS, DIM) for name in ("query", "key"))
    value = placeholder("value", 1, TOKENS, HEADS, VALUE_DIM)
    decay, beta = (placeholder(name, 1, TOKENS, HEADS) for name in ("decay", "beta"))
    state = placeholder("recurrent_state_0", 99, HEADS, VALUE_DIM, DIM)
    state.meta["cache_index"] = 0
    metadata = [placeholder(name, size) for name, size in (("starts", 2), ("read", 1), ("write", 1))]
    given: tuple[Any, ...] = (query, key, value, decay, beta if is_delta else None, 1.0, None, state, *metadata)
    node = graph.call_function(torch.ops.pagoda.linear_recurrence.default, given)
    node.meta["example_value"] = torch.empty(1, TOKENS, HEADS, VALUE_DIM, device="meta")
    traced: Any = SimpleNamespace(
        placeholders=list(graph.find_nodes(op="placeholder")),
        constants=[],
        notes=GraphNotes(),
        caches=[StateSpec("recurrent_state", (HEADS, VALUE_DIM, DIM), torch.float32)],
        npu=None,
        token_symbol=None,
    )
    step = Step(TOKENS, 1000, 1)
    size = HEADS * VALUE_DIM * DIM
    assert flops(traced, [node], step) == 2 * (3 if is_delta else 2) * TOKENS * size
    found = moved(traced, [node], step)
    numbers = TOKENS * (2 * KEY_HEADS * DIM + 2 * HEADS * VALUE_DIM + (2 if is_delta else 1) * HEADS) + 2 + 1 + 1
    assert found == Moved(0, 2 * 4 * size, 4 * numbers)
