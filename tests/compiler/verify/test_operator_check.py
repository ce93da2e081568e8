"""Single calls of lowered graphs on a "device" that makes mistakes, beside the CPU's semantics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from torch_pagoda.npu_tools.selftest.operator_check import (
    LIMITS,
    Collected,
    Collector,
    OperatorCall,
    difference_of,
    on_device,
    run_call,
)
from torch_pagoda.runtime.ops import npu  # noqa: F401  registers the operators

CPU = torch.device("cpu")


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_number_is_wrong_beyond_the_limit_of_its_dtype(dtype: torch.dtype) -> None:
    right = rows(6, 64, dtype=dtype)
    limit = LIMITS[dtype] * (right[2, 5].abs().double() + right[2].double().square().mean().sqrt())
    for factor, is_right in ((0.5, True), (2.0, False)):
        found = right.double()
        found[2, 5] += factor * limit
        difference = difference_of(found.to(dtype), right)
        assert (difference.reason == "") is is_right
        # Half precision rounds what was added.
        assert difference.of_limit == pytest.approx(factor, rel=0.45) and difference.where == "[2, 5]"
    assert "at [2, 5]" in difference.reason and "0.26 % of the entries" in difference.reason


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda x: x[[1, 0, 2, 3]], "50 % of the entries beyond"),
        (lambda x: x.index_fill(0, torch.tensor([3]), math.nan), "is not a number at [3, 0] (nan"),
        (lambda x: x.index_fill(0, torch.tensor([3]), math.inf), "is not a number at [3, 0] (inf"),
        (lambda x: x.float(), "the result is float32[4, 64], expected bfloat16[4, 64]"),
        (lambda x: x[:2], "the result is bfloat16[2, 64], expected bfloat16[4, 64]"),
        (lambda x: torch.zeros_like(x), "exceed the limit"),
    ],
)
def test_mistakes_are_named(spoil: Callable[[torch.Tensor], torch.Tensor], words: str) -> None:
    right = rows(4, 64)
    assert difference_of(right.clone(), right) == difference_of(right, right)
    assert difference_of(right, right).reason == ""
    wrong = difference_of(spoil(right), right)
    share = float(wrong.reason.split(", ")[-1].split(" %")[0]) if "50 %" in words else 0
    assert words in wrong.reason or share > 45, wrong.reason


def test_integers_are_equal_and_rounded_ones_are_neighbors() -> None:
    rounded = torch.tensor([[-128, 3, 127]], dtype=torch.int8)
    assert not difference_of(torch.tensor([[-127, 2, 127]], dtype=torch.int8), rounded).reason
    assert difference_of(torch.tensor([[-126, 3, 127]], dtype=torch.int8), rounded).reason
    indices = torch.tensor([[4, 5]])
    assert not difference_of(indices.clone(), indices).reason
    assert "differs by 1 at [0, 1] (6, expected 5)" in difference_of(indices + torch.tensor([[0, 1]]), indices).reason
    flags = torch.tensor([True, False])
    assert difference_of(~flags, flags).reason and not difference_of(flags, flags).reason


def test_what_the_cpu_leaves_undefined_may_be_anything_and_infinities_are_compared() -> None:
    right = torch.tensor([[1.0, math.nan, -math.inf]])
    assert not difference_of(torch.tensor([[1.0, 7.0, -math.inf]]), right).reason
    assert difference_of(torch.tensor([[1.0, 7.0, 0.0]]), right).reason


def test_copies_have_the_same_strides() -> None:
    x = rows(3, 8, 4)
    views = (x.transpose(0, 2), x[:, ::2], x[:, 1:5].transpose(0, 1), x[:1].expand(5, 8, 4), x[0, 0, 0])
    for view in views:
        copy = on_device(view, "cpu")
        assert copy.stride() == view.stride() and torch.equal(copy, view)
        assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


# A graph


def graph() -> fx.GraphModule:
    """``topk(rms_norm(swiglu(x) @ w.T))``, with a cache that is written."""
    made = fx.Graph()
    x, weight, gamma, cache, slots = (made.placeholder(name) for name in ("x", "weight", "gamma", "cache", "slots"))
    call = made.call_function
    gated = call(torch.ops.npu.npu_swiglu.default, (x,))
    product = call(torch.ops.npu.npu_linear.default, (gated, weight))
    again = call(torch.ops.npu.npu_linear.default, (product, weight))
    norm = call(torch.ops.npu.npu_rms_norm.default, (again, gamma))
    import operator

    normed = call(operator.getitem, (norm, 0))
    call(torch.ops.npu.npu_scatter_nd_update_.default, (cache, slots, normed))
    best = call(torch.ops.aten.topk.default, (normed, 2))
    made.output((call(operator.getitem, (best, 0)), call(operator.getitem, (best, 1))))
    module = fx.GraphModule(torch.nn.Module(), made)
    inputs = graph_inputs()
    for node in made.nodes:  # as the capture records it
        if node.op == "placeholder":
            node.meta["example_value"] = inputs[node.name]
    interpreter = _Noting(module)
    interpreter.run(*inputs.values())
    return module


class _Noting(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        n.meta["example_value"] = super().run_node(n)
        return n.meta["example_value"]


def graph_inputs() -> dict[str, torch.Tensor]:
    return {
        "x": rows(5, 64),
        "weight": rows(32, 32),
        "gamma": rows(32),
        "cache": torch.zeros(9, 32, dtype=torch.bfloat16),
        "slots": torch.tensor([[7], [0], [3], [1], [2]]),
    }


def collected() -> list[OperatorCall]:
    inputs, found = graph_inputs(), Collected()
    with torch.inference_mode():
        Collector(graph(), found, [inputs["weight"], inputs["gamma"]], "5 tokens").run(*inputs.values())
    return [call for call, _ in found.calls()]


def test_calls_are_kept_first_and_last_of_a_kind_with_what_they_got_and_yielded() -> None:
    calls = collected()
    assert [(call.operator, call.which) for call in calls] == [
        ("npu_swiglu", "first"),
        ("npu_linear", "first"),
        ("npu_linear", "last"),
        ("npu_rms_norm", "first"),
        ("npu_scatter_nd_update_", "first"),
        ("aten.topk", "first"),
    ]
    assert calls[1].args[1] is calls[2].args[1], "weights are not copied"
    assert list(calls[3].expected) == [0], "nothing reads the reciprocal deviation"
    scatter = calls[4]
    assert not scatter.args[0].any() and next(iter(scatter.written.values()))[7].any(), (
        "the cache as it was, and as it has to be"
    )
    assert calls[1].name == "npu_linear(bfloat16[5, 32], bfloat16[32, 32]), 5 tokens, first"
    for call in calls:
        difference, seconds = run_call(call, CPU, lambda function: function())
        assert difference.reason == "" and difference.of_limit == 0 and seconds > 0


def off(results: Any, args: Any) -> Any:
    """The first number is off by twice the limit."""
    first = results[0] if isinstance(results, tuple) else results
    row = first[0].float()
    first[0, 0] += (2.4 * LIMITS[first.dtype] * (row[0].abs() + row.square().mean().sqrt())).to(first.dtype)
    return results


def swapped(results: Any, args: Any) -> Any:
    first = results[0] if isinstance(results, tuple) else results
    first[:2] = first[:2].flip(0)
    return results


def nan(results: Any, args: Any) -> Any:
    (results[0] if isinstance(results, tuple) else results)[-1, -1] = math.nan
    return results


def elsewhere(results: Any, args: Any) -> Any:
    """A row of the cache goes to another slot."""
    args[0][4] = args[0][7]
    return results


@pytest.mark.parametrize(
    ("operator", "mistake", "words"),
    [
        *(
            (name, spoil, "result")
            for name in ("npu_swiglu", "npu_linear", "npu_rms_norm")
            for spoil in (off, swapped)
        ),
        ("npu_linear", nan, "result is not a number at [4, 31]"),
        ("npu_scatter_nd_update_", elsewhere, "differs by"),
        ("aten.topk", swapped, "result 0"),
    ],
)
def test_a_bent_operator_is_found(operator: str, mistake: Callable[[Any, Any], Any], words: str) -> None:
    for call in collected():

        def run(function: Callable[[], Any], call: OperatorCall = call) -> Any:
            results = function()
            given = function.__closure__ and [cell.cell_contents for cell in function.__closure__]
            args = next(each for each in given or [] if isinstance(each, tuple) and len(each) == len(call.args))
            return mistake(results, args) if call.operator == operator else results

        difference, _ = run_call(call, CPU, run)
        assert bool(difference.reason) is (call.operator == operator), call.name
        if difference.reason:
            assert words in difference.reason and difference.of_limit > 1


def test_of_equal_entries_either_may_be_chosen() -> None:
    scores = torch.tensor([[0.5, 2.0, 2.0, 1.0]])
    call = OperatorCall(
        target=torch.ops.aten.topk.default,
        args=(scores, 1),
        kwargs={},
        expected={0: torch.tensor([[2.0]]), 1: torch.tensor([[1]])},
        written={},
        step="",
    )
    for index, is_right in ((1, True), (2, True), (3, False), (0, False), (7, False)):
        found = (torch.tensor([[2.0]]), torch.tensor([[index]]))
        difference, _ = run_call(call, CPU, lambda function, found=found: found)  # type: ignore[misc]
        assert (difference.reason == "") is is_right, index


def test_one_of_equal_entries_cannot_be_chosen_twice() -> None:
    call = OperatorCall(
        target=torch.ops.aten.topk.default,
        args=(torch.tensor([[0.5, 2.0, 2.0, 1.0]]), 2),
        kwargs={},
        expected={0: torch.tensor([[2.0, 2.0]]), 1: torch.tensor([[1, 2]])},
        written={},
        step="",
    )
    for indices, is_right in (([1, 2], True), ([2, 1], True), ([1, 1], False), ([2, 2], False)):
        found = (torch.tensor([[2.0, 2.0]]), torch.tensor([indices]))
        difference, _ = run_call(call, CPU, lambda function, found=found: found)  # type: ignore[misc]
        assert (difference.reason == "") is is_right, indices


def test_devices_of_arguments_are_replaced() -> None:
    call = OperatorCall(
        target=torch.ops.aten.arange.default,
        args=(4,),
        kwargs={"device": torch.device("cpu")},
        expected={0: torch.arange(4)},
        written={},
        step="",
    )
    asked: list[Any] = []

    def run(function: Callable[[], Any]) -> Any:
        asked.append(next(c.cell_contents for c in function.__closure__ or () if isinstance(c.cell_contents, dict)))
        return torch.arange(4)

    run_call(call, torch.device("meta"), run)
    assert asked[0]["device"] == torch.device("meta")


def indexed(spoil: Any) -> str:
    """The difference that is seen where a device chose other keys."""
    call = torch.ops.npu.npu_lightning_indexer.default
    query, weights, cache = rows(5, 8, 128), rows(5, 8).abs(), rows(4, 16, 1, 128)
    cache[2, 3] = cache[2, 2]  # tokens 3 and 2 of the first sequence, and of the second none
    cache[1, 9:] = 0  # never written
    kwargs = {
        "actual_seq_lengths_query": torch.tensor([4, 5], dtype=torch.int32),
        "actual_seq_lengths_key": torch.tensor([20, 9], dtype=torch.int32),
        "block_table": torch.tensor([[2, 0], [1, 3]], dtype=torch.int32),
        **{"layout_query": "TND", "layout_key": "PA_BSND", "sparse_count": 12, "sparse_mode": 3},
    }
    expected, _ = call(query, cache, weights, **kwargs)

    made = OperatorCall(call, (query, cache, weights), kwargs, {0: expected}, {}, "")
    found = spoil(expected.clone()), cache.new_empty(0)
    return run_call(made, CPU, lambda function: found)[0].reason


def exchanged(chosen: torch.Tensor, a: int, b: int) -> torch.Tensor:
    """Places ``a`` and ``b`` in the place of each other, as a device may where they score alike."""
    return chosen.where((chosen != a) & (chosen != b), a + b - chosen)


def test_of_keys_that_score_alike_either_may_be_chosen_in_any_order() -> None:
    def alike(chosen: torch.Tensor) -> torch.Tensor:
        return torch.cat((exchanged(chosen[:4], 2, 3), chosen[4:]))

    assert indexed(lambda chosen: chosen) == indexed(alike) == ""
    assert indexed(lambda chosen: torch.cat((chosen[..., :9].flip(-1), chosen[..., 9:]), -1)) == ""
    assert indexed(lambda chosen: exchanged(chosen, 5, 19)) != ""
    assert indexed(lambda chosen: torch.cat((chosen[:4].where(chosen[:4] != 3, 2), chosen[4:]))) != "", (
        "one key twice"
    )
    assert indexed(lambda chosen: chosen.roll(1, 0)) != ""
    assert indexed(lambda chosen: chosen.where(chosen >= 0, 0)) != "", "a key that there is not"
    others = torch.arange(12, dtype=torch.int32)
    assert indexed(lambda chosen: chosen.where(chosen >= 0, others)) != "", "keys that there are not, each once"
    assert indexed(lambda chosen: chosen + 40) != ""
