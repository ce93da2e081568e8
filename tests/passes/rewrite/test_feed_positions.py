"""Positions for models that make their own: what is cut from a stored table is judged by the whole of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from torch_pagoda.passes.graph.evaluate import Evaluation
from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.passes.proof.token_axis import mixers

from toy_lm import DYNAMO_PASSES, ToyLM, sdpa, traced

POSITIONS = torch.tensor([[0, 5, 11, 12, 255, 256, 300, 1990]])
LOGN = torch.tensor([max(1.0, math.log(max(n, 1), 256)) for n in range(2048)])
"""As of Qwen: one up to 256 tokens."""
CLAMPED = torch.arange(2048).clamp(max=255)

Cut = Callable[[torch.Tensor, int], torch.Tensor]


def applied(table: torch.Tensor, cut: Cut):
    """The graph of a model that multiplies by a table cut to T tokens, the record of the pass, and what it multiplies
    by."""

    def before(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return h.mul(cut(m.table, h.shape[1]))

    model = ToyLM(sdpa, before=before)
    model.register_buffer("table", table)
    graph = traced(model)
    records = {entry.name: entry.apply(graph) for entry in DYNAMO_PASSES}
    (product,) = (n for n in graph.graph.nodes if callee(n) == "mul")
    return graph, records["feed_positions"], product.args[1]


def at_positions(graph, node) -> torch.Tensor:
    given = {graph.placeholder(graph.position_ids): POSITIONS}
    return Evaluation(graph, {graph.token_symbol: POSITIONS.shape[1]}, given)(node)


CUTS: dict[str, tuple[torch.Tensor, Cut]] = {
    "constant at first": (LOGN[None, :, None], lambda t, n: t[:, :n]),
    "positions at first": (CLAMPED[None, :, None], lambda t, n: t[:, :n]),
    "constant at first, from one on": (LOGN[:, None], lambda t, n: t[1 : n + 1]),
    "far in": (LOGN[:, None], lambda t, n: t[40 : n + 40]),
    "narrow": (LOGN[:, None], lambda t, n: t.narrow(0, 0, n)),
    "new dims": (LOGN, lambda t, n: t[None, :n, None]),
    "one of several": (torch.stack([LOGN, LOGN + 1])[..., None], lambda t, n: t[1, :n]),
    "made of a table": (CLAMPED.float(), lambda t, n: (t + t)[:n][:, None]),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_table_is_read_at_the_positions(name):
    table, cut = CUTS[name]
    graph, record, read = applied(table, cut)
    assert (record.matches, record.rejections, mixers(graph)) == (1, [], [])
    rows = POSITIONS[0]
    whole = cut(table, 2000).reshape(-1)
    assert torch.equal(at_positions(graph, read).reshape(-1), whole[rows])


@pytest.mark.parametrize("dtype", [torch.long, torch.float32, torch.bfloat16])
def test_a_table_of_positions_is_the_positions(dtype):
    table = (torch.arange(2048) + 3).to(dtype)[:, None]
    graph, record, read = applied(table, lambda t, n: t[2 : n + 2])
    assert record.matches == 1
    assert not [n for n in graph.graph.nodes if callee(n) == "index_select" and n.args[1] == 0]
    assert torch.equal(at_positions(graph, read).flatten(), table[2:, 0][POSITIONS[0]])


def test_a_table_of_equal_rows_stays():
    graph, record, read = applied(torch.full((2048, 1), 0.5), lambda t, n: t[:n])
    assert (record.matches, mixers(graph)) == (0, [])
    assert callee(read) == "getitem"


def test_there_are_no_more_positions_than_rows():
    graph, _, _ = applied(LOGN[:, None], lambda t, n: t[40 : n + 40])
    assert graph.max_positions == 2008


REFUSED: dict[str, tuple[Cut, str]] = {
    "padded": (lambda t, n: F.pad(t, (0, n - 2048))[:, None], "index in the step"),
    "from the end": (lambda t, n: t[-n:][:, None], "index in the step"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_after_the_first_tokens_is_refused(name):
    cut, reason = REFUSED[name]
    graph, record, _ = applied(LOGN, cut)
    assert record.matches == 0
    assert any(reason in r.reason for r in mixers(graph))


def test_positions_that_are_written_into_leave_the_others_alone():
    graph, record, read = applied(LOGN, lambda t, n: torch.arange(n).clamp_(max=255)[:, None])
    assert record.matches == 1
    assert not mixers(graph)
    positions = POSITIONS.clone()
    given = {graph.placeholder(graph.position_ids): positions}
    Evaluation(graph, {graph.token_symbol: POSITIONS.shape[1]}, given)(read)
    assert torch.equal(positions, POSITIONS)
