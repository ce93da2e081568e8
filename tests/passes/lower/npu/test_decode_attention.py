"""The kernel in place of the formula over int8 caches, in steps of one token per sequence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from torch_pagoda.compiler.costs.flops import flops
from torch_pagoda.compiler.costs.traffic import Step
from torch_pagoda.compiler.targets.npu.decode_steps import DecodeCalls
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.fx_nodes import shape
from torch_pagoda.passes.lower.npu.attention import decode_attention
from torch_pagoda.passes.lower.npu.attention.attention_routes import Heads
from torch_pagoda.passes.lower.npu.attention.paged_attention import lower_npu_paged_attention
from torch_pagoda.passes.lower.npu.call import Call
from torch_pagoda.passes.lower.npu.decode_graph import decode_graph
from torch_pagoda.passes.rewrite.share_subexpressions import share_subexpressions
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.npu.limits import violations
from torch_pagoda.runtime.window_blocks import window_blocks

from npu_graphs import AttentionGraph, assert_legal, operators, refusals

KERNEL = torch.ops.npu.npu_fused_infer_attention_score.default
STEPS = [[30, 1, 17], [1, 1, 1], [1, 0, 1], [2, 9, 0], [1, 1, 1], [0, 1, 0]]
DECODE = [1, 2, 4, 5]


def target(block_size: int = 32, **options: Any) -> NpuTarget:
    return NpuTarget(block_size=block_size, float32_as=torch.bfloat16, **options)


def lowered(*shape: int, at: NpuTarget | None = None, **options: Any) -> tuple[AttentionGraph, str]:
    options = {"dtype": torch.float32, **options}
    graph = AttentionGraph(*shape, cache_dtype=torch.int8, target=at or target(), **options)
    record = lower_npu_paged_attention(graph.traced)
    assert_legal(graph.traced)
    return graph, refusals(record)


def by_both(graph: AttentionGraph, decode: Any = None) -> list[torch.Tensor]:
    decode = decode or decode_graph(graph.traced)
    assert decode is not None
    graph.traced.recompile()
    return graph.run(STEPS, by=DecodeCalls(graph.traced, decode, decode.module, graph.traced.module))


def right(*shape: int, at: NpuTarget | None = None, **options: Any) -> list[torch.Tensor]:
    options = {"dtype": torch.float32, **options}
    return AttentionGraph(*shape, cache_dtype=torch.int8, target=at or target(), **options).run(STEPS)


@pytest.mark.parametrize("mode", ["ge", "aclgraph"])
@pytest.mark.parametrize(
    ("shape", "block_size"),
    [((4, 2, 128), 32), ((8, 1, 64), 64), ((4, 4, 96), 96), ((6, 2, 128), 128), ((2, 1, 256), 512)],
    ids=str,
)
def test_numbers_are_those_of_the_operator(shape, block_size, mode):
    at = target(block_size, graph_mode=mode)
    graph, said = lowered(*shape, at=at)
    assert "decode steps can run by it" in said
    decode = decode_graph(graph.traced)
    assert_legal(decode)
    names = operators(decode)
    assert names.count("npu.npu_fused_infer_attention_score") == 1
    assert not {"aten.index", "aten.bmm", "aten._softmax"} & set(names)
    for found, expected in zip(by_both(graph, decode), right(*shape, at=at), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_layers_that_share_a_cache_all_run_by_the_kernel():
    graph, _ = lowered(4, 2, 128, calls=2)
    decode = decode_graph(graph.traced)
    assert operators(decode).count("npu.npu_fused_infer_attention_score") == 2
    for found, expected in zip(by_both(graph, decode), right(4, 2, 128, calls=2), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ((4, 2, 128), {"sinks": True}, "sinks are for packed layouts, which take no int8 caches"),
        ((4, 2, 128), {"softcap": 20.0}, "it knows no soft cap"),
        ((4, 2, 128), {"alibi": True}, "it knows no ALiBi"),
        ((4, 2, 128), {"chunk": 16}, "it knows no chunks"),
        ((4, 2, 80), {}, "multiples of 32 in int8"),
        ((4, 2, 128, 64), {}, "values of 64 dims beside keys of 128, with paging"),
        ((4, 2, 128), {"at": target(16)}, "blocks of 16 in int8; multiples of 32 up to 512"),
        ((4, 2, 128), {"at": target(544)}, "blocks of 544 in int8; multiples of 32 up to 512"),
        ((4, 2, 128), {"at": NpuTarget(block_size=32)}, "query is torch.float32"),
    ],
    ids=str,
)
def test_other_attention_keeps_the_formula_and_the_layout_of_scales(shape, options, reason):
    graph, said = lowered(*shape, **options)
    assert reason in said
    assert decode_graph(graph.traced) is None
    assert not graph.traced.caches[0].scales_by_head and "kv_lens" not in graph.traced.step_inputs


# Sliding windows


LONG = [[195, 90, 1], [1, 1, 1], [70, 0, 30], [1, 1, 1], [1, 0, 1], [0, 1, 0]]
"""Steps whose sequences pass the windows below by blocks, by less, and not at all."""


def windowed(window: int, block_size: int, mode: str = "ge", **options: Any) -> tuple[AttentionGraph, TracedGraph]:
    graph, said = lowered(4, 2, 128, at=target(block_size, graph_mode=mode), sliding_window=window, **options)
    assert "decode steps can run by it" in said
    decode = decode_graph(graph.traced)
    assert decode is not None
    graph.traced.recompile()
    return graph, decode


def right_of(window: int, block_size: int) -> list[torch.Tensor]:
    graph = AttentionGraph(
        *(4, 2, 128),
        cache_dtype=torch.int8,
        target=target(block_size),
        dtype=torch.float32,
        sliding_window=window,
    )
    return graph.run(LONG)


def run_both(graph: AttentionGraph, decode: TracedGraph, run: Callable[..., Any] | None = None) -> list[torch.Tensor]:
    calls = DecodeCalls(graph.traced, decode, run or decode.module, graph.traced.module)
    return graph.run(LONG, by=calls)


@pytest.mark.parametrize(("context", "keys"), [(100, 100), (4000, 5 * 32)])
def test_work_is_counted_for_the_blocks_that_a_window_touches(context, keys):
    _, decode = windowed(128, 32)
    (node,) = (node for node in decode.graph.nodes if node.target is KERNEL)
    assert flops(decode, [node], Step(1, context, 1)) == 2 * 4 * (128 + 128) * keys


@pytest.mark.parametrize(("longest", "has_mask"), [(None, True), (4097, True), (4096, False), (2048, False)])
def test_a_window_that_no_sequence_passes_is_none(longest, has_mask):
    graph = AttentionGraph(
        4, 2, 128, cache_dtype=torch.int8, target=target(), dtype=torch.float32, sliding_window=4096
    )
    graph.traced.max_positions = longest
    lower_npu_paged_attention(graph.traced)
    decode = decode_graph(graph.traced)
    assert decode is not None
    (node,) = (node for node in decode.graph.nodes if node.target is KERNEL)
    assert (node.kwargs["atten_mask"] is not None) == has_mask
    assert has_mask or node.kwargs["block_table"] is decode.placeholder("block_table")


@pytest.mark.parametrize("mode", ["ge", "aclgraph"])
@pytest.mark.parametrize(
    ("window", "block_size"), [(1, 32), (8, 64), (32, 32), (33, 32), (65, 64), (128, 128), (250, 96), (4096, 128)]
)
def test_windows(window, block_size, mode):
    graph, decode = windowed(window, block_size, mode)
    assert_legal(decode)
    (node,) = (node for node in decode.graph.nodes if node.target is KERNEL)
    assert int(shape(node.kwargs["block_table"])[1]) == -(-(window - 1) // block_size) + 1
    for found, expected in zip(run_both(graph, decode), right_of(window, block_size), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_layers_with_one_window_share_their_blocks_and_their_mask():
    _, decode = windowed(40, 32, calls=3)
    kernels = [node for node in decode.graph.nodes if node.target is KERNEL]
    assert len(kernels) == 3
    for name in ("block_table", "atten_mask", "actual_seq_lengths_kv"):
        assert len({node.kwargs[name] for node in kernels}) == 1
    assert operators(decode).count("aten.gather") == 1


def test_blocks_that_the_window_has_passed_are_not_read():
    """They may be another sequence's, and their table entries none."""
    window, size = 40, 32
    graph, decode = windowed(window, size)
    names = [node.name for node in decode.placeholders]
    passed = []

    def run(*args: Any) -> Any:
        table, lens = args[names.index("block_table")], args[names.index("seq_lens")]
        for row, length in zip(table, lens.tolist(), strict=True):
            row[: max(0, length - window) // size] = -1
            row[-(-length // size) :] = -1
        passed.append(int((table[:, 0] < 0).sum()))
        return decode.module(*args)

    for found, expected in zip(run_both(graph, decode, run), right_of(window, size), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert len(passed) == 4 and max(passed) == 2


def _bent(change: Callable[..., Any]) -> Callable[..., Any]:
    """``window_blocks`` with what it returns changed."""

    def bent(table: Any, lens: Any, window: int, block_size: int) -> Any:
        return change(table, lens, window, block_size, *window_blocks(table, lens, window, block_size))

    return bent


@pytest.mark.parametrize(
    "change",
    [
        lambda table, lens, window, size, part, hidden: (part, torch.zeros_like(hidden)),
        lambda table, lens, window, size, part, hidden: window_blocks(table, lens, window + 1, size),
        lambda table, lens, window, size, part, hidden: window_blocks(table, lens, window - 1, size),
        lambda table, lens, window, size, part, hidden: (table[:, : part.shape[1]], hidden),
        lambda table, lens, window, size, part, hidden: (part, hidden.flip(3)),
        lambda table, lens, window, size, part, hidden: (part, ~hidden),
    ],
    ids=["hides nothing", "a token more", "a token less", "the first blocks", "hides the last", "hides the window"],
)
def test_mutants_of_windows_are_seen(monkeypatch, change):
    monkeypatch.setattr(decode_attention, "window_blocks", _bent(change))
    graph, decode = windowed(40, 32)
    found, expected = run_both(graph, decode), right_of(40, 32)
    wrong = [
        not torch.allclose(a, b, atol=1e-4, rtol=1e-4, equal_nan=True) for a, b in zip(found, expected, strict=True)
    ]
    assert any(wrong[step] for step in (1, 3, 4, 5)) and not wrong[0] and not wrong[2]


def test_mutant_lengths_of_whole_sequences(monkeypatch):
    monkeypatch.setattr(decode_attention, "_lens", lambda traced, window: traced.step_input("kv_lens"))
    graph, decode = windowed(40, 32)
    with pytest.raises(ValueError, match="actual_seq_lengths_kv"):
        run_both(graph, decode)


# Limits


def kernel_call(soc: str = "Ascend910B3", mode: int = 5, **changes: Any) -> list[str]:
    """Why the limits refuse the kernel over int8 caches."""
    blocks, size, heads = 7, 32, Heads(4, 2, 128, 128)
    scale = torch.empty((blocks, 2, size) if mode == 5 else (blocks, size))
    query = changes.pop("query", torch.empty(3, 1, 4 * 128, dtype=torch.bfloat16))
    caches = [torch.empty(blocks, size, heads.kv_heads * heads.key_dim, dtype=torch.int8) for _ in range(2)]
    arguments = {
        "actual_seq_lengths_kv": [3, 4, 5],
        "key_antiquant_scale": scale,
        "value_antiquant_scale": scale,
        "key_antiquant_mode": mode,
        "value_antiquant_mode": mode,
        "block_table": torch.empty(3, 2, dtype=torch.int32),
        "block_size": size,
        "num_heads": heads.heads,
        "num_key_value_heads": heads.kv_heads,
        "input_layout": "BSH",
        **changes,
    }
    return violations(Call.make(KERNEL, NpuTarget(soc, size), query, *caches, **arguments))


@pytest.mark.parametrize("soc", ["Ascend910B1", "Ascend910_9391"])
@pytest.mark.parametrize("mode", [4, 5])
def test_chips_whose_documents_name_scales_in_blocks(soc, mode):
    assert kernel_call(soc, mode) == []
    assert kernel_call(soc, mode, atten_mask=torch.empty(3, 1, 1, 64, dtype=torch.bool)) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"soc": "Ascend950PR"}, "no document says that Ascend950PR reads"),
        ({"soc": "Ascend310P3"}, "Ascend310P3 does not run it"),
        ({"mode": 5, "value_antiquant_mode": 4}, r"modes \[4, 5\]"),
        ({"mode": 5, "key_antiquant_mode": 3, "value_antiquant_mode": 3}, r"modes \[3\]"),
        ({"mode": 4, "key_antiquant_mode": 5, "value_antiquant_mode": 5}, r"takes \(7, 2, 32\)"),
        ({"mode": 5, "key_antiquant_mode": 4, "value_antiquant_mode": 4}, r"takes \(7, 32\)"),
        ({"value_antiquant_scale": torch.empty(7, 32, 2)}, r"value_antiquant_scale is \(7, 32, 2\)"),
        ({"key_antiquant_scale": torch.empty(7, 2, 32, dtype=torch.bfloat16)}, "takes .* torch.float32"),
        ({"key_antiquant_scale": None}, "key_antiquant_scale is"),
        ({"query": torch.empty(3, 2, 512, dtype=torch.bfloat16)}, "with one query per sequence"),
        ({"block_table": None}, "int8 keys and values in blocks"),
        ({"atten_mask": torch.empty(3, 1, 1, 63, dtype=torch.bool)}, "block_table has blocks of 64 tokens"),
        ({"atten_mask": torch.empty(1, 1, 1, 64, dtype=torch.bool)}, "for 3 sequences of one query; a row for each"),
        ({"atten_mask": torch.empty(3, 1, 1, 64)}, "must be bool, int8 or uint8"),
        (
            {"atten_mask": torch.empty(2048, 2048, dtype=torch.int8), "sparse_mode": 4},
            "sparse_mode is 4, which is invalid",
        ),
        ({"pse_shift": torch.empty(3, 4, 1, 64, dtype=torch.bfloat16)}, "biases beside int8"),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given),
)
def test_calls_that_no_document_names(changes, reason):
    (said,) = kernel_call(**changes)
    assert re.search(reason, said), said


def change_kernel(change: Callable[[dict[str, Any], fx.Graph], dict[str, Any]]) -> list[torch.Tensor]:
    """What both graphs yield when the kernel's arguments in the second are changed."""
    graph, _ = lowered(4, 2, 128)
    decode = decode_graph(graph.traced)
    (node,) = (node for node in decode.graph.nodes if node.target is KERNEL)
    with decode.graph.inserting_before(node):
        node.kwargs = {**node.kwargs, **change(dict(node.kwargs), decode.graph)}
    decode.recompile()
    return by_both(graph, decode)


def _moved(dim: int) -> Callable[[dict[str, Any], fx.Graph], dict[str, Any]]:
    def change(call: dict[str, Any], graph: fx.Graph) -> dict[str, Any]:
        moved = graph.call_function(torch.ops.aten.roll.default, (call["key_antiquant_scale"], [1], [dim]))
        return {"key_antiquant_scale": moved}

    return change


def _one_head_for_all(call: dict[str, Any], graph: fx.Graph) -> dict[str, Any]:
    names = ("key_antiquant_scale", "value_antiquant_scale")
    first = {name: graph.call_function(torch.ops.aten.select.int, (call[name], 1, 0)) for name in names}
    return {**first, "key_antiquant_mode": 4, "value_antiquant_mode": 4}


@pytest.mark.parametrize(
    "change",
    [
        lambda call, _: {
            "key_antiquant_scale": call["value_antiquant_scale"],
            "value_antiquant_scale": call["key_antiquant_scale"],
        },
        _moved(0),
        _moved(1),
        _moved(2),
        _one_head_for_all,
        lambda call, _: {"scale": call["scale"] * 1.01},
    ],
    ids=["swapped", "of another block", "of another head", "of another slot", "per token", "1 % more"],
)
def test_mutants_of_the_kernels_arguments_are_seen(change):
    found, expected = change_kernel(change), right(4, 2, 128)
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        wrong = not torch.allclose(a, b, atol=1e-4, rtol=1e-4)
        assert wrong is (step in DECODE)


def test_scales_written_a_slot_later_are_seen():
    graph, _ = lowered(4, 2, 128)
    for node in graph.traced.graph.nodes:
        if node.target is torch.ops.aten.remainder.Scalar:
            with graph.traced.before(node.next):
                later = graph.traced.call(torch.ops.aten.add.Scalar, node, 1)
                later = graph.traced.call(torch.ops.aten.remainder.Scalar, later, 32)
            node.replace_all_uses_with(
                later, delete_user_cb=lambda user: user.target is not torch.ops.aten.add.Scalar
            )
            break
    found = by_both(graph)
    assert not any(torch.allclose(a, b, atol=1e-3) for a, b in zip(found, right(4, 2, 128), strict=True))


def gather_of_queries(graph):
    (gather,) = (
        node
        for node in graph.traced.graph.nodes
        if node.target is torch.ops.aten.index.Tensor and any(str(i) == "padded_tokens" for i in node.args[1])
    )
    return gather


def test_passes_behind_may_change_what_queries_are():
    """The queries are looked up when the decode graph is made, not remembered."""
    graph, _ = lowered(4, 2, 128)
    gather = gather_of_queries(graph)
    with graph.traced.before(gather):
        half = graph.traced.call(torch.ops.aten.mul.Tensor, gather.args[0], 0.5)
        gather.args = (graph.traced.call(torch.ops.aten.mul.Tensor, half, 2.0), gather.args[1])
    share_subexpressions(graph.traced)
    found = by_both(graph)
    assert "aten.mul" in operators(decode_graph(graph.traced))
    for a, b in zip(found, right(4, 2, 128), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_formula_that_was_changed_is_refused():
    graph, _ = lowered(4, 2, 128)
    gather = gather_of_queries(graph)
    other = graph.traced.step_input("row_of_token")
    gather.args = (gather.args[0], [other])
    with pytest.raises(ValueError, match="not one attention over its caches"):
        decode_graph(graph.traced)


def test_a_graph_without_int8_caches_has_none():
    graph = AttentionGraph(4, 2, 128)
    lower_npu_paged_attention(graph.traced)
    assert decode_graph(graph.traced) is None
