"""States for operators along the tokens: what they hold, how they are numbered, what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.verify.self_check import STATE_SCHEDULE, check, reference_of_model
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.proof.token_axis import mixers
from torch_pagoda.passes.rewrite.insert_state import insert_state
from torch_pagoda.runtime.ops.state.causal_conv1d import causal_conv1d, causal_conv1d_seq
from torch_pagoda.runtime.ops.state.linear_recurrence import linear_recurrence, linear_recurrence_seq
from torch_pagoda.runtime.ops.state.selective_scan import selective_scan_seq
from torch_pagoda.runtime.program import CacheSpec, StateSpec

from toy_lm import DYNAMO_PASSES, HIDDEN, ToyLM, sdpa, traced

Mixer = Callable[[ToyLM, torch.Tensor, torch.Tensor], torch.Tensor]


def numbers(*shape: int) -> torch.Tensor:
    return torch.linspace(-0.5, 0.5, torch.Size(shape).numel()).reshape(shape)


def convolution(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    return h + causal_conv1d_seq(h, m.position_table[:4].T, m.position_table[4], "silu")


def recurrence(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    query, key, value = (x.unflatten(-1, (4, 8)) for x in (m.q(h), m.o(h), h))
    decay = -torch.nn.functional.softplus(h[..., :4])
    return h + linear_recurrence_seq(query, key, value, decay, h[..., 4:8].sigmoid(), 0.5, 1e-6).flatten(2)


def scan(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    rates = -m.position_table[:3].exp().T
    return h + selective_scan_seq(h, m.q(h).sigmoid(), rates, h[..., :3], h[..., 3:6], True)


def end_of_all(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """As transformers cuts off what a cache put in front, where there is no cache."""
    return convolution(m, h, pos)[:, -h.shape[1] :]


def passed(before: Mixer) -> tuple[ToyLM, TracedGraph]:
    model = ToyLM(sdpa, before=before)
    graph = traced(model)
    for entry in DYNAMO_PASSES:
        entry.apply(graph)
    return model, graph


@pytest.mark.parametrize("before", [convolution, recurrence, scan, end_of_all])
def test_many_sequences_share_a_step(before: Mixer) -> None:
    model, graph = passed(before)
    assert mixers(graph) == []
    graph.recompile()
    verdict = check(link(graph, graph.module), reference_of_model(model, STATE_SCHEDULE))
    assert verdict.ok and verdict.error < 1e-3, verdict


def test_without_the_pass_they_are_refused() -> None:
    graph = traced(ToyLM(sdpa, before=recurrence))
    for entry in DYNAMO_PASSES:
        if entry.apply is not insert_state:
            entry.apply(graph)
    assert "linear_recurrence_seq is not known to work token by token" in [r.reason for r in mixers(graph)]


def test_what_states_hold() -> None:
    def before(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return scan(m, recurrence(m, convolution(m, h, pos), pos), pos)

    _, graph = passed(before)
    states = [spec for spec in graph.caches if isinstance(spec, StateSpec)]
    assert states == [
        StateSpec("conv_state", (3, HIDDEN), torch.float32, 1),
        StateSpec("recurrent_state", (4, 8, 8), torch.float32, 1),
        StateSpec("recurrent_state", (HIDDEN, 3), torch.float32, 1),
    ]
    assert isinstance(graph.caches[3], CacheSpec), "the toy's attention comes behind"
    names = [f"{part.name}_{i}" for i, spec in enumerate(graph.caches) for part in spec.parts()]
    assert set(names) <= {node.name for node in graph.placeholders}
    assert insert_state(graph).matches == 0


def test_a_fixed_number_of_tokens_is_left_alone() -> None:
    def before(m: ToyLM, h: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return h + causal_conv1d_seq(numbers(1, 9, HIDDEN), m.position_table[:4].T, None, "").mean()

    graph = traced(ToyLM(sdpa, before=before))
    record = insert_state(graph)
    assert record.matches == 0
    assert [r.reason for r in record.rejections] == ["its number of tokens is fixed at 9"]


MUTANTS: dict[str, tuple[Any, dict[int, int]]] = {
    "goes on from what it is to write": (causal_conv1d, {6: 7}),
    "writes where it reads": (linear_recurrence, {10: 9}),
    "goes on from what it is to write, matrices": (linear_recurrence, {9: 10}),
}
"""An operator, and which of its arguments takes another's place: 6 and 7, 9 and 10 are slots read and written."""


@pytest.mark.parametrize("name", MUTANTS)
def test_the_self_check_sees_wrong_slots(name: str) -> None:
    operator, swaps = MUTANTS[name]
    model, graph = passed(lambda m, h, pos: recurrence(m, convolution(m, h, pos), pos))
    (node,) = [n for n in graph.graph.nodes if n.target is operator]
    arguments = list(node.args)
    for place, other in swaps.items():
        arguments[place] = node.args[other]
    node.args = tuple(arguments)
    graph.recompile()
    assert not check(link(graph, graph.module), reference_of_model(model, STATE_SCHEDULE)).ok
