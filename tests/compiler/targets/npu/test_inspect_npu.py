"""explain and ``pagoda inspect`` for an NPU: routes, leftovers, the estimate, models without weights, GE graphs."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import fx
from transformers import Qwen3Config, Qwen3ForCausalLM

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators
from torch_pagoda import cli
from torch_pagoda.compiler.costs.flops import flops, keys_seen
from torch_pagoda.compiler.costs.skeleton import build_skeleton
from torch_pagoda.compiler.costs.traffic import Moved, Step, moved
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.targets.npu.socs import chip
from torch_pagoda.npu_tools.offline.run import OfflineCallError
from torch_pagoda.npu_tools.offline.toolchain import ToolchainError
from torch_pagoda.passes.graph.notes import GraphNotes
from torch_pagoda.passes.graph.provenance import DecoderLayers
from torch_pagoda.reports import Explanation, explain, npu_graph
from torch_pagoda.reports.npu import Estimate, NpuReport, estimates
from torch_pagoda.reports.npu_graph import GeReport, GeSchedule
from torch_pagoda.reports.npu_sections import npu_sections
from torch_pagoda.reports.schedule import SchedulePlan
from torch_pagoda.runtime.program import CacheSpec, is_cache_input

from legal_models import build_legal_model
from tiny_models import build_tiny_model

LAYERS, CONTEXT = 2, 300
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def llama() -> Any:
    return build_legal_model("llama", dtype=torch.bfloat16, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def explained(llama: Any) -> Explanation:
    return explain(llama, target="npu", context=CONTEXT, torchair=False)


@pytest.fixture(scope="module")
def refused() -> Explanation:
    """Heads that no token layout takes before CANN 9.0, and multipliers that no operator holds."""
    model = build_tiny_model("granite", dtype=torch.bfloat16)
    return explain(model, target="npu", verify="off", torchair=False, cann="8.5")


def test_routes_counts_and_launches(explained: Explanation) -> None:
    assert explained.target == "npu" and explained.verdict is not None and explained.verdict.ok
    assert explained.npu is not None
    counts = {route.operator: route.count for route in explained.npu.routes}
    assert counts["pagoda.paged_attention"] == counts["pagoda.gated_activation"] == LAYERS
    assert counts["pagoda.rms_norm"] + counts["pagoda.add_rms_norm"] == 2 * LAYERS + 1
    assert counts["aten.linear"] == 4 * LAYERS + 1
    assert not any(route.refused for route in explained.npu.routes)
    assert explained.leftovers == []
    assert all(r.matched == r.expected for r in explained.recognized)
    said = re.search(r"A Llama layer is (\d+) kernel launches", (ROOT / "docs" / "npu-lowering.md").read_text())
    assert said and explained.target_graph.launches_per_layer == int(said[1]) < explained.launches_before
    assert all(name.startswith("npu.") for layer in explained.layers for name in layer.operators_after)
    assert explained.npu.no_static_decode == ""
    assert npu_sections(explained)[0].note == "Decode steps can have static graphs."  # type: ignore[arg-type]


def test_refused_routes_and_leftovers_say_why(refused: Explanation) -> None:
    assert refused.npu is not None
    attention = next(r for r in refused.npu.routes if r.operator == "pagoda.paged_attention")
    assert attention.refused and all("16" in reason for _, reason in attention.refused)
    assert attention.modules == ("model.layers.*.self_attn",)
    multipliers = [x for x in refused.leftovers if x.module.rpartition(".")[0] == "model.layers"]
    assert {x.operator for x in multipliers} == {"aten.mul"} and len(multipliers) == 2 * len(refused.layers)
    assert all("residual_multiplier" in x.reason for x in multipliers)
    others = [x for x in refused.leftovers if x not in multipliers]
    assert others and all("heads of (16, 16, 16) dims" in x.reason for x in others)


def test_a_float32_model_has_no_peak() -> None:
    traced: Any = SimpleNamespace(graph=SimpleNamespace(nodes=[]), placeholders=[], npu=None, token_symbol=None)
    traced.caches, traced.constants = [CacheSpec(2, 128, 128, torch.float32)], {}
    for estimate in estimates(traced, DecoderLayers((), (), {}), (), chip("Ascend910B3"), 10):
        assert estimate.compute_seconds is None and estimate.bound_by == ""
        assert estimate.seconds == estimate.memory_seconds == 0.0


def test_unknown_figures_are_said_to_be_unknown() -> None:
    estimate = Estimate("decode", Step(1, 8, 1), Moved(10, 20, 30), 40, None, None)
    assert estimate.seconds is None and estimate.bound_by == ""
    report = NpuReport("Ascend910B4-1", None, 128, "float32", (), GeReport("not asked for"), (estimate,))
    routes, graph, least = npu_sections(SimpleNamespace(npu=report, layers=[]))  # type: ignore[arg-type]
    assert routes.rows == () and graph.rows == () and graph.note == "Not converted: not asked for"
    assert dict(least.rows)["minimum time of a step"] == "unknown"
    assert "The published figures of Ascend910B4-1 are unknown" in least.note


def test_schedules_are_shown_where_there_are_any() -> None:
    side = GeSchedule({"_user_stream_label": "side", "_op_aicore_num": "8"}, {"MatMul": 2, "SwiGlu": 1})
    for schedules, rows in (((), ()), ((side,), (("user_stream_label = side\nop_aicore_num = 8", "3"),))):
        graph = GeReport(schedules=schedules)
        report = NpuReport("Ascend910B4-1", None, 128, "float32", (), graph, ())
        sections = npu_sections(SimpleNamespace(npu=report, layers=[]))  # type: ignore[arg-type]
        shown = [section for section in sections if section.title.startswith("Schedules")]
        assert tuple(row[:2] for section in shown for row in section.rows) == rows
        assert json.loads(json.dumps(graph.to_dict()))["schedules"] == [asdict(each) for each in schedules]


def test_why_decode_steps_have_no_static_graphs() -> None:
    report = NpuReport("Ascend910B4-1", None, 128, "float32", (), GeReport(), (), "it gathers blocks")
    routes, *_ = npu_sections(SimpleNamespace(npu=report, layers=[]))  # type: ignore[arg-type]
    assert routes.note == "Decode steps have no static graphs: it gathers blocks."
    assert report.to_dict()["no_static_decode"] == "it gathers blocks"


def test_what_could_run_on_a_second_stream() -> None:
    model = build_legal_model("gpt_neox", dtype=torch.bfloat16)
    report = explain(model, target="npu", torchair=False, schedule=True, verify="off").npu
    assert report is not None and report.schedule is not None
    plan = report.schedule
    assert sorted(layer for branch in plan.branches for layer in branch.layers) == [0, 1]
    for branch in plan.branches:
        assert branch.side[-3:] == ("npu_linear", "npu_gelu", "npu_linear")
        assert "npu_fused_infer_attention_score" in branch.main
        assert 0 < branch.gain <= branch.seconds < plan.step_seconds
    assert plan.refused == (
        ("gpt_neox.layers.*.attention", "npu_rotary_mul by itself is too little for a second stream"),
    )
    sections = npu_sections(SimpleNamespace(npu=report, layers=[]))  # type: ignore[arg-type]
    branches, stays = (section for section in sections if "stream" in section.title)
    assert len(branches.rows) == len(plan.branches) and "not measured" in branches.note
    assert "schedule={'streams': True}" in branches.note and "codegen='aclgraph' runs it" in branches.note
    assert stays.rows == plan.refused
    assert json.loads(json.dumps(report.to_dict()))["schedule"]["step_seconds"] == plan.step_seconds


def test_what_could_be_fetched_early() -> None:
    """Of sizes of Qwen3-8B, without weights."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = Qwen3Config(**sizes, head_dim=128, num_hidden_layers=32, vocab_size=151936, dtype="bfloat16")
    skeleton = build_skeleton(Qwen3ForCausalLM, config)
    found = explain(skeleton, target="npu", soc="Ascend910B2", torchair=False, schedule=True)
    assert found.npu is not None and found.npu.schedule is not None
    (fetch,) = found.npu.schedule.fetches
    assert fetch.layers == tuple(range(32)) and fetch.weight == "weight of self_attn.o_proj"
    assert fetch.behind == "npu_linear" and fetch.window[-1] == "npu_scatter_pa_kv_cache"
    known = chip("Ascend910B2")
    assert known is not None and known.bandwidth is not None and known.l2_bandwidth is not None
    assert fetch.of_bytes == 2 * 4096**2 and fetch.bytes == int(known.bandwidth * fetch.idle / 2)
    assert fetch.gain == pytest.approx(fetch.bytes * (1 / known.bandwidth - 1 / known.l2_bandwidth))
    assert 7e-6 < fetch.idle < 9e-6 and known.l2_bandwidth == 24 * 1.8e9 * 110
    reasons = dict(found.npu.schedule.not_fetched)
    assert "npu_swiglu leaves the memory idle for 1.9 µs, less than 5" in reasons["model.layers.*.mlp"]
    sections = npu_sections(SimpleNamespace(npu=found.npu, layers=found.layers))  # type: ignore[arg-type]
    fetches, left = (section for section in sections if "fetche" in section.title)
    ((layers, weight, meanwhile, *_),) = fetches.rows
    assert layers == "0-31" and weight == "weight of self_attn.o_proj\n6.08 MiB of 32 MiB"
    assert meanwhile == "behind linear:\nrms_norm rms_norm apply_rotary_pos_emb scatter_pa_kv_cache"
    assert "not measured" in fetches.note and "schedule={'prefetch': True}" in fetches.note
    assert left.rows == found.npu.schedule.not_fetched
    assert json.loads(json.dumps(found.npu.to_dict()))["schedule"]["fetches"][0]["bytes"] == fetch.bytes


@pytest.mark.parametrize("soc", ["Ascend910B2", "Ascend910_9391"])
def test_what_could_be_a_super_kernel(soc: str) -> None:
    model = build_legal_model("llama", dtype=torch.bfloat16)
    found = explain(model, target="npu", soc=soc, torchair=False, schedule=True, verify="off")
    assert found.npu is not None and found.npu.schedule is not None
    plan = found.npu.schedule
    assert [kernel.layers for kernel in plan.super_kernels] == [(0,), (0,), (1,)]
    first, between, last = plan.super_kernels
    assert first.launches == ("npu_rms_norm", "npu_linear") and between.launches[1:] == last.launches
    for kernel in plan.super_kernels:
        if soc == "Ascend910B2":
            assert kernel.seconds is not None and kernel.beyond is not None
            assert 0 < kernel.beyond <= kernel.seconds < plan.step_seconds
            assert kernel.beyond <= len(kernel.launches) * 2e-6
        else:
            assert kernel.seconds is kernel.beyond is None and plan.unplanned, "of A3 no source has all figures"
    reasons = dict(plan.not_fused)
    assert "npu_fused_infer_attention_score is in no super kernel: its tiling is looked" in str(reasons)
    sections = npu_sections(SimpleNamespace(npu=found.npu, layers=found.layers))  # type: ignore[arg-type]
    kernels, left = (section for section in sections if "super kernel" in section.title.lower())
    assert kernels.rows[0][1] == "rms_norm linear" and "not measured" in kernels.note
    assert "schedule={'super_kernels': True}" in kernels.note
    assert left.rows == plan.not_fused
    (plain, *_) = json.loads(json.dumps(found.npu.to_dict()))["schedule"]["super_kernels"]
    assert plain["launches"] == ["npu_rms_norm", "npu_linear"]


def test_no_super_kernels_on_other_chips() -> None:
    plan = SchedulePlan(unfused="super kernels are documented for Ascend910B* and Ascend910_93*")
    report = NpuReport("Ascend310P3", None, 128, "float32", (), GeReport(), (), schedule=plan)
    sections = npu_sections(SimpleNamespace(npu=report, layers=[]))  # type: ignore[arg-type]
    (shown,) = (section for section in sections if "Super kernels" in section.title)
    assert shown.note.startswith("None: super kernels are documented for") and shown.rows == ()


def test_nothing_is_fetched_on_a_chip_whose_cache_is_unknown() -> None:
    plan = SchedulePlan(unfetched="no source gives the L2 cache size of Ascend910B3")
    report = NpuReport("Ascend910B3", None, 128, "float32", (), GeReport(), (), schedule=plan)
    sections = npu_sections(SimpleNamespace(npu=report, layers=[]))  # type: ignore[arg-type]
    (shown,) = (section for section in sections if "fetches" in section.title)
    assert shown.note == "None: no source gives the L2 cache size of Ascend910B3." and shown.rows == ()


def test_no_second_stream_for_a_chip_whose_figures_are_unknown() -> None:
    plan = SchedulePlan(unplanned="of Ascend310P3 no source gives vector cores")
    report = NpuReport("Ascend310P3", None, 128, "float32", (), GeReport(), (), schedule=plan)
    sections = npu_sections(SimpleNamespace(npu=report, layers=[]))  # type: ignore[arg-type]
    (shown,) = (section for section in sections if "stream" in section.title)
    assert shown.note == "None: of Ascend310P3 no source gives vector cores." and shown.rows == ()


def test_both_graphs_of_decode_steps_are_counted() -> None:
    counts = {"operators": 214, "host_nodes": 22}, {"operators": 149, "host_nodes": 0}
    for decode, rows in (((), None), (counts, (("operators", "214", "149"), ("host nodes", "22", "0")))):
        report = NpuReport("Ascend910B4-1", None, 128, "float32", (), GeReport(decode=decode), ())
        sections = npu_sections(SimpleNamespace(npu=report, layers=[]))  # type: ignore[arg-type]
        assert next((s.rows for s in sections if s.title.startswith("Decode steps")), None) == rows


def test_no_cell_is_cut_on_80_columns(explained: Explanation, refused: Explanation) -> None:
    for explanation in (explained, refused):
        sheet = io.StringIO()
        Console(file=sheet, width=80).print(explanation)
        lines = sheet.getvalue().splitlines()
        assert max(map(len, lines)) <= 80 and "…" not in sheet.getvalue()
        shown = Counter(word for line in lines for word in line.split())
        for section in npu_sections(explanation):
            cells = [cell for row in (section.columns, *section.rows) for cell in row]
            words = Counter(word for cell in cells for word in cell.rstrip("#!").split())
            # Reasons may hold words longer than their column, which are folded; nothing else does.
            cut = {word for word, count in words.items() if shown[word] < count and len(word) < 40}
            assert not cut, f"{section.title}: {cut}"


def test_estimate_of_a_decode_step_by_hand(llama: Any, explained: Explanation) -> None:
    assert explained.npu is not None
    decode, prefill = explained.npu.estimates
    config = llama.config
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    matrices = sum(p.numel() for layer in llama.model.layers for p in layer.parameters() if p.dim() == 2)
    matrices += llama.lm_head.weight.numel()
    scales = (2 * LAYERS + 1) * config.hidden_size
    frequencies = 4 * dim // 2
    assert decode.moved.weights == 2 * (matrices + scales + config.hidden_size) + frequencies
    assert decode.moved.cache == 2 * LAYERS * 2 * kv_heads * dim * (CONTEXT + 1)
    assert decode.flops == 2 * matrices + LAYERS * 2 * heads * 2 * dim * CONTEXT
    assert decode.memory_seconds == pytest.approx((decode.moved.weights + decode.moved.cache) / 1.6e12)
    assert decode.compute_seconds == pytest.approx(decode.flops / (20 * 1.8e9 * 8192))
    assert decode.bound_by == "memory" and decode.seconds == decode.memory_seconds
    # What prefill computes for the last layer's last token only is not part of the others' work.
    assert 0.5 < prefill.flops / (1024 * decode.flops) < 1.1
    assert prefill.bound_by == "compute" and prefill.step == Step(1024, 1024, 1)


def test_bytes_and_operations_of_int8(llama: Any, explained: Explanation) -> None:
    rounded = explain(llama, target="npu", quantization="int8", context=CONTEXT, torchair=False, verify="off")
    assert rounded.npu is not None and explained.npu is not None
    matrices = [p for layer in llama.model.layers for p in layer.parameters() if p.dim() == 2] + [
        llama.lm_head.weight
    ]
    # Of 16 bits they become 8, and each output gets a scale in float32.
    spared = sum(p.numel() for p in matrices) - 4 * sum(len(p) for p in matrices)
    for whole, half in zip(explained.npu.estimates, rounded.npu.estimates, strict=True):
        assert whole.moved.weights - half.moved.weights == spared
        assert half.flops == whole.flops and half.compute_seconds is not None
    whole, half = explained.npu.estimates[0], rounded.npu.estimates[0]
    products = 2 * sum(p.numel() for p in matrices)
    assert whole.compute_seconds is not None and half.compute_seconds is not None
    assert whole.compute_seconds - half.compute_seconds == pytest.approx(products / 2 / (20 * 1.8e9 * 8192))
    kinds = {route.operator: route.chosen for route in rounded.npu.routes}
    assert kinds["npu.npu_linear"] in (("npu.npu_quant_matmul",), ("npu.npu_dynamic_quant", "npu.npu_quant_matmul"))
    assert rounded.leftovers == []


def test_dict_survives_json(explained: Explanation) -> None:
    plain = json.loads(json.dumps(explained.to_dict(), allow_nan=False))
    npu = plain["npu"]
    assert npu["soc"] == npu["chip"]["name"] == "Ascend910B3" and npu["dtype"] == "bfloat16"
    assert {entry["operator"] for entry in npu["routes"]} >= {"pagoda.rope", "pagoda.paged_attention"}
    assert [entry["name"] for entry in npu["estimates"]] == ["decode", "prefill"]
    assert npu["estimates"][0]["moved"].keys() == {"weights", "cache", "activations"}
    assert npu["graph"]["unavailable"] and npu["graph"]["layers"] == []


@pytest.mark.parametrize("width", [80, 100])
def test_tables_fit(explained: Explanation, refused: Explanation, width: int) -> None:
    for explanation in (explained, refused):
        written = io.StringIO()
        Console(width=width, file=written).print(explanation)
        text = written.getvalue()
        assert max(map(len, text.splitlines())) <= width
        assert "Routes on Ascend910B3" in text and "minimum time of a step" in text


def test_page_shows_the_sections(refused: Explanation, tmp_path: Path) -> None:
    refused.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h2>Routes on Ascend910B3</h2>" in page and "<h2>Estimate: the minimum time of a step</h2>" in page
    assert "heads of (16, 16, 16) dims" in page and "residual_multiplier" in page


def test_without_a_toolchain_the_report_says_how_to_get_it(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ToolchainError("the offline Ascend toolchain is not there; run: pagoda npu setup")

    monkeypatch.setattr(npu_graph, "is_offline", lambda: False)
    monkeypatch.setattr(npu_graph, "find_toolchain", missing)
    report = npu_graph.graph_engine_report(llama, (0, 1), CompileOptions(target="npu"))
    assert "pagoda npu setup" in report.unavailable
    assert report.launches_per_layer is None and report.to_dict()["launches_per_layer"] is None
    assert (
        "not a transformers class"
        in npu_graph.graph_engine_report(torch.nn.Linear(1, 1), (), CompileOptions()).unavailable
    )


def test_a_graph_that_does_not_convert_is_a_reason(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: str, /, **arguments: Any) -> None:
        assert arguments["dtype"] == "bfloat16" and arguments["soc"] == "Ascend910B4"
        assert json.loads(Path(arguments["folder"], "config.json").read_text())["num_hidden_layers"] == LAYERS
        raise OfflineCallError("ConversionError: node tanh (aten.tanh.default) cannot be converted to GE")

    monkeypatch.setattr(npu_graph, "find_toolchain", lambda: None)
    monkeypatch.setattr(npu_graph, "call_offline", fail)
    options = CompileOptions(target="npu", soc="Ascend910B4")
    assert "node tanh" in npu_graph.graph_engine_report(llama, (0, 1), options).unavailable


def test_published_figures() -> None:
    b3 = chip("Ascend910B3")
    assert b3 is not None and b3.bandwidth == 1.6e12 and b3.peak == pytest.approx(294.9e12, rel=1e-3)
    b2, b4 = chip("Ascend910B2"), chip("Ascend910B4")
    assert b2 is not None and b2.peak == pytest.approx(353.9e12, rel=1e-3)
    assert b4 is not None and b4.peak == pytest.approx(245.8e12, rel=1e-3)
    assert chip("Ascend910B4-1") is None, "another chip than 910B4"
    a3 = chip("Ascend910_9382")
    assert a3 is not None and a3.bandwidth == 1.6e12 and a3.peak is None
    dt = chip("Ascend950DT_9582")
    assert dt is not None and dt.bandwidth == 4e12 and dt.peak == pytest.approx(432e12, rel=2e-3)
    assert chip("Ascend310B1") is None


@pytest.mark.parametrize(
    ("model_type", "layers", "expected"),
    [
        ("llama", 6, (0, 1, 1, 1, 1, 2)),
        ("llama", 3, (0, 1, 2)),
        ("llama", 1, (0,)),
        # Sliding and full attention in turns: the last layer is a full one.
        ("gemma2", 8, (0, 1, 2, 1, 2, 1, 2, 3)),
    ],
)
def test_a_skeleton_has_every_kind_of_layer(model_type: str, layers: int, expected: tuple[int, ...]) -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)} if model_type == "gemma2" else {}
    whole = build_tiny_model(model_type, num_hidden_layers=layers, **kinds)
    skeleton = build_skeleton(type(whole), whole.config, torch.bfloat16)
    assert skeleton.representatives == expected
    assert len(skeleton.model.model.layers) == skeleton.depth == max(expected) + 1  # type: ignore[union-attr,arg-type]
    assert whole.config.num_hidden_layers == layers
    assert {p.dtype for p in skeleton.model.parameters()} == {torch.bfloat16}
    assert not skeleton.model.training


def test_inspect_a_folder_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_legal_model("llama", num_hidden_layers=5).config.save_pretrained(tmp_path)
    arguments = ["inspect", str(tmp_path), "--target", "npu", "--soc", "Ascend910B2", "--no-torchair", "--json", "-"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--dtype", "bfloat16", "--context", "64"])
    captured = capsys.readouterr()
    assert ended.value.code == 0, captured.err
    plain = json.loads(captured.out)
    assert plain["built_layers"] == 3 and plain["verdict"] is None
    assert [layer["path"] for layer in plain["layers"]] == [f"model.layers.{i}" for i in range(5)]
    assert plain["layers"][2] == {**plain["layers"][1], "index": 2, "path": "model.layers.2"}
    decode = plain["npu"]["estimates"][0]
    assert plain["npu"]["soc"] == "Ascend910B2" and decode["step"] == {"tokens": 1, "context": 64, "rows": 1}
    # Five layers, though three were built; the head and the final norm come on top.
    assert decode["moved"]["weights"] > 5 * plain["layers"][1]["weight_bytes_after"]


@pytest.mark.parametrize(
    ("step", "window", "chunk", "keys"),
    [
        (Step(1, 1024, 1), 0, 0, 1024),
        (Step(4, 4, 1), 0, 0, 1 + 2 + 3 + 4),
        (Step(2, 6, 1), 0, 0, 5 + 6),
        (Step(4, 4, 1), 2, 0, 1 + 2 + 2 + 2),
        (Step(4, 4, 1), 0, 3, 1 + 2 + 3 + 1),
    ],
)
def test_keys_that_queries_look_at(step: Step, window: int, chunk: int, keys: int) -> None:
    assert keys_seen(step, window, chunk) == keys


class Graph:
    """A graph of one operator over bf16 tensors of given shapes; names of constants begin with ``w``."""

    def __init__(
        self, target: Any, *arguments: Any, result: tuple[int, ...] = (), window: int = 0, **kwargs: Any
    ) -> None:
        graph = fx.Graph()
        self.placeholders: list[fx.Node] = []

        def made(argument: Any) -> Any:
            if isinstance(argument, list):
                return [made(a) for a in argument]
            if not isinstance(argument, tuple):
                return argument
            name, *shape = argument
            node = graph.placeholder(name)
            node.meta["example_value"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            if is_cache_input(name):
                node.meta["cache_index"] = 0
            self.placeholders.append(node)
            return node

        given = [made(argument) for argument in arguments]
        node = graph.call_function(target, tuple(given), {name: made(v) for name, v in kwargs.items()})
        node.meta["example_value"] = torch.empty(result, dtype=torch.bfloat16, device="meta") if result else None
        self.nodes = [node]
        spec = CacheSpec(2, 128, 128, torch.bfloat16, sliding_window=window)
        constants = [n.name for n in self.placeholders if n.name.startswith("w")]
        self.traced: Any = SimpleNamespace(
            placeholders=self.placeholders,
            constants=constants,
            notes=GraphNotes(),
            caches=[spec],
            npu=None,
            token_symbol=None,
        )

    def moved(self, step: Step) -> Moved:
        return moved(self.traced, self.nodes, step)

    def flops(self, step: Step) -> int:
        return flops(self.traced, self.nodes, step)


def test_a_product_reads_each_matrix_once() -> None:
    graph = Graph(torch.ops.npu.npu_linear.default, ("x", 3, 8), ("w", 16, 8), ("w_bias", 16), result=(3, 16))
    assert graph.moved(Step(3, 3, 3)) == Moved(2 * (16 * 8 + 16), 0, 2 * (3 * 8 + 3 * 16))
    assert graph.flops(Step(3, 3, 3)) == 2 * 3 * 8 * 16


@pytest.mark.parametrize(("rows", "read"), [(2, 2), (100, 8)])
def test_only_experts_that_a_row_is_sent_to_are_read(rows: int, read: int) -> None:
    target = torch.ops.npu.npu_grouped_matmul.default
    graph = Graph(target, [("x", rows, 32)], [("w", 8, 32, 16)], result=(rows, 16))
    assert graph.moved(Step(rows, rows, 1)).weights == 2 * read * 32 * 16
    assert graph.flops(Step(rows, rows, 1)) == 2 * rows * 32 * 16


@pytest.mark.parametrize(("window", "seen"), [(0, 1000), (128, 128)])
def test_attention_reads_the_context_and_scatter_writes_a_row(window: int, seen: int) -> None:
    step = Step(1, 1000, 1)
    row = 2 * 2 * 128
    caches = ("key_cache_0", 9, 128, 2, 128), ("value_cache_0", 9, 128, 2, 128)
    write = Graph(
        torch.ops.npu.npu_scatter_pa_kv_cache.default,
        *(("key", 1, 2, 128), ("value", 1, 2, 128), *caches, ("slots", 1)),
        window=window,
    )
    assert write.moved(step).cache == 2 * row
    attend = Graph(
        torch.ops.npu.npu_fused_infer_attention_score.default,
        ("q", 1, 4, 128),
        *caches,
        atten_mask=("w_mask", 2048, 2048),
        num_heads=4,
        num_key_value_heads=2,
        input_layout="TND",
        sparse_mode=4 if window else 3,
        pre_tokens=window - 1,
        result=(1, 4, 128),
        window=window,
    )
    assert attend.moved(step) == Moved(0, 2 * row * seen, 2 * 2 * 4 * 128)
    assert attend.flops(step) == 2 * 4 * (128 + 128) * seen


@pytest.mark.torchair
def test_torchair_s_graph_of_a_llama() -> None:
    model = build_legal_model("llama", dtype=torch.bfloat16, num_hidden_layers=5)
    report = npu_graph.graph_engine_report(model, tuple(range(5)), CompileOptions(target="npu"))
    assert report.unavailable == "" and report.converted == 3
    assert report.cache_copies == ()
    assert sorted(number for kind in report.layers for number in kind.layers) == list(range(5))
    assert 0 < report.launches_per_layer <= 12
    for kind in report.layers:
        assert kind.types["FusedInferAttentionScore"] == kind.types["ScatterPaKvCache"] == kind.types["SwiGlu"] == 1
        assert kind.types["MatMul"] == 4
    assert report.per_step["MatMul"] == 1, "the head"
    varying, fixed = report.decode
    assert varying["host_nodes"] > fixed["host_nodes"] == fixed["host_inputs"] == fixed["unknown_sizes"] == 0
    assert varying["launches"] == fixed["launches"] > 3 * 11 and fixed["cache_copies"] == 0
    assert json.loads(json.dumps(report.to_dict()))["launches_per_layer"] == report.launches_per_layer
