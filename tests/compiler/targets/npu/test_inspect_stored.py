"""The kernel table of quantized checkpoints: what is converted anew has the formats of the loaded weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import quantize_folder
from torch import nn
from transformers import PreTrainedModel

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler.capture.trace import capture
from torch_pagoda.compiler.costs.skeleton import Skeleton, build_skeleton
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.passes.graph.provenance import decoder_layers, launches_work, operator_name
from torch_pagoda.reports import explain, npu_graph
from torch_pagoda.reports.npu_sections import npu_sections
from torch_pagoda.reports.stored_formats import marks_of_layers, store_as, stored_formats
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight, as_dense

from legal_models import build_legal_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PreTrainedModel]:
    """A function of a model and a format: the model over stored weights, in bfloat16."""

    def load(model_type: str, name: str, **overrides: Any) -> PreTrainedModel:
        folder = Path(tmp_path_factory.mktemp(name))
        build_legal_model(model_type, dtype=torch.bfloat16, **overrides).save_pretrained(folder)
        quantize_folder(folder, name)
        return load_model(str(folder), "auto", False, torch.device("cpu"))

    return load


def skeleton_of(model: PreTrainedModel, **change: Any) -> Skeleton:
    """What another process builds of it."""
    formats = json.loads(json.dumps(stored_formats(model)))
    skeleton = build_skeleton(type(model), model.config, model.dtype, marks_of_layers(model, formats))
    store_as(skeleton.model, formats | change)
    return skeleton


def launches(model: nn.Module) -> list[Counter[str]]:
    """Operators of each decoder layer that launch work."""
    captured = capture(model)
    known = decoder_layers(captured.traced.graph)
    options = CompileOptions(target="npu", codegen="none", verify="off")
    traced = run_pipeline(captured, options, None, CompileReport("model"))
    layers = decoder_layers(traced.graph, known, traced.placeholder(traced.input_ids))
    return [
        Counter(operator_name(node) for node in layers.nodes(i) if launches_work(node))
        for i in range(len(layers.paths))
    ]


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("llama", "slim-w8a8-static"),
        pytest.param("qwen3_moe", "slim-w4a8-experts", marks=pytest.mark.slow),
        pytest.param("llama", "gptq-4-order", marks=pytest.mark.slow),
    ],
)
def test_what_is_built_anew_is_lowered_alike(
    loaded: Callable[..., PreTrainedModel], model_type: str, name: str
) -> None:
    model = loaded(model_type, name)
    expected, skeleton = launches(model), skeleton_of(model)
    found = launches(skeleton.model)
    assert [found[like] for like in skeleton.representatives] == expected
    plain = launches(build_skeleton(type(model), model.config, model.dtype).model)
    assert plain != found, "as the table was without formats"


@pytest.mark.parametrize(
    ("model_type", "name", "part"),
    [("qwen3_moe", "slim-w8a8-static", "input_scale"), ("gpt_oss", "mxfp4-experts", "transposed")],
)
def test_formats_shapes_and_scales_are_kept(
    loaded: Callable[..., PreTrainedModel], model_type: str, name: str, part: str
) -> None:
    model = loaded(model_type, name)
    skeleton = skeleton_of(model).model
    built = dict(skeleton.named_parameters())
    stored = {name: p for name, p in model.named_parameters() if isinstance(p, StoredWeight)}
    assert any(getattr(weight, part) for weight in stored.values())
    for key, weight in stored.items():
        like = built[key]
        assert isinstance(like, StoredWeight)
        for kept in ("form", "shape", "dtype", "transposed", "input_scale"):
            assert getattr(like, kept) == getattr(weight, kept), (key, kept)


def test_no_weight_is_unpacked_of_what_is_built_anew(
    loaded: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their values would take the memory of the dense model: latent attention reads its weights dense."""
    skeleton = skeleton_of(loaded("deepseek_v3", "fp8-blocks")).model
    monkeypatch.delattr(StoredWeight, "dense")
    assert any(operators["npu.npu_transpose_batchmatmul"] for operators in launches(skeleton))


def test_layers_whose_formats_differ_are_built_for_themselves(loaded: Callable[..., PreTrainedModel]) -> None:
    model = loaded("llama", "slim-w8a8-dynamic", num_hidden_layers=6)
    assert skeleton_of(model).representatives == (0, 1, 1, 1, 1, 2)
    layer = model.model.layers[3].mlp.down_proj
    layer.weight = nn.Parameter(as_dense(layer.weight), requires_grad=False)
    skeleton = skeleton_of(model)
    assert skeleton.representatives == (0, 1, 1, 3, 1, 4)
    assert not isinstance(skeleton.model.model.layers[3].mlp.down_proj.weight, StoredWeight)


def test_scales_that_weights_share_tell_layers_apart(loaded: Callable[..., PreTrainedModel]) -> None:
    """Query, key and value are merged where they round their inputs alike."""
    model = loaded("llama", "slim-w8a8-static", num_hidden_layers=2)
    formats = stored_formats(model)
    first, second = marks_of_layers(model, formats)
    assert first == second, "by their structure, not by the numbers"
    name = "model.layers.1.mlp.down_proj.weight"
    step, offset = formats[name][2]
    formats[name][2] = [2 * step, offset]
    first, second = marks_of_layers(model, formats)
    assert first == second, "both are bfloat16 numbers"
    formats[name][2] = [step * (1 + 2**-12), offset]
    first, second = marks_of_layers(model, formats)
    assert first != second, "a norm rounds by the first alone"
    formats[name][2] = [step, offset]
    formats["model.layers.1.self_attn.q_proj.weight"][2] = [0.5, 3]
    first, second = marks_of_layers(model, formats)
    assert first != second


def test_inputs_that_keep_16_bits_are_among_the_refused_routes(loaded: Callable[..., PreTrainedModel]) -> None:
    found = explain(loaded("qwen3_moe", "ct-w8a8-dynamic-asym"), target="npu", torchair=False, verify="off")
    (section,) = (section for section in npu_sections(found) if section.title.startswith("Better routes"))
    said = dict(section.rows)
    why = "weights with zeros of their own; beside rows of int8 there is none"
    assert said["npu_grouped_matmul"].splitlines() == [f"npu_grouped_matmul: {why}", "in model.layers.*.mlp.experts"]
    assert said["npu_linear"].startswith(f"npu_quant_matmul: {why}\nin model.layers.*")


@pytest.mark.torchair
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("slim-w8a8-static", {"QuantBatchMatmulV3": 4}),
        ("slim-w8a8-dynamic", {"QuantBatchMatmulV3": 4}),
        ("ct-w4a16", {"WeightQuantBatchMatmulV2": 4}),
    ],
)
def test_torchair_s_table(loaded: Callable[..., PreTrainedModel], name: str, kernels: dict[str, int]) -> None:
    model = loaded("llama", name)
    report = npu_graph.graph_engine_report(model, (0, 1), CompileOptions(target="npu"))
    assert report.unavailable == ""
    for kind in report.layers:
        assert "MatMul" not in kind.types and kernels.items() <= kind.types.items(), kind.types
