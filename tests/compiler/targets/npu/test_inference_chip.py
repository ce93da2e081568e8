"""Models for 310P: decode steps by the operator for one query per sequence, all others by the formula; numbers."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lowered_models import assert_same, served
from npu_calls import illegal_calls

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.targets.npu.decode_steps import DecodeCalls, StepKinds
from torch_pagoda.compiler.targets.npu.ge.static_graph import why_not_static
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.passes.lower.npu.call import Call
from torch_pagoda.passes.lower.npu.decode_graph import decode_graph
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.npu.limits import violations

from legal_models import build_legal_model
from shared_graphs import capture

TARGET = NpuTarget("Ascend310P3", block_size=16, float32_as=torch.float16)
KERNEL = torch.ops.npu.npu_incre_flash_attention.default


@cache
def both(model_type: str) -> tuple[TracedGraph, TracedGraph]:
    """The graph for all steps, and that for decode steps."""
    captured = capture(build_legal_model(model_type))
    captured.traced.npu = TARGET
    options = CompileOptions(codegen="none", target="npu", verify="off")
    traced = run_pipeline(captured, options, None, CompileReport(model_type))
    decode = decode_graph(traced)
    assert decode is not None
    return traced, decode


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "mistral"])  # the last has windows
def test_decode_steps_read_caches_where_they_lie(model_type):
    traced, decode = both(model_type)
    names = [callee(node) for node in decode.graph.nodes]
    assert names.count("npu_incre_flash_attention") == len(decode.caches) and "index.Tensor" not in names
    assert not illegal_calls(traced, TARGET) and not illegal_calls(decode, TARGET)
    assert "takes lengths from the host" in why_not_static(decode)
    calls: list[str] = []

    def watched(*args: Any) -> Any:
        calls.append("decode")
        return decode.module(*args)

    found = served(traced, DecodeCalls(traced, decode, watched, traced.module), max_tokens=5)
    assert_same(found, served(traced, traced.module, max_tokens=5))
    assert calls


def test_experts_get_the_ends_of_their_rows():
    """Whatever is asked for, the chip says these, in int32."""
    traced, decode = both("qwen3_moe")
    for graph in (traced, decode):
        products = [node for node in graph.graph.nodes if callee(node) == "npu_grouped_matmul"]
        assert products and all(node.kwargs["group_list_type"] == 0 for node in products)
        assert {callee(node.kwargs["group_list"]) for node in products} == {"_to_copy"}
        assert not illegal_calls(graph, TARGET)
    filled = [node.args[0] for node in decode.graph.nodes if callee(node).startswith("masked_fill")]
    assert not any("index_select" in callee(rows) for rows in filled), "only rows of several ranks lack places"


def call(soc="Ascend310P3", graph_mode="ge", heads=8, kv_heads=2, dim=128, size=64, table=(3, 4), **changes):
    half = {"dtype": torch.float16, "device": "meta"}
    query, cache = torch.empty(table[0], 1, heads * dim, **half), torch.empty(9, size, kv_heads * dim, **half)
    given = {
        "actual_seq_lengths": [1] * table[0],
        "block_table": torch.empty(table, dtype=torch.int32, device="meta"),
        "block_size": size,
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "input_layout": "BSH",
        "inner_precise": 0,
        **changes,
    }
    target = NpuTarget(soc, block_size=size, graph_mode=graph_mode)
    return "; ".join(violations(Call.make(KERNEL, target, query, cache, cache, **given)))


def mask(*sizes, dtype=torch.bool):
    return torch.empty(sizes, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"heads": 4, "kv_heads": 4, "dim": 512}, ""),
        ({"atten_mask": mask(3, 1, 1, 256)}, ""),
        ({"soc": "Ascend910B3"}, "Ascend910B3 does not run it"),
        ({"graph_mode": "aclgraph"}, "would stay those of the capture"),
        ({"dim": 256}, "heads of 256 dims, 4 to one"),
        ({"heads": 4, "kv_heads": 4, "dim": 72}, "heads of 72 dims"),
        ({"heads": 40, "kv_heads": 1}, "40 to one"),
        ({"size": 24}, "block_size is 24"),
        ({"size": 1024}, "block_size is 1024"),
        ({"table": (257, 4)}, "257 sequences"),
        ({"table": (3, 1025)}, "65600 tokens"),
        ({"atten_mask": mask(1, 1, 1, 256)}, "atten_mask is torch.bool"),
        ({"atten_mask": mask(3, 1, 1, 255)}, "atten_mask is torch.bool"),
        ({"atten_mask": mask(3, 1, 1, 256, dtype=torch.int8)}, "atten_mask is torch.int8"),
        ({"block_table": None}, "with a block table"),
        ({"actual_seq_lengths": None}, "paging needs the lengths of keys"),
    ],
)
def test_what_the_vendors_document_and_tiling_take(changes, reason):
    found = call(**changes)
    assert reason in found and bool(found) == bool(reason)


@pytest.mark.parametrize(("table", "decode"), [((256, 4096), True), ((257, 1), False), ((1, 4097), False)])
def test_more_than_the_operator_takes_runs_by_the_other_graph(table, decode):
    kinds = StepKinds(both("llama")[0])
    assert kinds.fits(SimpleNamespace(shape=table)) is decode
