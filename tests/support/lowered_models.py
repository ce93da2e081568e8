"""Tiny models lowered for an NPU, in float32 that counts as bfloat16, so that numbers can be compared closely."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.passes import TracedGraph
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.requests.outputs import RequestOutput
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from legal_models import build_legal_model
from shared_graphs import capture

PROMPTS = [torch.randint(3, 250, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 5, 23, 7)]
LIMITS = {"num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 19}


@cache
def lowered(
    model_type: str = "llama", graph_mode: str = "ge", block_size: int = 16, **overrides: Any
) -> tuple[PreTrainedModel, TracedGraph]:
    """The model and its lowered graph, made once per process; copy the graph to change it or its constants."""
    model = build_legal_model(model_type, **overrides)
    captured = capture(model)
    captured.traced.npu = NpuTarget(block_size=block_size, graph_mode=graph_mode, float32_as=torch.bfloat16)
    options = CompileOptions(codegen="none", target="npu", verify="off")
    return model, run_pipeline(captured, options, None, CompileReport(model_type))


def served(traced: TracedGraph, run: Any, max_tokens: int = 3, **limits: Any) -> list[RequestOutput]:
    """What an engine makes of ``PROMPTS`` with ``run``, a function of the graph's placeholders: prefill in chunks,
    steps of prefill and decode together, decode of fewer and fewer sequences."""
    assert traced.npu is not None
    engine = Engine(link(traced, run), block_size=traced.npu.block_size, **{**LIMITS, **limits})
    lengths = range(max_tokens, max_tokens + len(PROMPTS))
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=3) for n in lengths]
    return engine.generate(PROMPTS, params)


def assert_same(found: list[RequestOutput], expected: list[RequestOutput], tolerance: float = 1e-5) -> None:
    """The same tokens, and log-probabilities within ``tolerance``."""
    for output, other in zip(found, expected, strict=True):
        (a,), (b,) = output.outputs, other.outputs
        assert a.error is None, a.error
        assert a.token_ids == b.token_ids
        for step, wanted in zip(a.logprobs, b.logprobs, strict=True):
            assert step.keys() == wanted.keys()
            for token, entry in step.items():
                assert abs(entry.logprob - wanted[token].logprob) < tolerance
