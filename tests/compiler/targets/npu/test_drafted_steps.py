"""Decode steps that verify drafts run by static and captured graphs of their own, and give the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafters import Oracle, draft
from lowered_models import LIMITS, PROMPTS, lowered
from static_routes import AsItIs

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.link.linker import LinkedProgram, link
from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import AclGraphs
from torch_pagoda.compiler.targets.npu.flat_graph import cache_inputs
from torch_pagoda.compiler.targets.npu.ge.ge_route import GeGraphs
from torch_pagoda.compiler.targets.npu.route import Route
from torch_pagoda.compiler.targets.npu.sizes.step_padding import StepSize
from torch_pagoda.compiler.targets.npu.warm_up.steps import SpareRoom, StepShape, chain_blocks, warm_up_step
from torch_pagoda.npu_tools.offline.decode_graphs import GraphCounts, static_decode_graph
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from legal_models import build_legal_model

CONFIG = {"method": "ngram", "num_speculative_tokens": 3}
SIZES = {**LIMITS, "max_num_batched_tokens": 40}


def engine_of(route: Route, **options: Any) -> Engine:
    assert route.traced.npu is not None
    return Engine(link(route.traced, route), block_size=route.traced.npu.block_size, **{**SIZES, **options})


def tokens_of(engine: Engine) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 17, 12, 6)]
    outputs = [output.outputs[0] for output in engine.generate(PROMPTS, params)]
    assert not any(output.error for output in outputs)
    return [output.token_ids for output in outputs]


def drafted(route: Route, expected: list[list[int]], right: float) -> tuple[Engine, dict[str, int | float]]:
    """What an engine did whose drafts are so often right; its tokens are the expected ones."""
    engine = engine_of(route, speculative_config=CONFIG)
    answers = {(tuple(prompt), None): tokens for prompt, tokens in zip(PROMPTS, expected, strict=True)}
    draft(engine, Oracle(answers, right, engine.runner.program.vocab_size), 3, num_planned=3)
    assert tokens_of(engine) == expected
    return engine, engine.stats()


def outcomes(engine: Engine) -> dict[str, str]:
    assert isinstance(engine.runner.program, LinkedProgram)
    return {size.name: size.reason for size in engine.runner.program.report.sizes}


@pytest.mark.parametrize("right", [1.0, 0.6])
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss"])
def test_verification_has_static_graphs(model_type, right):
    traced = lowered(model_type)[1]
    expected = tokens_of(engine_of(AsItIs(traced, sequences_per_graph=2)))
    route = AsItIs(traced, sequences_per_graph=2)
    engine, stats = drafted(route, expected, right)
    assert route.verification is not None and not route.verification.dropped
    names = [f"{kind} steps of {n} sequences" for kind in ("decode", "verification") for n in (4, 2)]
    assert list(outcomes(engine))[:4] == names and not any(outcomes(engine).values())
    assert {8, 16} <= set(route.steps), "two and four sequences of four tokens"
    assert stats["spec_decode_num_accepted_tokens"] > 10 and stats["operator_steps"] == 0


@pytest.mark.parametrize("right", [1.0, 0.6])
def test_verification_is_captured(monkeypatch, right):
    traced = lowered("llama", "aclgraph")[1]
    ran: list[tuple[int, int]] = []
    names = [node.name for node in traced.placeholders]

    def graph(*args: Any) -> Any:
        ran.append((args[names.index(traced.input_ids)].shape[1], args[names.index("logits_rows")].shape[0]))
        return traced.module(*args)

    monkeypatch.setattr(AclGraphs, "_compile", lambda self, scheduled: graph)
    expected = tokens_of(engine_of(AclGraphs(traced, traced.module, 8)))
    route = AclGraphs(traced, traced.module, 12)
    engine, stats = drafted(route, expected, right)
    assert route.drafted == (8, 12, 16) and all(n % 4 == 0 for n in route.drafted)
    assert [name for name in outcomes(engine) if "verification" in name] == [
        f"verification steps of {n} tokens" for n in (16, 12, 8)
    ]
    assert not any(outcomes(engine).values())
    assert {(n, n) for n in (8, 12, 16)} <= set(ran[-40:]) and stats["operator_steps"] == 0


def test_a_wrong_verification_graph_is_left_out_by_name(monkeypatch):
    """Its steps run operator by operator, and the tokens stay right."""
    traced = lowered("llama", "aclgraph")[1]
    names = [node.name for node in traced.placeholders]

    def graph(*args: Any) -> Any:
        outputs = traced.module(*args)
        if args[names.index("logits_rows")].shape[0] != 16:
            return outputs
        logits = outputs[0].clone()
        logits[0, 7] = logits[0, 7].flip(0)  # a row that no decode step requests
        return (logits, *outputs[1:])

    expected = tokens_of(engine_of(AclGraphs(traced, traced.module, 0)))
    monkeypatch.setattr(AclGraphs, "_compile", lambda self, scheduled: graph)
    route = AclGraphs(traced, traced.module, 12)
    engine, stats = drafted(route, expected, 1.0)
    wrong = {name: reason for name, reason in outcomes(engine).items() if reason}
    assert list(wrong) == ["verification steps of 16 tokens"] and route.drafted == (8, 12)
    assert stats["operator_steps"] > 0


def test_int8_caches_have_no_drafts():
    """Their kernel takes one token of each sequence."""
    options = CompileOptions(codegen="none", target="npu", verify="off", kv_cache_dtype="int8")
    program = build_program(build_legal_model("llama").bfloat16(), options)
    engine = Engine(program, **{**SIZES, "num_blocks": 8}, speculative_config=CONFIG)
    tokens_of(engine)
    stats = engine.stats()
    assert stats["spec_decode_num_drafts"] == 0 and stats["undrafted_one_query"] > 0


def test_which_steps():
    route = AsItIs(lowered()[1])
    route.reserve(64, 2048, 4000, 3)
    assert route.verification is not None and route.verification.planned == tuple(range(8, 65, 8))
    assert route.size_for(StepSize(20, 5, 20, 9)) == StepSize(32, 8, 32, 250)
    assert route.size_for(StepSize(32, 8, 32, 250)) == StepSize(32, 8, 32, 250)
    assert route.size_for(StepSize(5, 5, 5, 9)) == StepSize(8, 8, 8, 250), "a decode step"
    # Eight sequences, one of them without drafts: dummy tokens belong to dummy sequences.
    assert route.verification.size_for(StepSize(29, 8, 29, 9)) is None
    assert route.verification.size_for(StepSize(29, 7, 29, 9)) == StepSize(32, 8, 32, 250)
    for other in (StepSize(20, 5, 5, 9), StepSize(20, 5, 20, 251), StepSize(300, 65, 300, 9)):
        assert route.verification.size_for(other) is None
    route.reserve(64, 100, 4000, 3)
    assert route.verification.planned == (8, 16, 24), "as many as the tokens of a step allow"
    for limits in ((64, 2048, 4000, 0), (64, 2048, 3, 3), (64, 24, 4000, 3)):
        route.reserve(*limits)
        assert route.verification is None


@pytest.mark.parametrize("variant", [0, 1])
def test_warm_up_has_such_steps(variant):
    shape, longest = StepShape(28, 7, 3), 10  # two sequences in a chain
    room = SpareRoom(4, 9, chain_blocks(shape, longest, 4), longest)
    _, positions, step = warm_up_step(shape, room, 50, variant=variant)
    assert room.holds(step) and step.query_start_loc.diff().tolist() == [4] * 7
    assert torch.equal(step.logits_rows, torch.arange(28)) and sorted(step.seq_lens.tolist()) == [4] * 4 + [8] * 3
    written = dict(zip(step.slot_mapping.tolist(), positions[0].tolist(), strict=True))
    for row, length in zip(step.block_table.tolist(), step.seq_lens.tolist(), strict=True):
        assert [written[row[at // 4] * 4 + at % 4] for at in range(length)] == list(range(length))


@pytest.mark.torchair
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_torchair_converts_verification(model_type):
    traced = lowered(model_type)[1]
    expected = tokens_of(engine_of(AsItIs(traced, sequences_per_graph=4)))
    route = GeGraphs(traced, sequences_per_graph=4, static_decode=True)
    _, stats = drafted(route, expected, 0.8)
    assert route.verification is not None and set(route.verification.graphs) == {4}
    assert not route.verification.dropped and stats["operator_steps"] == 0
    graph = static_decode_graph(traced, sequences=4, drafts=3)
    counts = GraphCounts.of(graph, cache_inputs(traced))
    assert counts.host_nodes == counts.unknown_sizes == counts.cache_copies == 0
