"""Tiny models lowered for an NPU with quantized weights, and the logits of their programs beside others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from quantized_checkpoints import quantize_folder
from quantized_oracle import int8_linears
from torch import fx
from transformers import PreTrainedModel

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler.link.linker import LinkedProgram, link
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.targets.npu.weights.weights import prepare_weights
from torch_pagoda.compiler.verify.self_check import Reference, compared_steps, reference_of_model
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.record import PassRecord
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.linear.stored_weight import as_dense

from legal_models import build_legal_model
from shared_graphs import capture

TARGET = NpuTarget(block_size=16, float32_as=torch.bfloat16)
ROUNDED_LLAMA = {
    "add_rms_norm_dynamic_quant": 2,
    "quant_matmul": 4,
    "apply_rotary_pos_emb": 1,
    "scatter_pa_kv_cache": 1,
    "fused_infer_attention_score": 1,
    "dynamic_quant": 1,
    "dequant_swiglu_quant": 1,
}
"""Launches of a layer, but for the first, whose products are rounded."""


def record_of(report: CompileReport, name: str) -> PassRecord:
    """The record of a pass."""
    return next(record for record in report.passes if record.name == name)


def nodes_of(traced: TracedGraph, operator: Any) -> list[fx.Node]:
    """The calls of an operator, in order."""
    return [node for node in traced.graph.nodes if node.target is operator.default]


@cache
def quantized(
    model_type: str,
    quantization: str = "int8",
    opt_level: int = 2,
    graph_mode: str = "ge",
    soc: str = TARGET.soc,
    **overrides: Any,
) -> tuple[PreTrainedModel, TracedGraph, CompileReport]:
    """The model, its lowered graph and the report; copy the graph to change it."""
    model = build_legal_model(model_type, **overrides)
    captured = capture(model)
    captured.traced.npu = replace(TARGET, graph_mode=graph_mode, soc=soc)
    report = CompileReport(model_type)
    options = CompileOptions(
        codegen="none", target="npu", verify="off", quantization=quantization, opt_level=opt_level
    )
    return model, run_pipeline(captured, options, None, report), report


@cache
def stored(
    model_type: str,
    name: str,
    dtype: torch.dtype = torch.float32,
    soc: str = TARGET.soc,
    graph_mode: str = "ge",
    input_bits: int | None = None,
    **overrides: Any,
) -> tuple[PreTrainedModel, TracedGraph, CompileReport]:
    """Likewise of a checkpoint in a format of ``quantized_checkpoints``, with what its weights mean as the model."""
    model = build_legal_model(model_type, dtype=dtype, **overrides)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        quantize_folder(Path(folder), name)
        loaded = load_model(folder, dtype, False, torch.device("cpu"))
    captured = capture(loaded)
    captured.traced.npu = replace(TARGET, soc=soc, graph_mode=graph_mode)
    report = CompileReport(model_type)
    options = CompileOptions(codegen="none", target="npu", verify="off", input_bits=input_bits)
    traced = run_pipeline(captured, options, None, report)
    model.load_state_dict({key: as_dense(tensor) for key, tensor in loaded.state_dict().items()})
    return model, traced, report


def program_of(traced: TracedGraph) -> LinkedProgram:
    """The program of a copy of a lowered graph."""
    copy = traced.copy()
    copy.recompile()
    prepare_weights(copy, fractal_nz=True, release=False, check=True)
    return link(copy, copy.module)


@cache
def plain_reference(model_type: str, **overrides: Any) -> Reference:
    """What the model of ``quantized`` says by itself."""
    return reference_of_model(quantized(model_type, **overrides)[0])


@cache
def int8_reference(model_type: str) -> Reference:
    """What the model says with linear layers of 8 bits."""
    model = quantized(model_type)[0]
    with int8_linears(model):
        return reference_of_model(model)


def row_errors_of(program: LinkedProgram, reference: Reference) -> torch.Tensor:
    """Of each row of logits the largest error, in standard deviations of the row."""
    errors = []
    for _, logits, expected in compared_steps(program, reference):
        errors.append((logits - expected).abs().amax(-1) / expected.std(-1))
    return torch.cat(errors)
