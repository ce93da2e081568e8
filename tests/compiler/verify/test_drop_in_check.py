"""What the drop-in's comparison of two graphs accepts, and the mistakes that it must find."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_pagoda.compiler import pass_runs
from torch_pagoda.compiler.verify.drop_in_check import difference

from tiny_models import build_tiny_model

HALF_AND_SINGLE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def graph_of(function, *inputs):
    graph = make_fx(function)(*[x.clone() for x in inputs])
    for node in graph.graph.nodes:
        node.meta["example_value"] = node.meta.get("val")
    return graph


@pytest.fixture
def rows():
    """``[1, 20, 8]``."""
    return torch.randn(1, 20, 8, generator=torch.Generator().manual_seed(0))


@HALF_AND_SINGLE
def test_the_same_function_spelled_otherwise_is_accepted(dtype, rows):
    x = rows.to(dtype)
    one = graph_of(lambda x: ((x * 0.3) @ x.transpose(1, 2),), x)
    other = graph_of(lambda x: ((x @ x.transpose(1, 2)) * 0.3,), x)
    assert difference(one, other, [x]) == ""


@HALF_AND_SINGLE
def test_what_bfloat16_would_hide_is_found(dtype, rows):
    """A factor of 1.003 is less than one step of bfloat16."""
    x = rows.to(dtype)
    right = graph_of(lambda x: (x.sigmoid() * 0.7,), x)
    wrong = graph_of(lambda x: (x.sigmoid() * 0.7021,), x)
    found = difference(right, wrong, [x])
    assert "its outputs differ" in found
    assert found.startswith("in float32 ") is (dtype is torch.bfloat16)


@HALF_AND_SINGLE
def test_what_is_written_into_an_input_counts(dtype, rows):
    x, cache = rows.to(dtype), torch.zeros(1, 20, 8, dtype=dtype)
    right = graph_of(lambda x, cache: (cache.copy_(x).sum(-1),), x, cache)
    wrong = graph_of(lambda x, cache: (cache.copy_(x).sum(-1), cache.mul_(1.01))[:1], x, cache)
    assert "its outputs differ" in difference(right, wrong, [x, cache])
    assert difference(right, right, [x, cache]) == ""
    assert not cache.any(), "the caller's cache is untouched"


@HALF_AND_SINGLE
def test_an_infinite_mask_that_is_only_read_is_no_difference(dtype, rows):
    x = rows.to(dtype)
    mask = torch.full((8, 8), float("-inf"), dtype=dtype).triu(1)
    right = graph_of(lambda x, mask: ((0.1 * (x.transpose(1, 2) @ x) + mask).softmax(-1),), x, mask)
    wrong = graph_of(lambda x, mask: ((0.102 * (x.transpose(1, 2) @ x) + mask).softmax(-1),), x, mask)
    assert difference(right, right, [x, mask]) == ""
    assert "its outputs differ" in difference(right, wrong, [x, mask])


def routed(x):
    """Depends on which expert is first, as a router's decision does."""
    return x + (x.topk(1).indices > 3).to(x.dtype)


@HALF_AND_SINGLE
def test_no_row_is_excused_though_tokens_are_routed(dtype, rows):
    """In float32 a router does not flip."""
    x = rows.to(dtype)

    def wrong(x):
        changed = routed(x).clone()
        changed[0, 7] = 9.0
        return (changed,)

    right = graph_of(lambda x: (routed(x),), x)
    assert difference(right, right, [x]) == ""
    assert "its outputs differ" in difference(right, graph_of(wrong, x), [x])


def test_what_a_kernel_does_in_bfloat16_only_is_found(rows):
    """In float32 both graphs are the same."""
    x = rows.to(torch.bfloat16)
    right = graph_of(lambda x: (x.exp(),), x)
    wrong = graph_of(lambda x: (x.exp().clone(),), x)
    (clone,) = [n for n in wrong.graph.nodes if n.target is torch.ops.aten.clone.default]
    clone.target = lambda y: y * 1.5 if y.dtype is torch.bfloat16 else y
    wrong.recompile()
    found = difference(right, wrong, [x])
    assert "its outputs differ" in found and "float32" not in found


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_found(value, rows):
    x = rows.to(torch.bfloat16)
    right = graph_of(lambda x: (x * 2,), x)
    wrong = graph_of(lambda x: (torch.where(x > 2, value, x * 2),), x)
    assert "inf" in difference(right, wrong, [x])


@HALF_AND_SINGLE
def test_a_wrong_scale_is_not_used(dtype, monkeypatch, caplog):
    """2 % are less than what rounding to bfloat16 does to the logits."""
    run = pass_runs.run_passes

    def with_wrong_scale(traced, passes):
        records = run(traced, passes)
        for node in traced.graph.nodes:
            if node.target is torch.ops.pagoda.attention.default and passes[0].name == "recognize_sdpa":
                place = next(i for i, x in enumerate(node.args) if isinstance(x, float))
                node.args = (*node.args[:place], node.args[place] * 1.02, *node.args[place + 1 :])
        return records

    monkeypatch.setattr(pass_runs, "run_passes", with_wrong_scale)
    torch._dynamo.reset()
    model = build_tiny_model("llama").to(dtype)
    for layer in model.model.layers:  # attention that looks somewhere
        layer.self_attn.q_proj.weight.data *= 8
        layer.self_attn.k_proj.weight.data *= 8
    ids = torch.randint(3, 200, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.compile(model, backend="pagoda", options={"codegen": "none"})(ids)
    assert "the rewritten graph is not used" in caplog.text
