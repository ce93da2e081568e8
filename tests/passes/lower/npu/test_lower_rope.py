"""Rotations for Ascend: what each becomes, why not, and the numbers."""

from __future__ import annotations

import pytest
import torch
from npu_calls import illegal_calls

from torch_pagoda.passes.graph.fx_nodes import shape, value
from torch_pagoda.passes.lower.npu.call import Call
from torch_pagoda.passes.lower.npu.rope import lower_npu_rope
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.npu.limits import violations

from npu_graphs import lowered, operators, refusals

pagoda = torch.ops.pagoda
BF16 = torch.bfloat16


def tables(tokens, rotary, mode, dtype=BF16, batch=1):
    angle = torch.arange(tokens)[:, None] / 10 ** (torch.arange(rotary // 2) / rotary)
    angle = angle.repeat_interleave(2, -1) if mode == "interleaved" else torch.cat((angle, angle), -1)
    return [f(angle)[None].expand(batch, -1, -1).contiguous().to(dtype) for f in (torch.cos, torch.sin)]


def rotation(mode, start=0):
    def function(m, x, cos, sin):
        q, k = x[:, :, :4].transpose(1, 2), x[:, :, 4:].transpose(1, 2)
        q, k = pagoda.rope([q, k], cos, sin, mode, start, False)
        return torch.cat((q, k), 1).transpose(1, 2)

    return function


HEADS = torch.randn(1, 7, 6, 64, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend910_9382", "Ascend950PR"])
@pytest.mark.parametrize("mode", ["half", "interleaved"])
def test_rotation_of_whole_heads(mode, soc):
    graph, _record = lowered(lower_npu_rope, rotation(mode), HEADS, *tables(7, 64, mode), target=NpuTarget(soc))
    assert [n for n in operators(graph) if n.startswith("npu.")] == ["npu.npu_rotary_mul"] * 2
    calls = [n for n in graph.graph.nodes if "npu_rotary_mul" in str(n.target)]
    for call in calls:
        assert len(shape(call.args[0])) == 4 and shape(call.args[0])[3] == 64
        assert call.args[3] == ("half" if mode == "half" else "interleave")
        # A2 and A3 lose the mode in graphs unless they are given the matrix; 950 knows it.
        assert (call.args[4] is not None) == (mode == "interleaved" and soc != "Ascend950PR")


@pytest.mark.parametrize(("rotary", "start", "parts"), [(32, 0, 2), (32, 32, 2), (16, 8, 3)])
@pytest.mark.parametrize("mode", ["half", "interleaved"])
def test_rotation_of_a_part_of_each_head(rotary, start, parts, mode):
    graph, _ = lowered(lower_npu_rope, rotation(mode, start), HEADS, *tables(7, rotary, mode))
    calls = [n for n in graph.graph.nodes if "npu_rotary_mul" in str(n.target)]
    assert len(calls) == 2 and not {"aten.split_with_sizes", "aten.cat"} & set(operators(graph)[:-1])
    assert all(shape(call.args[0])[3] == shape(call.args[1])[3] == 64 for call in calls)
    (matrix,) = {call.args[4] for call in calls}
    inside = graph.constants[matrix.name].abs().sum(0)
    assert inside.tolist() == [float(start <= i < start + rotary) for i in range(64)]
    target = NpuTarget("Ascend950PR")  # which takes no matrix
    graph, _ = lowered(lower_npu_rope, rotation(mode, start), HEADS, *tables(7, rotary, mode), target=target)
    names = operators(graph)
    assert names.count("aten.split_with_sizes") == names.count("npu.npu_rotary_mul") == 2
    assert {len(n.args[1]) for n in graph.graph.nodes if "split_with_sizes" in str(n.target)} == {parts}


def of_a_product(function):
    """``function`` of a tensor that the graph has made, in place of an input."""

    def whole(m, x, cos, sin):
        return function(m, x * 2, cos, sin)

    return whole


def and_also(reads):
    """A rotation of queries and keys, and what else reads of the same memory: of all of it, of the queries or of the
    keys."""

    def function(m, x, cos, sin):
        whole = x * 2
        q, k = whole[:, :, :4], whole[:, :, 4:]
        rotated = pagoda.rope([q.transpose(1, 2), k.transpose(1, 2)], cos, sin, "half", 0, False)
        return torch.cat(rotated, 1).transpose(1, 2) + reads(whole, q, k)

    return function


def seen_as(view):
    """A rotation of ``view`` of a tensor, which is read again as it was."""

    def function(m, x, cos, sin):
        whole = x * 2
        q, k = view(whole), view(whole * 3)
        rotated = pagoda.rope([q.transpose(1, 2), k.transpose(1, 2)], cos, sin, "half", 0, False)
        return torch.cat(rotated, 1).transpose(1, 2) + whole.sum(2, True)

    return function


def test_queries_and_keys_are_rotated_at_once():
    graph, _ = lowered(lower_npu_rope, of_a_product(rotation("half")), HEADS, *tables(7, 64, "half"))
    assert [n for n in operators(graph) if n.startswith("npu.")] == ["npu.npu_apply_rotary_pos_emb"]


@pytest.mark.parametrize(
    ("function", "dim", "target", "reason"),
    [
        (rotation("half"), 64, None, ""),  # parts of an input
        (and_also(lambda x, q, k: x), 64, None, ""),
        (and_also(lambda x, q, k: x[:, :, 3:5].sum(2, True)), 64, None, ""),  # overlaps both
        (and_also(lambda x, q, k: x[:, :, 5:].sum(2, True)), 64, None, ""),  # a part of the keys
        (and_also(lambda x, q, k: q.sum(2, True)), 64, None, ""),
        (and_also(lambda x, q, k: k.sum(2, True)), 64, None, ""),  # as values, for instance
        (and_also(lambda x, q, k: x.transpose(1, 2)[:, 4:].sum(1).unsqueeze(2)), 64, None, ""),
        (seen_as(lambda x: x[:, :, :4]), 64, None, ""),
        (seen_as(lambda x: x.as_strided(x.size(), x.stride())), 64, None, ""),
        (seen_as(lambda x: x.view(torch.int16).view(BF16)), 64, None, ""),
        (of_a_product(rotation("half")), 32, None, "dim -1 of query is 32; it must be 64 or 128"),
        (of_a_product(rotation("half")), 64, NpuTarget(graph_mode="aclgraph"), "it writes into its inputs"),
        (of_a_product(rotation("half")), 64, NpuTarget("Ascend950PR"), "Ascend950PR does not run it"),
        (of_a_product(rotation("interleaved")), 64, None, ""),
    ],
)
def test_what_is_read_again_is_rotated_one_by_one(function, dim, target, reason):
    """The operator writes into its inputs, and so does its kernel here: the numbers tell."""
    mode = "interleaved" if reason == "" and function.__name__ == "whole" else "half"
    inputs = HEADS[..., :dim].contiguous(), *tables(7, dim, mode)
    graph, record = lowered(lower_npu_rope, function, *inputs, target=target)
    assert [n for n in operators(graph) if n.startswith("npu.")] == ["npu.npu_rotary_mul"] * 2
    assert reason in refusals(record)


def a_reader_behind_a_view(traced, rotated):
    """Of queries, as a pass behind the lowering of rotations might leave it."""
    with traced.before(rotated):
        traced.call(torch.ops.aten.neg.default, traced.call(torch.ops.aten.unsqueeze.default, rotated.args[0], 0))


def an_input_of_the_graph(traced, rotated):
    heads = next(node for node in traced.placeholders if len(shape(node)) == 4)
    rotated.args = (rotated.args[0], heads, *rotated.args[2:])


@pytest.mark.parametrize("spoil", [a_reader_behind_a_view, an_input_of_the_graph])
def test_a_call_that_writes_into_what_others_read_is_found(spoil):
    graph, _ = lowered(lower_npu_rope, of_a_product(rotation("half")), HEADS, *tables(7, 64, "half"))
    (rotated,) = (n for n in graph.graph.nodes if "npu_apply_rotary_pos_emb" in str(n.target))
    spoil(graph, rotated)
    (found,) = illegal_calls(graph, graph.npu)
    assert "which others read" in found


@pytest.mark.parametrize(("heads", "dtype", "fits"), [(76, BF16, True), (77, BF16, False), (77, torch.float16, True)])
def test_heads_of_a_token_fit_the_unified_buffer(heads, dtype, fits):
    x, table = (torch.empty(1, 5, n, 128, dtype=dtype, device="meta") for n in (heads - 1, 1))
    call = Call.make(torch.ops.npu.npu_apply_rotary_pos_emb.default, NpuTarget(), x, table, table, table)
    assert bool(violations(call)) is not fits


def test_pairs_to_halves_has_an_operator_of_its_own():
    mode = "interleaved_to_half"
    graph, _ = lowered(lower_npu_rope, rotation(mode), HEADS, *tables(7, 64, mode))
    assert [n for n in operators(graph) if n.startswith("npu.")] == ["npu.npu_interleave_rope"] * 2


@pytest.mark.parametrize(
    ("rotary", "soc", "reason"),
    [
        (32, "Ascend910B3", "dim -1 of x is 32; it must be 64"),
        (64, "Ascend950PR", "Ascend950PR does not run it"),
    ],
)
@pytest.mark.parametrize("graph_mode", ["ge", "aclgraph"])
@pytest.mark.parametrize("batch", [1, 3])
def test_pairs_to_halves_is_a_copy_elsewhere(batch, graph_mode, rotary, soc, reason):
    x = HEADS[..., :rotary].expand(batch, -1, -1, -1).contiguous()
    mode, target = "interleaved_to_half", NpuTarget(soc, graph_mode=graph_mode)
    inputs = x, *tables(7, rotary, mode, batch=batch)
    graph, record = lowered(lower_npu_rope, rotation(mode), *inputs, target=target)
    assert [n for n in operators(graph) if n.startswith("npu.")] == ["npu.npu_rotary_mul"] * 2
    assert not {"aten.mul", "aten.add"} & set(operators(graph)) and reason in refusals(record)


@pytest.mark.parametrize(
    ("mode", "rotary", "soc", "reason"),
    [
        ("interleaved", 64, "Ascend310P3", "has no bfloat16"),
    ],
)
def test_rotations_without_an_operator(mode, rotary, soc, reason):
    _graph, record = lowered(lower_npu_rope, rotation(mode), HEADS, *tables(7, rotary, mode), target=NpuTarget(soc))
    assert reason in refusals(record)
    assert bool(refusals(record)) == bool(reason)


def test_tables_are_cast_because_the_graph_engine_does_not():
    graph, _ = lowered(lower_npu_rope, rotation("half"), HEADS, *tables(7, 64, "half", torch.float32))
    assert operators(graph).count("aten._to_copy") == 4


def test_tables_of_each_batch_entry():
    x = HEADS.expand(3, -1, -1, -1).contiguous()
    graph, _ = lowered(lower_npu_rope, rotation("half"), x, *tables(7, 64, "half", batch=3))
    assert "npu.npu_rotary_mul" in operators(graph)
    graph, record = lowered(lower_npu_rope, rotation("interleaved"), x, *tables(7, 64, "interleaved", batch=3))
    assert not [n for n in operators(graph) if n.startswith("npu.")]
    assert "one table serves the whole batch" in refusals(record)


@pytest.mark.parametrize("mode", ["ge", "aclgraph"])
def test_pairs_to_halves_of_a_batch_is_copied_where_calls_are_captured(mode):
    x = HEADS.expand(3, -1, -1, -1).contiguous()
    kind = "interleaved_to_half"
    graph, record = lowered(
        lower_npu_rope, rotation(kind), x, *tables(7, 64, kind, batch=3), target=NpuTarget(graph_mode=mode)
    )
    calls = [n for n in graph.graph.nodes if "npu_interleave_rope" in str(n.target)]
    assert len(calls) == 2 and not refusals(record)
    assert all(value(call.args[0]).is_contiguous() for call in calls) == (mode == "aclgraph")
