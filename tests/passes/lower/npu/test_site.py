"""Formulas inserted as ATen operators: sizes stay symbolic, and nothing is written in place."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import run_graph

from torch_pagoda.passes import PassRecord
from torch_pagoda.passes.lower.npu.site import Site

from npu_graphs import graph_of

X = torch.randn(2, 5, 8)


@pytest.mark.parametrize("is_its_own", [True, False])
def test_a_formula_does_not_write_into_a_tensor_of_its_own(is_its_own):
    """Nodes stand for what operators yield: a view that was taken before the write would go without it."""
    graph = graph_of(lambda m, x: torch.sigmoid(x), X)
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default)
    (x,) = node.all_input_nodes

    def formula(tensor):
        return (tensor.clone() if is_its_own else tensor).mul_(2.0)

    with graph.graph.inserting_before(node):
        site = Site(graph, node, PassRecord("formula"))
        if is_its_own:
            with pytest.raises(ValueError, match=r"mul_.* writes into a tensor that the function made"):
                site.inline(formula, x)
        else:
            assert site.inline(formula, x).target is torch.ops.aten.mul_.Tensor


@pytest.mark.parametrize("has_python", [True, False])
def test_sizes_stay_symbolic_inside_composite_operators(has_python):
    """Kernels of composite operators may ask for sizes as numbers, as torch 2.12's matmul does; Python's do not."""
    with torch.library._scoped_library("pagoda_test_sizes", "DEF") as library:
        library.define("product(Tensor a, Tensor b) -> Tensor")
        library.impl("product", lambda a, b: torch.bmm(a.expand(*map(int, a.shape)), b), "CompositeImplicitAutograd")
        product = torch.ops.pagoda_test_sizes.product.default
        if has_python:
            product.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(
                lambda a, b: torch.bmm(a.expand(*a.shape), b)
            )
        graph = graph_of(lambda m, x: torch.sigmoid(x), X)
        (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default)
        (x,) = node.all_input_nodes
        with graph.before(node):
            site = Site(graph, node, PassRecord("formula"))
            if has_python:
                site.replace(site.inline(lambda a: product(product(a, a.transpose(1, 2)), a), x))
            else:
                with pytest.raises(ValueError, match=r"takes sizes that vary for numbers: \{s\d+: \d+\}"):
                    site.inline(lambda a: product(a, a.transpose(1, 2)), x)
                return
    graph.recompile()
    longer = torch.randn(2, 9, 8)
    torch.testing.assert_close(run_graph(graph, longer), longer @ longer.transpose(1, 2) @ longer)
