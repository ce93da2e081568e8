"""Whole models with int8 products for an NPU: the formula's numbers, the self-check, and mistakes that it finds."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from npu_calls import illegal_calls
from quantized_checkpoints import quantize_folder
from quantized_graphs import int8_reference, plain_reference, program_of, quantized, row_errors_of, stored
from quantized_oracle import inputs_of_8_bits

import torch_pagoda as pagoda
from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler.build import build_program, build_unpacked
from torch_pagoda.compiler.compile import compile_program
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.targets.npu.weights import quantized_weights, weights
from torch_pagoda.compiler.targets.npu.weights.weights import plan_weights, prepare_weights
from torch_pagoda.compiler.verify.self_check import WEIGHT_TOLERANCE, check, reference_of_model
from torch_pagoda.passes import UnsupportedModel
from torch_pagoda.passes.lower.npu.quantized import quantized_linears
from torch_pagoda.runtime.ops.linear.quantized_weight import Quantization
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight
from torch_pagoda.runtime.ops.npu.int4 import pack_int4, unpack_int4

from legal_models import build_legal_model

npu, aten = torch.ops.npu, torch.ops.aten
MODELS = ("llama", "qwen3_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "gpt_neox")))


@pytest.mark.parametrize("model_type", MODELS)
def test_the_logits_are_those_of_int8(model_type):
    _, traced, _ = quantized(model_type)
    errors = row_errors_of(program_of(traced), int8_reference(model_type))
    # A number that lies between two steps falls to either side by float32's rounding: a row in five has one, and
    # where there are experts one in three.
    assert errors.median() < 1e-5
    assert errors.quantile(0.6) < 1e-3
    assert errors.quantile(0.97) < 0.1


@pytest.mark.parametrize("model_type", MODELS)
def test_the_self_check_takes_what_rounding_does(model_type):
    _, traced, _ = quantized(model_type)
    verdict = check(program_of(traced), plain_reference(model_type), weight_bits=8)
    assert verdict.ok
    errors = row_errors_of(program_of(traced), plain_reference(model_type))
    assert errors.median() < 0.2 * WEIGHT_TOLERANCE[8]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_graphs_that_are_captured_as_they_are(model_type):
    _, traced, _ = quantized(model_type, graph_mode="aclgraph")
    assert illegal_calls(traced, traced.npu) == []
    errors = row_errors_of(program_of(traced), int8_reference(model_type))
    assert errors.median() < 1e-5 and errors.quantile(0.97) < 0.1


def right_half(traced):
    fused = set()
    for node in traced.graph.nodes:
        if node.target is npu.npu_dequant_swiglu_quant.default:
            node.kwargs = {**node.kwargs, "activate_left": False}
        elif node.target is npu.npu_grouped_matmul_swiglu_quant_v2.default:
            fused.add(node.args[1][0].name)
    if fused:  # which always activates the left one
        prepare_weights(traced, fractal_nz=False, release=False)
    for inputs in traced.notes.quantized:
        for name in (inputs.numbers, inputs.scales) if inputs.numbers in fused else ():
            both = traced.constants[name]
            traced.constants[name] = both.roll(both.shape[-1] // 2, -1)


def rows_of_others(traced):
    for node in list(traced.graph.nodes):
        if node.target is npu.npu_quant_matmul.default:
            with traced.before(node):
                rolled = traced.call(aten.roll.default, node.kwargs["pertoken_scale"], [1], [0])
            node.kwargs = {**node.kwargs, "pertoken_scale": rolled}
        elif node.target is npu.npu_grouped_matmul.default:
            with traced.before(node):
                rolled = traced.call(aten.roll.default, node.kwargs["per_token_scale"][0], [1], [0])
            node.kwargs = {**node.kwargs, "per_token_scale": [rolled]}


def scales_of_others(traced):
    prepare_weights(traced, fractal_nz=False, release=False)
    for inputs in traced.notes.quantized:
        traced.constants[inputs.scales] = traced.constants[inputs.scales].roll(1)


def large_scales(traced):
    prepare_weights(traced, fractal_nz=False, release=False)
    for inputs in traced.notes.quantized:
        traced.constants[inputs.scales] *= 1.03


@pytest.mark.parametrize("mistake", [right_half, rows_of_others, scales_of_others], ids=lambda f: f.__name__)
@pytest.mark.parametrize("model_type", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_mistakes_are_no_rounding(model_type, mistake):
    _, traced, _ = quantized(model_type)
    wrong = traced.copy()
    mistake(wrong)
    program = program_of(wrong)
    assert not check(program, plain_reference(model_type), weight_bits=8).ok
    assert row_errors_of(program, int8_reference(model_type)).quantile(0.1) > 0.3


def test_scales_that_are_slightly_wrong_show_beside_the_formula():
    _, traced, _ = quantized("llama")
    wrong = traced.copy()
    large_scales(wrong)
    program = program_of(wrong)
    assert check(program, plain_reference("llama"), weight_bits=8).ok, "too little for the self-check"
    assert row_errors_of(program, int8_reference("llama")).quantile(0.1) > 0.01


@pytest.mark.parametrize("mistake", ["scales of others", "shifted numbers", "halves"])
def test_weights_are_compared_when_they_are_made(mistake, monkeypatch):
    made = quantized_weights.make_inputs

    def wrongly(weight, inputs, bias=None):
        tensors = made(weight, inputs, bias)
        if mistake == "scales of others":
            tensors[inputs.scales] = tensors[inputs.scales].roll(1)
        elif mistake == "shifted numbers":
            tensors[inputs.numbers] = tensors[inputs.numbers].clamp(-126, 126) + 1
        else:
            tensors[inputs.scales] = tensors[inputs.scales] / 2
        return tensors

    monkeypatch.setattr(weights, "make_inputs", wrongly)
    _, traced, _ = quantized("llama")
    with pytest.raises(UnsupportedModel, match="are wrong after quantization to 8 bits"):
        prepare_weights(traced.copy(), fractal_nz=False, release=False, check=True)


@pytest.mark.parametrize("build", [build_program, compile_program])
@pytest.mark.parametrize("release", [False, True])
def test_sources_are_freed_only_by_their_owner(release, build):
    model = build_legal_model("llama", dtype=torch.bfloat16, num_hidden_layers=1)
    options = CompileOptions(target="npu", quantization="int8", verify="off", codegen="none")
    before = sum(p.numel() for p in model.parameters())
    program = build(model, options, owns_weights=release)
    left = sum(p.numel() for p in model.parameters())
    kept = model.get_input_embeddings().weight.numel() + 3 * model.config.hidden_size
    assert left == (kept if release else before)
    assert len(program.copied_weights) == (0 if release else 8)


def test_int8_matrices_go_to_nz():
    _, traced, _ = quantized("llama")
    copy = traced.copy()
    prepare_weights(copy, fractal_nz=False, release=False)
    plans = {plan.name: plan for plan in plan_weights(copy)}
    numbers = [plans[inputs.numbers] for inputs in copy.notes.quantized]
    assert numbers and all(plan.fractal_nz and not plan.contiguous for plan in numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_a_bias_keeps_its_dtype_and_results_are_asked_for(dtype):
    model = build_legal_model("qwen2", dtype=dtype)
    report = CompileReport("qwen2")
    options = CompileOptions(target="npu", quantization="int8", codegen="none")
    traced = build_unpacked(model, options, report=report).traced
    assert report.verdict.ok and report.verdict.tolerance == WEIGHT_TOLERANCE[8]
    nodes = [n for n in traced.graph.nodes if n.target is npu.npu_quant_matmul.default]
    assert len(nodes) == 9 and sum(n.kwargs["bias"] is not None for n in nodes) == 2
    assert {n.kwargs["output_dtype"] for n in nodes} == {15 if dtype is torch.bfloat16 else 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("llama")
    build_legal_model("llama", dtype=torch.bfloat16).save_pretrained(made)
    return made


def test_a_checkpoint_is_rounded_and_served(folder):
    llm = pagoda.LLM(str(folder), target="npu", quantization="int8", num_blocks=4, max_num_seqs=2)
    assert llm.compile_report.verdict.ok
    (output,) = llm.generate([[4, 5, 6]], pagoda.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize("name", ["slim-w8a8-dynamic", pytest.param("ct-w8a8-dynamic", marks=pytest.mark.slow)])
def test_stored_numbers_are_served_as_they_are(name, tmp_path):
    model_folder = tmp_path / "model"
    build_legal_model("llama", dtype=torch.bfloat16).save_pretrained(model_folder)
    quantize_folder(model_folder, name)
    model = load_model(str(model_folder), "auto", False, torch.device("cpu"))
    stored = model.model.layers[0].mlp.down_proj.weight
    assert isinstance(stored, StoredWeight) and stored.form.input_bits == 8
    expected = stored.codes.view(torch.int8) ^ -128, stored.scales.flatten()
    report = CompileReport("llama")
    options = CompileOptions(target="npu", codegen="none")
    traced = build_unpacked(model, options, report=report, owns_weights=True).traced
    record = next(record for record in report.passes if record.name == "quantize_npu_linears")
    assert record.matches == 8 and report.verdict.ok and report.verdict.tolerance == WEIGHT_TOLERANCE[8]
    found = [
        inputs for inputs in traced.notes.quantized if traced.constants[inputs.numbers].shape == expected[0].T.shape
    ]
    same = [i for i in found if torch.equal(traced.constants[i.numbers], expected[0].T)]
    assert [torch.equal(traced.constants[i.scales], expected[1].float()) for i in same] == [True]
    assert stored.codes.numel() == 0, "freed"


STORED = {
    "ct-w4a16": (4, 32, False),
    "ct-w4a16-row": (4, 0, False),
    "awq": (4, 32, True),
    "gptq-4-order": (4, 32, True),
    "gptq-v2-8": (8, 32, True),
    "ct-w8a8": (8, 0, False),
}
"""Format → bits, inputs that share a scale, and whether codes have zeros."""
QUICK = ("gptq-4-order",)


def stored_program(folder, name, dtype, model_type="llama"):
    build_legal_model(model_type, dtype=dtype).save_pretrained(folder)
    quantize_folder(folder, name)
    model = load_model(str(folder), "auto", False, torch.device("cpu"))
    report = CompileReport(model_type)
    options = CompileOptions(target="npu", codegen="none")
    return build_unpacked(model, options, report=report, owns_weights=True), report


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STORED]
)
def test_stored_weights_are_read_as_they_are(name, tmp_path):
    built, report = stored_program(tmp_path, name, torch.bfloat16)
    record = next(record for record in report.passes if record.name == "quantize_npu_linears")
    assert record.matches == 8, record.rejections
    schemes = {i.quantization for i in built.traced.notes.quantized}
    assert schemes == {Quantization(*STORED[name][:2], 16, STORED[name][2])}
    # Compared as floats are: nothing is rounded that the checkpoint does not store so.
    assert report.verdict.ok and report.verdict.tolerance < 0.3
    orders = [n for n in built.traced.placeholders if n.name.startswith("order_")]
    assert len(orders) == (8 if name == "gptq-4-order" else 0)
    assert illegal_calls(built.traced, built.traced.npu) == []


@pytest.mark.slow
def test_stored_experts_are_read_as_they_are(tmp_path):
    built, report = stored_program(tmp_path, "slim-w8a8-dynamic", torch.bfloat16, "qwen3_moe")
    record = next(record for record in report.passes if record.name == "quantize_npu_experts")
    assert record.matches == 4 and report.verdict.ok, record.rejections
    experts = [i for i in built.traced.notes.quantized if built.traced.constants[i.numbers].dim() == 3]
    assert len(experts) == 4 and all(i.stored for i in experts)
    # Those of the products that are fused with the activation, and of the others.
    assert Counter(i.scale_dtype for i in experts) == {torch.float32: 2, torch.bfloat16: 2}
    assert illegal_calls(built.traced, built.traced.npu) == []


def experts_of(traced):
    return [i for i in traced.notes.quantized if traced.placeholder(i.source).meta["example_value"].dim() == 3]


def test_w4a8_experts_are_what_the_formula_says():
    model, traced, report = stored("qwen3_moe", "slim-w4a8-experts")
    record = next(record for record in report.passes if record.name == "quantize_npu_experts")
    experts = experts_of(traced)
    assert record.matches == len(experts) > 0 and not record.rejections, record.rejections
    assert {i.quantization for i in experts} == {Quantization(4, 0, 8)} and all(i.sums for i in experts)
    assert illegal_calls(traced, traced.npu) == []
    for node in traced.graph.nodes:
        if node.target is npu.npu_grouped_matmul.default:
            assert {n.op for name in ("scale", "bias") for n in node.kwargs[name]} == {"placeholder"}
            assert node.kwargs["group_list_type"] == 1
    with inputs_of_8_bits(model):
        reference = reference_of_model(model)
    errors = row_errors_of(program_of(traced), reference)
    assert errors.median() < 1e-5 and errors.quantile(0.6) < 1e-3 and errors.quantile(0.97) < 0.1


def no_sums(tensors, inputs):
    tensors[inputs.sums] = torch.zeros_like(tensors[inputs.sums])


def sums_of_others(tensors, inputs):
    tensors[inputs.sums] = tensors[inputs.sums].roll(1, -1)


def exchanged_halves(tensors, inputs):
    numbers = unpack_int4(tensors[inputs.numbers])
    tensors[inputs.numbers] = pack_int4(numbers.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


def of_other_experts(tensors, inputs):
    tensors[inputs.numbers] = tensors[inputs.numbers].roll(1, 0)


@pytest.mark.parametrize("mistake", [no_sums, sums_of_others, exchanged_halves, of_other_experts])
def test_mistakes_of_w4a8_experts_are_found(mistake, monkeypatch):
    made = quantized_weights.make_inputs
    _, traced, _ = stored("qwen3_moe", "slim-w4a8-experts")

    def wrongly(weight, inputs, bias=None):
        tensors = made(weight, inputs, bias)
        if inputs.sums and weight.dim() == 3:
            mistake(tensors, inputs)
        return tensors

    monkeypatch.setattr(weights, "make_inputs", wrongly)
    with pytest.raises(UnsupportedModel, match="are wrong"):
        prepare_weights(traced.copy(), fractal_nz=False, release=False, check=True)


@pytest.mark.parametrize(
    ("model_type", "count"), [("qwen3_moe", 4), pytest.param("deepseek_v3", 2, marks=pytest.mark.slow)]
)
def test_w4a8_experts_are_compared_as_weights_with_inputs_of_8_bits(model_type, count, tmp_path):
    built, report = stored_program(tmp_path, "slim-w4a8-experts", torch.bfloat16, model_type)
    assert report.verdict.ok and report.verdict.tolerance == WEIGHT_TOLERANCE[8], "4 bits of weights are exact"
    constants = built.traced.constants
    made = [i for i in built.traced.notes.quantized if i.sums]
    assert len(made) == count and {constants[i.scales].dtype for i in made} == {torch.int64}


AWQ = pytest.param("awq", (4, 32, True), marks=pytest.mark.slow)
SLIM = pytest.param("slim-w8a16", (8, 0, False), marks=pytest.mark.slow)
ZEROS = ("ct-w8a8-dynamic-asym", (8, 0, True))
"""For 8 bits of inputs, which no operator takes beside zeros."""


@pytest.mark.parametrize(("name", "scheme"), [("ct-w4a16", (4, 32, False)), AWQ, SLIM, ZEROS])
def test_experts_that_no_rows_of_int8_fit_keep_16_bits(name, scheme):
    model, traced, report = stored("qwen3_moe", name, moe_intermediate_size=128)
    record = next(record for record in report.passes if record.name == "quantize_npu_experts")
    assert record.matches == 4, record.rejections
    assert {i.quantization for i in experts_of(traced)} == {Quantization(*scheme[:2], 16, scheme[2])}
    assert illegal_calls(traced, traced.npu) == []
    assert row_errors_of(program_of(traced), reference_of_model(model)).max() < 1e-3


def test_matrices_that_are_unpacked_as_they_are_read_stay_in_rows():
    _, traced, _ = quantized("qwen3_moe", "int8-weight-only")
    copy = traced.copy()
    prepare_weights(copy, fractal_nz=False, release=False)
    plans = {plan.name: plan for plan in plan_weights(copy)}
    numbers = [plans[inputs.numbers] for inputs in experts_of(traced)]
    assert len(numbers) == 4 and not any(plan.fractal_nz for plan in numbers)


@pytest.mark.slow
def test_mxfp4_experts_are_unpacked_with_the_reason(tmp_path):
    built, report = stored_program(tmp_path, "mxfp4-experts", torch.bfloat16, "gpt_oss")
    record = next(record for record in report.passes if record.name == "quantize_npu_experts")
    reasons = {rejection.reason for rejection in record.rejections}
    assert record.matches == 0 and reasons == {"no operator for experts that are stored as e2m1/g32/bf16"}
    assert report.verdict.ok and not [i for i in built.traced.notes.quantized if i.stored]


@pytest.mark.slow
def test_latent_attention_is_absorbed_over_stored_weights(tmp_path, caplog):
    built, report = stored_program(tmp_path, "slim-w8a8-dynamic", torch.bfloat16, "deepseek_v3")
    assert "quantized weights of latent attention" in caplog.text
    names = {str(node.target) for node in built.traced.graph.nodes}
    assert "npu.npu_mla_prolog_v3.default" in names and "npu.npu_quant_matmul.default" in names
    assert report.verdict.ok and illegal_calls(built.traced, built.traced.npu) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8-blocks", "ct-mxfp4"])
def test_what_no_operator_reads_is_unpacked_with_the_reason(name, tmp_path):
    built, report = stored_program(tmp_path, name, torch.bfloat16)
    record = next(record for record in report.passes if record.name == "quantize_npu_linears")
    assert record.matches == 0 and len(record.rejections) == 8
    assert all("no operator for weights that are stored as e" in r.reason for r in record.rejections)
    assert report.verdict.ok and built.traced.notes.quantized == []


@pytest.mark.parametrize(
    "mistake",
    [
        "sign of the offsets",
        "order of the inputs",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("scales of others", "groups")),
    ],
)
def test_mistakes_of_stored_weights_are_found(mistake, tmp_path, monkeypatch):
    made = quantized_weights.make_inputs

    def wrongly(weight, inputs, bias=None):
        tensors = made(weight, inputs, bias)
        if mistake == "sign of the offsets":
            tensors[inputs.offsets] = -tensors[inputs.offsets]
        elif mistake == "scales of others":
            tensors[inputs.scales] = tensors[inputs.scales].roll(1, -1)
        elif mistake == "groups":
            tensors[inputs.scales] = tensors[inputs.scales].roll(1, 0)
        return tensors

    monkeypatch.setattr(weights, "make_inputs", wrongly)
    if mistake == "order of the inputs":
        monkeypatch.setattr(quantized_linears._Products, "_in_order", lambda self, site, rows, order: rows)
    words = "logits differ" if mistake == "order of the inputs" else "are wrong after quantization to 4 bits"
    with pytest.raises(UnsupportedModel, match=words):
        stored_program(tmp_path, "gptq-4-order", torch.bfloat16)


@pytest.mark.parametrize(
    "quantization", [pytest.param("int8-weight-only", marks=pytest.mark.slow), "int4-weight-only"]
)
def test_weights_alone_are_rounded(quantization):
    _, traced, _ = quantized("qwen2", quantization)
    reference = plain_reference("qwen2")
    bits = 4 if quantization.startswith("int4") else 8
    verdict = check(program_of(traced), reference, weight_bits=bits)
    errors = row_errors_of(program_of(traced), reference)
    assert verdict.ok and errors.median() < {8: 0.15, 4: 1.2}[bits]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"quantization": "int4"},
            "quantization='int4' cannot be used with target='npu': NPU matrix products do not support it",
        ),
        (
            {"quantization": "int8", "group_size": 128},
            "group_size=128 cannot be used with target='npu' with quantization='int8'",
        ),
    ],
)
def test_options_that_an_npu_does_not_take(options, words):
    with pytest.raises(ValueError, match=words):
        CompileOptions(target="npu", **options).for_device("cpu")


def test_float32_is_refused_with_the_reason():
    model = build_legal_model("llama", num_hidden_layers=1)
    options = CompileOptions(target="npu", quantization="int8", verify="off", codegen="none")
    with pytest.raises(
        UnsupportedModel, match=r"finds no linear layer that it can quantize: .*input is torch\.float32"
    ):
        build_program(model, options)
