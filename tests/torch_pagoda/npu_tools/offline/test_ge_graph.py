from __future__ import annotations

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torch_pagoda.compiler.targets.npu.without_device import soc_version
from torch_pagoda.npu_tools.offline.conversion import ConversionError, convert, convert_and_keep
from torch_pagoda.npu_tools.offline.ge_graph import GeGraph, GeNode
from torch_pagoda.npu_tools.offline.run import OfflineCallError, call_offline

from ge_graphs import ge_graph_of, traced

npu, aten = torch.ops.npu, torch.ops.aten


def graph_of(*nodes: GeNode) -> GeGraph:
    inputs = tuple(node.name for node in nodes if node.type == "Data")
    return GeGraph((*nodes, GeNode("end", "NetOutput", {"input0": f"{nodes[-1].name}:0"})), inputs)


def writer(name: str, cache: str) -> GeNode:
    return GeNode(name, "ScatterPaKvCache", {"key": "rows:0", "key_cache": cache}, in_place={"0": "key_cache"})


ROWS, CACHE = GeNode("rows", "Data"), GeNode("cache", "Data")


def test_queries() -> None:
    graph = graph_of(ROWS, GeNode("a", "Cast", {"x": "rows:0"}, {"dst_type": 1}), GeNode("b", "Cast", {"x": "a:0"}))
    assert graph.count("Cast") == 2 and graph.count("MatMul") == 0
    assert [node.name for node in graph.of_type("Cast")] == ["a", "b"]
    assert graph.types() == {"Data": 1, "Cast": 2, "NetOutput": 1}
    assert graph["a"].attributes["dst_type"] == 1
    with pytest.raises(KeyError, match="nothing"):
        graph["nothing"]


def test_source_looks_behind_views() -> None:
    graph = graph_of(
        ROWS,
        GeNode("flat", "Reshape", {"x": "rows:0", "shape": "two:0"}),
        GeNode("two", "Const"),
        GeNode("wide", "Unsqueeze", {"x": "flat:0"}),
        GeNode("a", "Cast", {"x": "wide:0"}),
    )
    assert graph.source(graph["a"], "x") is ROWS


@pytest.mark.parametrize("view", ["Reshape", "Unsqueeze", "Squeeze", "Identity", "ExpandDims", "Flatten"])
def test_views_do_not_compute(view: str) -> None:
    assert graph_of(ROWS, GeNode("a", view, {"x": "rows:0"})).computing() == []


@pytest.mark.parametrize("moving", ["Transpose", "GatherV2", "Cast", "TensorMove", "SplitV", "ConcatV2", "Assign"])
def test_what_moves_elements_computes(moving: str) -> None:
    assert [node.name for node in graph_of(ROWS, GeNode("a", moving, {"x": "rows:0"})).computing()] == ["a"]


def test_constants_and_host_work_do_not_compute() -> None:
    graph = graph_of(
        ROWS,
        GeNode("zero", "Const"),
        GeNode("zeros", "Fill", {"dims": "late:0", "value": "zero:0"}),
        GeNode("sizes", "Shape", {"x": "rows:0"}, host=True),
        GeNode("tokens", "Gather", {"x": "sizes:0", "indices": "zero:0"}, host=True),
        GeNode("sum", "Add", {"x1": "rows:0", "x2": "zeros:0"}),
        GeNode("late", "Const"),
    )
    assert [node.name for node in graph.computing()] == ["sum"]


def test_cache_copies() -> None:
    assert graph_of(ROWS, CACHE, writer("w", "cache:0")).cache_copies() == []
    copied = GeNode("copy", "TensorMove", {"x": "cache:0"})
    assert graph_of(ROWS, CACHE, copied, writer("w", "copy:0")).cache_copies("cache") == [copied]
    assert graph_of(ROWS, CACHE, copied, writer("w", "copy:0")).cache_copies("rows") == []
    assert graph_of(ROWS, CACHE, GeNode("copy", "TensorMove", {"x": "rows:0"})).cache_copies("cache") == []


def test_cache_copies_behind_views_selections_and_writes() -> None:
    view = GeNode("view", "Reshape", {"x": "cache:0", "shape": "four:0"})
    first = GeNode("first", "GatherV2", {"x": "view:0", "indices": "four:0"})
    copied = GeNode("copy", "TensorMove", {"x": "first:0"})
    again = GeNode("again", "TensorMove", {"x": "w:0"})
    graph = graph_of(ROWS, CACHE, GeNode("four", "Const"), view, first, copied, writer("w", "copy:0"), again)
    assert graph.cache_copies("cache") == [copied, again]


def test_copies_of_new_tensors_are_none_of_a_cache() -> None:
    made = GeNode("made", "MatMul", {"x1": "rows:0", "x2": "rows:0"})
    assert graph_of(ROWS, CACHE, made, GeNode("copy", "TensorMove", {"x": "made:0"})).cache_copies() == []


def test_a_cache_that_is_no_input_is_refused() -> None:
    with pytest.raises(ValueError, match="no 'values'; it reads rows, cache"):
        graph_of(ROWS, CACHE).cache_copies("values")


def test_schedules_of_what_computes() -> None:
    side, fused = {"_user_stream_label": "side"}, {"_super_kernel_scope": "layers"}
    graph = graph_of(
        ROWS,
        GeNode("shape", "Reshape", {"x": "rows:0"}, schedule=side),
        GeNode("a", "MatMul", {"x1": "shape:0"}, schedule=side),
        GeNode("b", "SwiGlu", {"x": "a:0"}, schedule=fused),
        GeNode("c", "MatMul", {"x1": "b:0"}, schedule=dict(side)),
        GeNode("d", "Cast", {"x": "c:0"}),
    )
    assert graph.schedules() == [(side, {"MatMul": 2}), (fused, {"SwiGlu": 1})]
    assert GeGraph.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph


def test_json_and_back() -> None:
    graph = GeGraph((ROWS, CACHE, writer("w", "cache:0"), GeNode("x", "Cmo", after=("w",))), ("rows",), ("w:0",))
    assert GeGraph.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph


@pytest.mark.parametrize(
    ("soc", "number"),
    [
        ("Ascend910B3", 223),
        ("Ascend910_9391", 250),
        ("Ascend950PR_9599", 260),
        ("Ascend910_9589", 260),
        ("Ascend310P3", 200),
    ],
)
def test_soc_versions(soc: str, number: int) -> None:
    assert soc_version(soc) == number


@pytest.mark.parametrize("soc", ["", "Ascend", "H100", "Ascend910A"])
def test_unknown_soc(soc: str) -> None:
    with pytest.raises(ValueError, match=f"soc='{soc}' is unknown"):
        soc_version(soc)


def test_conversion_needs_the_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_PAGODA_NPU_TOOLCHAIN", raising=False)
    with pytest.raises(RuntimeError, match="pagoda npu python"):
        convert(traced(lambda x: x + 1), [torch.ones(2)])


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def layer(x, gamma, weight, rows, key_cache, value_cache, slots):
    normed = npu.npu_rms_norm.default(x, gamma, 1e-5)[0]
    npu.npu_scatter_pa_kv_cache.default(rows, rows, key_cache, value_cache, slots, cache_mode="Norm")
    return aten.mm.default(normed, aten.t.default(weight)), aten.view.default(key_cache, [-1, 256])


def layer_inputs(tokens: int = 5) -> list[torch.Tensor]:
    slots = torch.arange(tokens, dtype=torch.int32)
    caches = [torch.zeros(4, 16, 2, 128), torch.zeros(4, 16, 2, 128)]
    torch.manual_seed(0)
    return [torch.randn(tokens, 64), torch.rand(64), torch.rand(32, 64), torch.randn(tokens, 2, 128), *caches, slots]


@pytest.mark.torchair
def test_nodes_inputs_attributes_and_origins() -> None:
    graph = ge_graph_of(layer, *layer_inputs())
    assert graph.inputs == ("x", "gamma", "weight", "rows", "key_cache", "value_cache", "slots")
    assert [node.type for node in graph.computing()] == ["RmsNorm", "ScatterPaKvCache", "Transpose", "MatMul"]
    assert graph["x"].attributes["shape"] == [5, 64] and graph["slots"].attributes["dtype"] == "int32"
    (norm,) = graph.of_type("RmsNorm")
    assert norm.inputs == {"x": "x:0", "gamma": "gamma:0"} and norm.attributes == {"epsilon": 1e-5}
    (written,) = graph.of_type("ScatterPaKvCache")
    assert written.in_place == {"0": "key_cache", "1": "value_cache"}
    # Torchair leaves out attributes that have their default value.
    assert written.attributes == {"cache_mode": "Norm", "scatter_mode": "None", "strides": [1, 1], "offsets": [0, 0]}
    (transpose,) = graph.of_type("Transpose")
    assert graph.source(transpose, "perm").attributes["value"] == [1, 0]
    origins = {node.type: node.origin for node in graph.computing()}
    assert origins == {
        "RmsNorm": "npu_rms_norm_default",
        "ScatterPaKvCache": "npu_scatter_pa_kv_cache_default",
        "Transpose": "mm_default",
        "MatMul": "mm_default",
    }


@pytest.mark.torchair
def test_marked_sizes_are_dynamic() -> None:
    inputs = layer_inputs()
    for i in (0, 3, 6):
        torch._dynamo.mark_dynamic(inputs[i], 0)
    graph = ge_graph_of(layer, *inputs)
    assert [graph[name].attributes["shape"] for name in ("x", "rows", "slots")] == [[-1, 64], [-1, 2, 128], [-1]]
    assert graph.cache_copies() == []
    static = ge_graph_of(layer, *inputs, dynamic=False)
    assert static["x"].attributes["shape"] == [5, 64]


@pytest.mark.torchair
def test_recorded_fake_values_decide_about_real_inputs() -> None:
    """As a captured graph has them: one symbol for the tokens, an input for their number."""
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    example = torch.ones(5, 64)
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(example, symbolic_context=sizes)
    module = traced(lambda tokens, x: aten.add.Tensor(x, tokens))
    tokens, x = (n for n in module.graph.nodes if n.op == "placeholder")
    tokens.meta["val"], x.meta["val"] = fake.shape[0], fake
    for inputs in ([5, example], [fake.shape[0], fake]):
        graph = convert(module, inputs)
        assert graph["x"].attributes["shape"] == [-1, 64]
        (add,) = graph.of_type("Add")
        assert graph.inputs == ("x",) and graph.source(add, "x2").host, "the number of tokens is read off x"
        assert [node.type for node in graph.computing()] == ["Add"]


@pytest.mark.torchair
def test_sizes_are_host_work_and_what_is_made_of_them_is_not() -> None:
    def step(x):
        rows = aten.sym_size.int(x, 0)
        return aten.full.default([rows, 2], 1.0), x + rows

    x = torch.ones(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    graph = ge_graph_of(step, x)
    assert [node.type for node in graph.computing()] == ["Fill", "Add"]
    assert all(node.host for node in graph.of_type("Shape"))


@pytest.mark.torchair
def test_the_converted_operators_run_and_write_in_place() -> None:
    import torch_pagoda.runtime.ops.npu  # noqa: F401  CPU kernels

    inputs = layer_inputs()
    for i in (0, 3, 6):
        torch._dynamo.mark_dynamic(inputs[i], 0)
    run = convert_and_keep(traced(layer), inputs).run
    for tokens in (5, 7):
        x, gamma, weight, rows, key_cache, value_cache, slots = given = layer_inputs(tokens)
        out, flat = run(*given)
        expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gamma @ weight.t()
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(key_cache.view(-1, 2, 128)[slots.long()], rows)
        torch.testing.assert_close(value_cache, key_cache)
        assert flat.shape == (64, 256) and torch.equal(flat, key_cache.view(-1, 256))


@pytest.mark.torchair
def test_lists_of_another_length_are_refused() -> None:
    def step(x, lens):
        return x + lens[0], x * lens[1]

    conversion = convert_and_keep(traced(step), [torch.ones(3), [4, 4]])
    assert [out.tolist() for out in conversion.run(torch.ones(3), [0, 2])] == [[1.0] * 3, [2.0] * 3]
    with pytest.raises(ValueError, match="list of 2 integers, but got 3"):
        conversion.run(torch.ones(3), [1, 2, 3])
    with pytest.raises(ValueError, match="2 placeholders, but got 1"):
        convert(traced(step), [torch.ones(3)])
    with pytest.raises(ValueError, match="lens is a list with values other"):
        convert(traced(step), [torch.ones(3), [torch.ones(1)]])


@pytest.mark.torchair
def test_the_module_is_left_alone() -> None:
    module = traced(layer)
    before = module.code, [dict(node.meta) for node in module.graph.nodes]
    first, second = convert(module, layer_inputs()), convert(module, layer_inputs())
    assert (module.code, [dict(node.meta) for node in module.graph.nodes]) == before
    assert [(n.type, n.origin) for n in first] == [(n.type, n.origin) for n in second]


@pytest.mark.torchair
def test_errors_of_meta_functions_name_the_node() -> None:
    with pytest.raises(ConversionError, match=r"node mm_default \(torch\.ops\.aten\.mm\.default\).*reduction dim"):
        ge_graph_of(lambda a, b: aten.mm.default(a, b), torch.ones(8, 3), torch.ones(4, 3))


@pytest.mark.torchair
def test_a_conversion_does_not_leave_its_answers_behind() -> None:
    import torch_npu

    ge_graph_of(lambda x, g: npu.npu_gemma_rms_norm.default(x, g)[0], half(3, 64), half(64), soc="Ascend950PR")
    assert not hasattr(npu.npu_gemma_rms_norm.default, "_ge_converter")
    with pytest.raises(Exception):  # noqa: B017  there is no device to have a name
        torch_npu.npu.get_device_name()


@pytest.mark.torchair
def test_scheduling_attributes_are_kept() -> None:
    import torchair  # noqa: F401  defines the operators of air

    air = torch.ops.air
    module = traced(lambda x, w: aten.mm.default(aten.relu.default(aten.mm.default(x, w)), w))
    first, relu, last = (node for node in module.graph.nodes if node.op == "call_function")
    labels = ["_user_stream_label", "_user_stream_priority", "_op_aicore_num", "_op_vectorcore_num", "_unknown"]
    for node, (keys, values) in {
        relu: (labels, ["side", "0", "8", "16", "1"]),
        last: (["_super_kernel_scope", "_super_kernel_options"], ["layers", "stream-fusion=1"]),
    }.items():
        with module.graph.inserting_before(node):
            module.graph.call_function(air.scope_enter.default, (keys, values))
        with module.graph.inserting_after(node):
            module.graph.call_function(air.scope_exit.default, ())
    graph = convert(module, [torch.ones(4, 4), torch.ones(4, 4)])
    nodes = {node.origin: node for node in graph.computing()}
    assert nodes[first.name].schedule == {}
    assert nodes[relu.name].schedule == {
        "_user_stream_label": "side",
        "_user_stream_priority": "0",
        "_op_aicore_num": "8",
        "_op_vectorcore_num": "16",
    }
    fused = {"_super_kernel_scope": "layers", "_super_kernel_options": "stream-fusion=1"}
    assert nodes[last.name].schedule == fused
    assert not any(name.startswith("_") for node in graph for name in node.attributes)
    assert [dict(types) for _, types in graph.schedules()] == [{"Relu": 1}, {"MatMul": 1}]


@pytest.mark.torchair
def test_calls_from_an_ordinary_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TORCH_PAGODA_NPU_TOOLCHAIN")
    assert call_offline("torch_pagoda.compiler.targets.npu.without_device:is_offline") is True
    with pytest.raises(OfflineCallError, match="JSONDecodeError: Expecting") as failed:
        call_offline("json:loads", s="{")
    assert "Traceback" in failed.value.traceback
    with pytest.raises(OfflineCallError, match="signal SIGABRT"):
        call_offline("os:abort")
    assert capfd.readouterr().out == ""
