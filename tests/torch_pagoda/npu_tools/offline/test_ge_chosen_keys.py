"""Models with an indexer through the real torchair: every node converts, no cache is copied, lengths stay tensors."""

from __future__ import annotations

import pytest
import torch

from torch_pagoda.compiler.capture.trace import capture
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.npu_tools.offline.conversion import convert
from torch_pagoda.npu_tools.offline.decode_graphs import counted_decode_graphs
from torch_pagoda.passes.graph.fx_nodes import value
from torch_pagoda.runtime.program import is_cache_input

from legal_models import build_legal_model

pytestmark = pytest.mark.torchair


@pytest.mark.parametrize(("model_type", "soc"), [("deepseek_v32", "Ascend910B3"), ("hy_v4", "Ascend950PR")])
def test_converts_without_copies_of_a_cache(model_type, soc):
    model = build_legal_model(model_type, dtype=torch.bfloat16)
    options = CompileOptions(codegen="none", target="npu", verify="off", soc=soc)
    traced = run_pipeline(capture(model), options, None, CompileReport(model_type))
    graph = convert(traced.module, [value(n) for n in traced.placeholders], soc=soc)
    caches = [n.name for n in traced.placeholders if is_cache_input(n.name)]
    assert set(caches) <= set(graph.inputs)
    assert graph.cache_copies(*caches) == [] and graph.count("TensorMove") == 0
    for name in caches:  # whole, one writer
        writers = [n for n in graph if name + ":0" in n.inputs.values() and n.in_place]
        assert len(writers) == 1 and not writers[0].is_view
    layers, indexers = (2, 2) if model_type == "deepseek_v32" else (4, 2)
    chosen, attended = graph.of_type("LightningIndexer"), graph.of_type("SparseFlashAttention")
    assert (len(chosen), len(attended)) == (indexers, layers)
    for node in chosen:
        found = node.attributes
        assert (found["layout_query"], found["layout_key"], found["sparse_mode"]) == ("TND", "PA_BSND", 3)
        assert found["sparse_count"] == model.config.index_topk
        assert node.inputs["actual_seq_lengths_key"] == "seq_lens:0" and node.inputs["block_table"] == "block_table:0"
        assert graph.source(node, "key").type == "ScatterNdUpdate"
    for node in attended:
        found = node.attributes
        assert (found["layout_query"], found["layout_kv"], found["sparse_mode"]) == ("TND", "PA_BSND", 3)
        assert (found["attention_mode"], found["sparse_block_size"]) == (2, 1)
        assert node.inputs["actual_seq_lengths_kv"] == "seq_lens:0" and node.inputs["block_table"] == "block_table:0"
        assert graph.source(node, "sparse_indices") in chosen
        written = graph.source(node, "key")
        assert written.in_place and graph.source(node, "value") is graph.source(node, "key_rope") is written
        assert ("sinks" in node.inputs) == (model_type == "hy_v4")
    ends = {node.inputs["actual_seq_lengths_query"] for node in (*chosen, *attended)}
    assert len(ends) == 1, "cut off the starts once for all layers"
    if model_type == "deepseek_v32":
        varying, fixed = counted_decode_graphs(traced)
        assert fixed.host_nodes == fixed.host_inputs == fixed.unknown_sizes == fixed.cache_copies == 0
        assert fixed.launches == varying.launches
        assert all(node.attributes["query_norm_flag"] for node in graph.of_type("MlaPrologV3"))
