"""Rows of products of int8 by 4 bits, which the vendor's operator changes: nothing else reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from quantized_graphs import nodes_of, stored

from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.lower.npu.experts.rows_in_place import check_rows_read_once

PRODUCT = torch.ops.npu.npu_grouped_matmul


def nothing(graph: TracedGraph, product: torch.fx.Node) -> None:
    pass


def another_product(graph: TracedGraph, product: torch.fx.Node) -> None:
    graph.call(PRODUCT.default, *product.args, **product.kwargs)


def a_reader_behind_a_view(graph: TracedGraph, product: torch.fx.Node) -> None:
    view = graph.call(torch.ops.aten.view.default, product.args[0][0], [-1])  # type: ignore[index]
    graph.call(torch.ops.aten.neg.default, view)


@pytest.mark.parametrize("spoil", [nothing, another_product, a_reader_behind_a_view])
def test_another_reader_is_noticed(spoil: Callable[[TracedGraph, torch.fx.Node], None]) -> None:
    _, traced, _ = stored("qwen3_moe", "slim-w4a8-experts")
    graph = traced.copy()
    product = nodes_of(graph, PRODUCT)[-1]
    with graph.before(product):
        spoil(graph, product)
    if spoil is nothing:
        check_rows_read_once(graph)
    else:
        with pytest.raises(
            ValueError, match=r"npu_grouped_matmul\S* changes its rows .* in place, and .* reads them"
        ):
            check_rows_read_once(graph)
