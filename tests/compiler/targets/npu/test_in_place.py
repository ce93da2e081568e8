"""Cache writes that AOTAutograd made functional become writes in place again, and only where that is the same."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators
from torch_pagoda.compiler.targets.npu.in_place import write_in_place, write_rows_in_place

npu, aten = torch.ops.npu, torch.ops.aten
FUNCTIONAL, DIRECT = npu.npu_scatter_pa_kv_cache_functional.default, npu.npu_scatter_pa_kv_cache.default


def graph_of(function) -> fx.GraphModule:
    return fx.GraphModule(torch.nn.Module(), fx.Tracer().trace(function))


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    rows, caches = torch.randn(3, 2, 128), [torch.zeros(2, 16, 2, 128), torch.ones(2, 16, 2, 128)]
    return [rows, *caches, torch.tensor([17, 3, 30])]


def written(rows, keys, values, slots):
    results = FUNCTIONAL(rows, rows, keys, values, slots, cache_mode="Norm")
    out = aten.add.Tensor(results[0], results[1])
    return out, aten.copy_.default(keys, results[0]), aten.copy_.default(values, results[1])


def test_a_write_goes_into_the_cache():
    gm, given, expected = graph_of(written), inputs(), inputs()
    results = gm(*expected)
    write_in_place(gm)
    assert targets(gm) == ["npu.npu_scatter_pa_kv_cache.default", "aten.add.Tensor"]
    found = gm(*given)
    assert all(torch.equal(a, b) for a, b in zip(found, results, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    assert found[1] is given[1] and found[2] is given[2]


def test_twice_is_once():
    gm = graph_of(written)
    write_in_place(gm, None, None)
    code = gm.code
    write_in_place(gm)
    assert gm.code == code


def read_before(rows, keys, values, slots):
    first = aten.sum.default(keys)
    results = FUNCTIONAL(rows, rows, keys, values, slots, cache_mode="Norm")
    return first, aten.copy_.default(keys, results[0]), aten.copy_.default(values, results[1])


def read_afterwards(rows, keys, values, slots):
    results = FUNCTIONAL(rows, rows, keys, values, slots, cache_mode="Norm")
    old = aten.sum.default(keys)
    return old, aten.copy_.default(keys, results[0]), aten.copy_.default(values, results[1])


def kept(rows, keys, values, slots):
    results = FUNCTIONAL(rows, rows, keys, values, slots, cache_mode="Norm")
    return results[0], aten.copy_.default(values, results[1])


def swapped(rows, keys, values, slots):
    results = FUNCTIONAL(rows, rows, keys, values, slots, cache_mode="Norm")
    return aten.copy_.default(keys, results[1]), aten.copy_.default(values, results[0])


def of_a_view(rows, keys, values, slots):
    view = aten.clone.default(keys)
    results = FUNCTIONAL(rows, rows, view, values, slots, cache_mode="Norm")
    return aten.copy_.default(keys, results[0]), aten.copy_.default(values, results[1])


def twice(rows, keys, values, slots):
    first = FUNCTIONAL(rows, rows, keys, values, slots, cache_mode="Norm")
    second = FUNCTIONAL(rows, rows, first[0], first[1], slots, cache_mode="Norm")
    return aten.copy_.default(keys, second[0]), aten.copy_.default(values, second[1])


def one_cache(rows, keys, values, slots):
    results = FUNCTIONAL(rows, rows, keys, keys, slots, cache_mode="Norm")
    return aten.copy_.default(keys, results[0]), aten.copy_.default(keys, results[1])


@pytest.mark.parametrize("function", [read_afterwards, kept, swapped, of_a_view, twice, one_cache])
def test_what_is_not_the_same_stays(function):
    gm, given, expected = graph_of(function), inputs(), inputs()
    before = targets(gm)
    gm(*expected)
    write_in_place(gm)
    assert targets(gm) == before
    gm(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


def test_what_reads_the_cache_before_keeps_its_place():
    gm, given, expected = graph_of(read_before), inputs(), inputs()
    results = gm(*expected)
    write_in_place(gm)
    assert targets(gm) == ["aten.sum.default", "npu.npu_scatter_pa_kv_cache.default"]
    found = gm(*given)
    assert all(torch.equal(a, b) for a, b in zip((*found, *given), (*results, *expected), strict=True))


def test_operators_without_a_direct_form_stay():
    def functional(x):
        return npu.npu_swiglu.default(x, -1)

    gm = graph_of(functional)
    write_in_place(gm)
    assert targets(gm) == ["npu.npu_swiglu.default"]


ROWS = npu.npu_scatter_nd_update.default


def rows_read_first(pool, read, write):
    rows = aten.index_select.default(pool, 0, read)
    written = ROWS(pool, write, rows + 1)
    return aten.sum.default(written), aten.copy_.default(pool, written)


def rows_read_afterwards(pool, read, write):
    written = ROWS(pool, write, aten.index_select.default(pool, 0, read) + 1)
    return aten.index_select.default(pool, 0, read), aten.copy_.default(pool, written)


def rows_of_another_pool(pool, read, write):
    written = ROWS(aten.clone.default(pool), write, aten.index_select.default(pool, 0, read) + 1)
    return written, aten.copy_.default(pool, written)


def rows_twice(pool, read, write):
    first = ROWS(pool, write, aten.index_select.default(pool, 0, read) + 1)
    second = ROWS(first, write, aten.index_select.default(first, 0, read) + 1)
    return aten.sum.default(second), aten.copy_.default(pool, second)


def pool() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(5, 3, 4), torch.tensor([1, 4]), torch.tensor([[0], [1]])]


@pytest.mark.parametrize("rewrite", [write_in_place, write_rows_in_place])
def test_rows_of_a_pool_are_written_where_they_lie(rewrite):
    gm, given, expected = graph_of(rows_read_first), pool(), pool()
    results = gm(*expected)
    rewrite(gm)
    assert targets(gm)[-1] == "aten.sum.default" and "npu.npu_scatter_nd_update_.default" in targets(gm)
    assert not {"npu.npu_scatter_nd_update.default", "aten.copy_.default"} & set(targets(gm))
    reader = next(node for node in gm.graph.nodes if node.target is aten.sum.default)
    assert reader.args[0].target is npu.npu_scatter_nd_update_.default, "nothing else orders it behind the write"
    found = gm(*given)
    assert all(torch.equal(a, b) for a, b in zip((*found, *given), (*results, *expected), strict=True))
    assert found[1] is given[0]


@pytest.mark.parametrize("function", [rows_read_afterwards, rows_of_another_pool, rows_twice])
def test_rows_that_have_to_be_copied_stay(function):
    gm, given, expected = graph_of(function), pool(), pool()
    results = gm(*expected)
    before = targets(gm)
    write_rows_in_place(gm)
    assert targets(gm) == before
    found = gm(*given)
    assert all(torch.equal(a, b) for a, b in zip((*found, *given), (*results, *expected), strict=True))
