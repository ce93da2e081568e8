"""Dead-code elimination that knows about in-place writes, and head layouts."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

from torch_pagoda.compiler.verify.fake_values import propagate
from torch_pagoda.passes.graph.fx_nodes import VMAP_BOUNDS, callee, closure, eliminate_dead_code, mutated_arguments
from torch_pagoda.passes.graph.head_layout import find_layout

from toy_lm import ToyLM, run, sdpa, traced


def write_in_place(m, hidden, pos):
    scaled = hidden.clone()
    scaled[..., 0] = 2.0
    scaled.mul_(0.5)
    unused = hidden.clone()
    unused[..., 1] = 3.0
    return scaled


def test_writes_into_live_tensors_stay_and_into_dead_ones_go():
    graph = traced(ToyLM(sdpa, before=write_in_place))
    before = run(graph, 7)
    assert sum(callee(n) == "setitem" for n in graph.graph.nodes) == 2
    assert eliminate_dead_code(graph.graph) > 0
    assert sum(callee(n) == "setitem" for n in graph.graph.nodes) == 1
    assert sum(callee(n) == "mul_" for n in graph.graph.nodes) == 1
    torch.testing.assert_close(run(graph, 7), before, atol=0, rtol=0)


def joined_masks(m, hidden, pos):
    mask = hidden > 0
    other = operator.and_(mask, hidden < 1)
    return hidden.where(operator.or_(other, mask), 0.5)


def test_operators_with_names_like_keywords_write_nothing():
    """``operator.and_`` ends like ``mul_``: what is computed from one of its operands would read its result, too."""
    graph = traced(ToyLM(sdpa, before=joined_masks))
    joined = [n for n in graph.graph.nodes if callee(n) in ("and_", "or_")]
    assert len(joined) == 2 and [mutated_arguments(n) for n in joined] == [[], []]
    mask = joined[0].args[0]
    assert joined[0] not in closure(joined[1].args[1]) and mask in closure(joined[0])


def update_buffer(m, hidden, pos):
    m.position_table[0] = 1.0
    return hidden


def test_writes_into_inputs_stay():
    graph = traced(ToyLM(sdpa, before=update_buffer))
    eliminate_dead_code(graph.graph)
    assert sum(callee(n) == "setitem" for n in graph.graph.nodes) == 1


def layouts_of(make_key):
    def attention(m, q, k, v, pos):
        return (q @ make_key(k)).softmax(-1) @ v.repeat(1, 2, 1, 1)

    graph = traced(ToyLM(attention))
    product = next(n for n in graph.graph.nodes if callee(n) == "matmul")
    return find_layout(product.args[1], transposed=True), product.args[1]


def test_layouts_see_through_any_spelling_of_repeat_and_transpose():
    spellings = [
        lambda k: k[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, -1, 8).transpose(2, 3),
        lambda k: k.repeat_interleave(2, 1).permute(0, 1, 3, 2),
        lambda k: k.mT.repeat_interleave(2, 1),
        lambda k: k.transpose(2, 3).unsqueeze(2).expand(1, 2, 2, 8, k.shape[2]).flatten(1, 2),
    ]
    for make_key in spellings:
        layout, _ = layouts_of(make_key)
        assert layout is not None
        assert (layout.heads, layout.repeats) == (2, 2)
        assert callee(layout.base) in ("linear", "view", "transpose")


def test_tiled_heads_are_not_repeated_heads():
    """k.repeat tiles (0 1 0 1), GQA repeats (0 0 1 1): taking one for the other would be silently wrong."""
    layout, operand = layouts_of(lambda k: k.repeat(1, 2, 1, 1).transpose(2, 3))
    assert layout is not None
    assert (layout.heads, layout.repeats) == (4, 1)
    assert layout.base in (operand, operand.args[0])


def mapped(m, hidden, pos):
    unused = torch.vmap(lambda row: row * 3.0)(hidden)
    return torch.vmap(lambda row: row * 2.0)(hidden) + 0 * unused.shape[0]


def test_a_live_vmap_keeps_its_bounds():
    graph = traced(ToyLM(sdpa, before=mapped))
    before = run(graph, 7)
    assert eliminate_dead_code(graph.graph) > 0
    propagate(graph)
    assert sum(VMAP_BOUNDS.get(callee(n), 0) for n in graph.graph.nodes) == 0
    assert any(callee(n) in VMAP_BOUNDS for n in graph.graph.nodes)
    torch.testing.assert_close(run(graph, 7), before, atol=0, rtol=0)


def test_a_dead_vmap_goes_with_its_bounds():
    graph = traced(ToyLM(sdpa, before=lambda m, h, pos: h + 0 * torch.vmap(torch.neg)(h).shape[0]))
    eliminate_dead_code(graph.graph)
    assert not any(callee(n) in VMAP_BOUNDS for n in graph.graph.nodes)


def add_to_both(m, hidden, pos):
    other = hidden * 2
    torch._foreach_add_([hidden, other], 1.0)
    return hidden + other


def relu_in_place(m, hidden, pos):
    doubled = hidden * 2
    nn.functional.relu(doubled, inplace=True)
    return hidden + doubled


def relu_in_place_by_position(m, hidden, pos):
    doubled = hidden * 2
    nn.functional.relu(doubled, True)
    return hidden + doubled


def elu_in_place(m, hidden, pos):
    doubled = hidden * 2
    nn.functional.elu(input=doubled, alpha=0.5, inplace=True)
    return hidden + doubled


@pytest.mark.parametrize("before", [add_to_both, relu_in_place, relu_in_place_by_position, elu_in_place])
def test_writes_that_no_name_tells_stay(before):
    """What is written into a list, or by a function that is asked to work in place, is read behind the write."""
    graph = traced(ToyLM(sdpa, before=before))
    (write,) = (n for n in graph.graph.nodes if mutated_arguments(n))
    expected = run(graph, 7)
    eliminate_dead_code(graph.graph)
    assert write in graph.graph.nodes and torch.equal(run(graph, 7), expected)


def test_what_is_not_asked_to_work_in_place_writes_nothing():
    graph = traced(ToyLM(sdpa, before=lambda m, hidden, pos: nn.functional.relu(hidden, inplace=False)))
    assert not any(mutated_arguments(n) for n in graph.graph.nodes)
