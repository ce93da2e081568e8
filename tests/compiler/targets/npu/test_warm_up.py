"""Warm-up: every planned size is ready and compared before requests come; what is wrong is left out by name."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lowered_models import LIMITS, PROMPTS, assert_same, lowered, served

from torch_pagoda.compiler.link.linker import LinkedProgram, link
from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import AclGraphs
from torch_pagoda.compiler.targets.npu.ge.ge_route import GeGraphs
from torch_pagoda.compiler.targets.npu.route import Route, Run
from torch_pagoda.compiler.targets.npu.sizes.step_padding import StepSize
from torch_pagoda.compiler.targets.npu.warm_up import warm_up as warm_up_file
from torch_pagoda.compiler.targets.npu.warm_up.steps import (
    SpareRoom,
    StepShape,
    chain_blocks,
    fitting_shape,
    shares_of,
    warm_up_step,
)
from torch_pagoda.compiler.targets.npu.weights.weights import prepare_weights
from torch_pagoda.compiler.tolerance import Tolerance
from torch_pagoda.passes import TracedGraph
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.npu_errors.device_lost import DeviceLost
from torch_pagoda.runtime.phases import watched
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

# The steps


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 70), st.integers(0, 3), st.booleans())
def test_steps_lie_in_the_room_and_are_what_was_asked_for(tokens, sequences, longest, variant, has_state):
    shape = fitting_shape(tokens, sequences, longest)
    needed = chain_blocks(shape, longest, 4)
    room = SpareRoom(4, 9, needed, longest, read_slot=6, write_slot=7, shared_slot=5)
    ids, positions, step = warm_up_step(shape, room, 50, variant=variant, has_state=has_state)
    lengths = step.query_start_loc.diff()
    assert ids.shape == positions.shape == (1, shape.tokens) and len(lengths) == shape.sequences
    assert room.holds(step) and int(step.seq_lens.max()) <= longest and int(lengths.min()) >= 1
    assert len(set(step.slot_mapping.tolist())) == shape.tokens, "no slot is written twice"
    # Each sequence reads tokens that the step writes, at the positions that they have.
    written = dict(zip(step.slot_mapping.tolist(), positions[0].tolist(), strict=True))
    for row, length in zip(step.block_table.tolist(), step.seq_lens.tolist(), strict=True):
        assert [written[row[at // 4] * 4 + at % 4] for at in range(length)] == list(range(length))


def test_shares_have_decoding_sequences_and_chunks_with_and_without_context():
    assert shares_of(StepShape(4, 4), 8) == [(0, 0, 1), (0, 1, 1), (0, 2, 1), (0, 3, 1)]
    assert shares_of(StepShape(20, 4), 50) == [(0, 0, 9), (0, 9, 9), (0, 18, 1), (0, 19, 1)]
    assert shares_of(StepShape(20, 3), 8) == [(0, 0, 8), (1, 0, 8), (2, 0, 4)], "sequences are as long as they may be"
    assert fitting_shape(100, 3, 8) == StepShape(24, 3)


def test_a_step_outside_the_room_is_noticed():
    room = SpareRoom(4, 9, 3, 12)
    _, _, step = warm_up_step(StepShape(5, 2), room, 50)
    assert room.holds(step)
    assert not SpareRoom(4, 10, 3, 12).holds(step) and not SpareRoom(4, 8, 2, 12).holds(step)
    step.block_table[1, 0] = 0  # a live block is read
    assert not room.holds(step)


# What becomes of sizes


class Graph:
    """Stands for a compiled graph: notes the sizes that it runs at, and may be wrong."""

    def __init__(self, traced: TracedGraph) -> None:
        self.traced = traced
        self.sizes: list[int] = []
        self.spoil: Any = lambda tokens, args, outputs: outputs

    def __call__(self, *args: Any) -> Any:
        at = [node.name for node in self.traced.placeholders].index(self.traced.input_ids)
        tokens = args[at].shape[1]
        self.sizes.append(tokens)
        return self.spoil(tokens, args, self.traced.module(*args))


def captured(monkeypatch: pytest.MonkeyPatch, model_type: str = "llama", **options: Any) -> tuple[AclGraphs, Graph]:
    traced = lowered(model_type, "aclgraph", **options)[1]
    graph = Graph(traced)
    monkeypatch.setattr(AclGraphs, "_compile", lambda self, scheduled: graph)
    return AclGraphs(traced, traced.module, 4), graph


def compiled(monkeypatch: pytest.MonkeyPatch, model_type: str = "llama") -> tuple[GeGraphs, dict[int, Graph]]:
    traced = lowered(model_type)[1]
    graphs: dict[int, Graph] = {}

    def compile_(self: GeGraphs, length: int) -> Run:
        return graphs.setdefault(length, Graph(traced))

    monkeypatch.setattr(GeGraphs, "_compile", compile_)
    return GeGraphs(traced, sequences_per_graph=2), graphs


def engine_of(route: Route, **limits: Any) -> Engine:
    assert route.traced.npu is not None
    return Engine(link(route.traced, route), block_size=route.traced.npu.block_size, **{**LIMITS, **limits})


def complete(engine: Engine, n: int = 3) -> Any:
    lengths = range(n, n + len(PROMPTS))
    params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True, logprobs=3) for m in lengths]
    return engine.generate(PROMPTS, params)


def program_of(engine: Engine) -> LinkedProgram:
    assert isinstance(engine.runner.program, LinkedProgram)
    return engine.runner.program


def outcomes(engine: Engine) -> dict[str, str]:
    return {size.name: size.reason for size in program_of(engine).report.sizes}


def test_all_sizes_are_captured_before_requests_decode_first(monkeypatch):
    route, graph = captured(monkeypatch)
    engine = engine_of(route)
    assert route.planned == (2, 3, 4, 19) and graph.sizes == [4, 3, 2, 19] * 2
    assert {tokens for tokens, _ in route.captured} == set(route.planned) and route.is_warm
    assert list(outcomes(engine)) == [
        *(f"decode steps of {n} tokens" for n in reversed(route.planned) if n <= 4),
        *(f"mixed steps of {n} tokens" for n in reversed(route.planned) if n > 4),
    ]
    ready = set(route.captured)
    assert_same(complete(engine), served(route.traced, route.traced.module))
    assert route.captured == ready and not route.eager_steps, "nothing is captured while requests wait"
    stats = engine.stats()
    assert (stats["graph_sizes"], stats["graph_sizes_dropped"], stats["operator_steps"]) == (len(ready), 0, 0)
    assert program_of(engine).report.seconds["warm-up"] > 0
    assert max(size.error for size in program_of(engine).report.sizes) < 1e-3


def test_all_graphs_are_compiled_before_requests(monkeypatch):
    route, graphs = compiled(monkeypatch)
    engine = engine_of(route)
    assert list(graphs) == [4, 2]
    assert all(len(graph.sizes) == 2 for graph in graphs.values())
    assert graphs[4].sizes[0] == 4 and graphs[4].sizes[1] == LIMITS["max_num_batched_tokens"] + 1, "one is a dummy"
    assert list(outcomes(engine).values()) == ["", ""]
    assert_same(complete(engine), served(route.traced, route.traced.module))
    assert not route.eager_steps and set(route.graphs) == {2, 4}


def test_lazy_captures_when_a_step_needs_it(monkeypatch):
    route, graph = captured(monkeypatch)
    engine = engine_of(route, npu_warmup="lazy")
    assert not graph.sizes and not outcomes(engine)
    assert_same(complete(engine), served(route.traced, route.traced.module))
    assert route.captured


def test_an_unknown_way_to_warm_up(monkeypatch):
    route, _ = captured(monkeypatch)
    with pytest.raises(ValueError, match="npu_warmup='eager' is unknown; use 'full' or 'lazy'"):
        engine_of(route, npu_warmup="eager")


def scaled(size: int) -> Any:
    """The last asked row of steps of one size is wrong."""

    def spoil(tokens: int, args: Any, outputs: Any) -> Any:
        if tokens != size:
            return outputs
        logits = outputs[0].clone()
        logits[0, 0] *= 1.5
        return (logits, *outputs[1:])

    return spoil


def test_a_size_with_wrong_numbers_is_dropped_by_name_and_requests_are_right(monkeypatch, caplog):
    route, graph = captured(monkeypatch)
    graph.spoil = scaled(4)
    with caplog.at_level(logging.WARNING):
        engine = engine_of(route)
    wrong = {name: reason for name, reason in outcomes(engine).items() if reason}
    assert (
        list(wrong) == ["decode steps of 4 tokens"] and "its logits differ from the operators'" in wrong.popitem()[1]
    )
    assert "decode steps of 4 tokens do not run as a whole graph: its logits differ" in caplog.text
    assert {tokens for tokens, _ in route.captured} == set(route.planned) - {4}
    graph.sizes.clear()
    assert_same(complete(engine), served(route.traced, route.traced.module))
    assert graph.sizes and 4 not in graph.sizes, "its steps run at the next size"
    stats = engine.stats()
    assert stats["graph_sizes_dropped"] == 1 and stats["graph_sizes"] == len(route.planned) - 1


def test_a_wrong_largest_size_runs_operator_by_operator(monkeypatch, caplog):
    route, graph = captured(monkeypatch)
    graph.spoil = scaled(19)
    engine = engine_of(route)
    assert_same(complete(engine), served(route.traced, route.traced.module))
    (reason,) = route.eager_steps
    assert "the size of 19 tokens was dropped: its logits differ" in reason
    assert engine.stats()["operator_steps"] == route.eager_steps[reason] > 0


def test_steps_of_a_dropped_size_are_padded_no_further_than_there_is_room(monkeypatch):
    route, _ = captured(monkeypatch)
    assert route.reserve(4, 32, 100) and route.planned == (2, 4, 16, 32) and route.most_dummies == 16
    next(size for size in route.planned_sizes() if size.name == "mixed steps of 16 tokens").drop("it is wrong")
    fits = route.size_for(StepSize(16, 2, 2, 1))
    assert fits is not None and fits.tokens == 32
    assert route.size_for(StepSize(15, 2, 2, 1)) is None
    assert list(route.eager_steps) == ["the size of 16 tokens was dropped, and the next one has 32"]


def test_a_wrong_ge_graph_is_dropped(monkeypatch, caplog):
    route, graphs = compiled(monkeypatch)
    right = Graph.__call__

    def wrong(self: Graph, *args: Any) -> Any:
        outputs = right(self, *args)
        return scaled(-1)(-1, args, outputs) if self is graphs.get(4) else outputs

    monkeypatch.setattr(Graph, "__call__", wrong)
    engine = engine_of(route)
    assert set(route.graphs) == {2} and "steps of 4 sequences do not run as a whole graph" in caplog.text
    assert_same(complete(engine), served(route.traced, route.traced.module))
    reasons = sorted(route.eager_steps)
    assert reasons[0] == "no graph for 3 sequences is planned"
    assert reasons[1].startswith("the graph for 4 sequences was dropped: its logits differ")


def test_padding_is_not_all_that_is_compared(monkeypatch):
    """Rows behind those of the step's own are nobody's business; the first row that is asked is."""
    for row, dropped in ((0, True), (-1, False)):
        route, graph = captured(monkeypatch)

        def spoil(tokens: int, args: Any, outputs: Any, row: int = row) -> Any:
            logits = outputs[0].clone()
            logits[0, row] += torch.linspace(-1, 1, logits.shape[-1])
            return (logits, *outputs[1:])

        graph.spoil = spoil
        found = outcomes(engine_of(route, max_num_batched_tokens=48))
        # A decode step of 4 tokens has 3 sequences of its own, whose rows come first.
        assert bool(found["decode steps of 4 tokens"]) is dropped


def test_what_is_written_into_caches_is_compared(monkeypatch, caplog):
    route, graph = captured(monkeypatch)
    names = [node.name for node in route.traced.placeholders]

    def spoil(tokens: int, args: Any, outputs: Any) -> Any:
        if tokens == 4:  # the value of one head of one token
            block, offset = divmod(int(args[names.index("slot_mapping")][1]), 16)
            args[names.index("value_cache_1")][block, offset, 0] *= 1.1
        return outputs

    graph.spoil = spoil
    engine = engine_of(route)
    assert "its writes to value_cache_1 differ by" in outcomes(engine)["decode steps of 4 tokens"]
    graph.spoil = lambda tokens, args, outputs: outputs
    assert_same(complete(engine), served(route.traced, route.traced.module))


@pytest.mark.parametrize("block", [0, 5, 23])
def test_a_step_that_writes_into_a_live_block_is_dropped_and_undone(monkeypatch, block):
    route, graph = captured(monkeypatch)
    names = [node.name for node in route.traced.placeholders]

    def spoil(tokens: int, args: Any, outputs: Any) -> Any:
        if tokens == 2:
            args[names.index("key_cache_0")][block] += 1
        return outputs

    graph.spoil = spoil
    program = link(route.traced, route)
    caches: list[torch.Tensor] = []

    def filled(kv_cache: Any) -> None:
        for tensors in kv_cache:
            for tensor in tensors:
                tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(caches))))
                caches.append(tensor)
        LinkedProgram.bind(program, kv_cache)

    monkeypatch.setattr(program, "bind", filled)
    engine = Engine(program, block_size=16, **LIMITS)
    assert outcomes(engine)["decode steps of 2 tokens"] == (
        f"it writes into key_cache_0[{block}], which belongs to requests"
    )
    for i, tensor in enumerate(caches):
        expected = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i))
        owned = LIMITS["num_blocks"]
        assert torch.equal(tensor[:owned], expected[:owned]), "the caches of requests are as they were"
    assert engine.block_manager.num_used_blocks == engine.block_manager.num_cached_blocks == 0


def test_a_planned_step_outside_the_spare_blocks_never_runs(monkeypatch):
    route, graph = captured(monkeypatch)
    make = warm_up_file.warm_up_step

    def elsewhere(shape: Any, room: SpareRoom, *args: Any, **options: Any) -> Any:
        return make(shape, SpareRoom(room.block_size, 0, room.num_blocks, room.longest), *args, **options)

    monkeypatch.setattr(warm_up_file, "warm_up_step", elsewhere)
    assert all("uses blocks other than the spare ones" in reason for reason in outcomes(engine_of(route)).values())
    assert not graph.sizes


def test_a_capture_that_raises_half_way_leaves_the_others(monkeypatch, caplog):
    route, graph = captured(monkeypatch)
    names = [node.name for node in route.traced.placeholders]
    attempts: list[int] = []

    def spoil(tokens: int, args: Any, outputs: Any) -> Any:
        if tokens == 2:
            attempts.append(tokens)
            for i, name in enumerate(names):  # it got as far as this
                if name.startswith("key_cache"):
                    args[i][route.owned_blocks :] = math.nan
            raise RuntimeError("stream resources are insufficient, error code is 207008\nat line 1")
        return outputs

    graph.spoil = spoil
    engine = engine_of(route)
    assert outcomes(engine)["decode steps of 2 tokens"] == (
        "it fails: stream resources are insufficient, error code is 207008"
    )
    assert {tokens for tokens, _ in route.captured} == set(route.planned) - {2}
    assert_same(complete(engine), served(route.traced, route.traced.module))
    assert attempts == [2], "what is broken is not asked again"


@pytest.mark.parametrize("drops_at", [0, 1])
def test_what_another_rank_drops_is_dropped(monkeypatch, drops_at):
    """Before its first run, in which ranks would wait for each other, or after it."""
    route, graph = captured(monkeypatch)
    calls: list[int] = []

    class Ranks:
        def agree(self, value: int, how: str) -> int:
            calls.append(value)
            return int(len(calls) == 3 + drops_at)  # the second size

    program = link(route.traced, route)
    program.group = Ranks()  # type: ignore[assignment]
    assert route.traced.npu is not None
    engine = Engine(program, block_size=route.traced.npu.block_size, **LIMITS)
    (dropped,) = [name for name, reason in outcomes(engine).items() if reason]
    assert outcomes(engine)[dropped] == "another rank drops it"
    size = route.planned[1]
    assert (size in graph.sizes) == bool(drops_at)
    assert_same(complete(engine), served(route.traced, route.traced.module))
    step = engine.runner.program.mode  # type: ignore[attr-defined]
    assert callable(step)


REFUSED = "E40021: Failed to compile Op [FusedInferAttentionScore]"


def refusing(monkeypatch: pytest.MonkeyPatch, graphs: dict[int, Graph]) -> list[Any]:
    """Let the graph for 4 sequences fail in steps: torchair converts it, and GE compiles it when it first runs. The
    arguments of these steps."""
    right, attempts = Graph.__call__, []

    def run(self: Graph, *args: Any) -> Any:
        if self is graphs.get(4):
            attempts.append(args)
            raise RuntimeError(f"{REFUSED}\nat line 1")
        return right(self, *args)

    monkeypatch.setattr(Graph, "__call__", run)
    return attempts


@pytest.mark.parametrize("way", ["full", "lazy"])
def test_a_graph_that_ge_refuses_behind_torchair_is_dropped_and_said_once(monkeypatch, caplog, way):
    route, graphs = compiled(monkeypatch)
    attempts = refusing(monkeypatch, graphs)
    with caplog.at_level(logging.WARNING):
        engine = engine_of(route, npu_warmup=way)
        assert_same(complete(engine), served(route.traced, route.traced.module))
    assert len(attempts) == 1 and route.dropped == {4: f"it fails: {REFUSED}"}
    assert 2 in route.graphs and 4 not in route.graphs
    said = [record.getMessage() for record in caplog.records if REFUSED in record.getMessage()]
    by_operator = (
        "some steps run operator by operator instead of as a whole graph: "
        f"the graph for 4 sequences was dropped: it fails: {REFUSED}"
    )
    if way == "full":
        assert outcomes(engine) == {"steps of 4 sequences": f"it fails: {REFUSED}", "steps of 2 sequences": ""}
        assert said.pop(0) == f"steps of 4 sequences do not run as a whole graph: it fails: {REFUSED}"
    assert said == [by_operator]
    assert route.eager_steps[f"the graph for 4 sequences was dropped: it fails: {REFUSED}"] > 1


@pytest.mark.parametrize("way", ["full", "lazy"])
def test_errors_of_graphs_that_have_run_are_raised(monkeypatch, way):
    route, graphs = compiled(monkeypatch)
    engine = engine_of(route, npu_warmup=way)
    complete(engine)
    attempts = refusing(monkeypatch, graphs)
    complete(engine)  # which computes a step that failed in parts
    with pytest.raises(RuntimeError, match=REFUSED[:6]):
        route(*attempts[0])
    assert not route.dropped and 4 in route.graphs


def test_a_lost_device_ends_the_start(monkeypatch):
    route, graph = captured(monkeypatch)

    def spoil(tokens: int, args: Any, outputs: Any) -> Any:
        raise RuntimeError("NPU function error: device lost, error code is 507010")

    graph.spoil = spoil
    with pytest.raises(DeviceLost, match="the device is lost, its task scheduler does not respond"):
        engine_of(route)
    assert len(graph.sizes) == 1


def test_steps_that_were_not_captured_ask_for_more_rows(monkeypatch):
    route, _ = captured(monkeypatch)
    engine = engine_of(route)
    ready = set(route.captured)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    (output,) = engine.generate([PROMPTS[1] * 2], params)
    (expected,) = engine_of(AclGraphs(route.traced, route.traced.module, 0)).generate([PROMPTS[1] * 2], params)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert route.captured == ready and any("rows are not captured" in reason for reason in route.eager_steps)


def test_one_step_ahead_finds_everything_ready(monkeypatch):
    route, _ = captured(monkeypatch)
    engine = engine_of(route, async_scheduling=True)
    ready = set(route.captured)
    assert len(ready) == len(route.planned)
    assert_same(complete(engine), served(route.traced, route.traced.module))
    assert route.captured == ready and engine.stats()["steps_ahead"] > 0


@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_5_text"])
def test_states_are_compared(monkeypatch, model_type):
    route, _ = compiled(monkeypatch, model_type)
    engine = engine_of(route)
    assert set(outcomes(engine).values()) == {""}
    right = Graph.__call__
    state = next(i for i, node in enumerate(route.traced.placeholders) if node.name.startswith("conv_state"))

    def wrong(self: Graph, *args: Any) -> Any:
        outputs = right(self, *args)
        args[state][-1] *= 1.1  # the last slot is the last sequence's
        return outputs

    monkeypatch.setattr(Graph, "__call__", wrong)
    assert all("its writes to conv_state" in reason for reason in outcomes(engine_of(route)).values())


def test_int8_caches_may_round_to_the_next_integer(monkeypatch):
    from torch_pagoda.compiler.targets.npu.warm_up.warm_up import _beyond

    difference, rounding = torch.tensor([0.5, -0.5, 0.2]), torch.tensor([0.2, 0.2, 0.2])
    assert _beyond(difference, rounding).tolist() == pytest.approx([0.3, -0.3, 0])


def test_tolerance_is_that_of_the_dtype_until_it_was_measured():
    assert Tolerance.of(torch.float32).limit == 2e-3 and Tolerance.of(torch.bfloat16).limit == 0.3


def test_how_far_it_has_come_is_told(monkeypatch):
    route, _ = captured(monkeypatch)
    phases: list[str] = []
    notes: list[str] = []
    with watched(phases.append, notes.append):
        engine_of(route)
    assert phases == ["warm-up", ""]
    count = len(route.planned)
    assert len(notes) == 2 * count + 1 and notes[0] == f"0 of {count} sizes" and notes[-1] == ""
    assert notes[count] == f"0 of {count} sizes again"
    assert notes[1].startswith(f"1 of {count} sizes, ") and notes[1].endswith(" s left")


# Through npugraph_ex and torchair


@pytest.mark.torchair
def test_captures_of_npugraph_ex_are_compared_and_a_wrong_one_is_dropped(monkeypatch, caplog):
    """One call of the graph that is captured for 4 tokens is made wrong after it was recorded."""
    from captured_graphs import Graph as CapturedGraph
    from captured_graphs import captured_graphs

    traced = lowered("llama", "aclgraph")[1].copy()
    prepare_weights(traced, fractal_nz=True, release=False)
    route = AclGraphs(traced, traced.module, budget=4)
    replay = CapturedGraph.replay
    tokens_of: dict[int, int] = {}
    run = route._run_captured

    def noted(args: Any) -> Any:
        noted.tokens = args[route._ids_at].shape[1]
        return run(args)

    def bent(self: CapturedGraph) -> None:
        if tokens_of.setdefault(id(self), noted.tokens) == 4 and not hasattr(self, "bent"):
            self.bent = True
            call = next(c for c in self.calls if "npu_rms_norm" in str(c.function))
            call.args = (*call.args[:1], call.args[1] * 3, *call.args[2:])
        replay(self)

    monkeypatch.setattr(route, "_run_captured", noted)
    monkeypatch.setattr(CapturedGraph, "replay", bent)
    with captured_graphs() as graphs:
        engine = engine_of(route)
        assert [name for name, reason in outcomes(engine).items() if reason] == ["decode steps of 4 tokens"]
        assert "decode steps of 4 tokens do not run as a whole graph: its logits differ" in caplog.text
        ready = len(graphs)
        assert_same(complete(engine), served(traced, traced.module))
    assert len(graphs) == ready == len(route.planned), "nothing is captured while requests wait"


@pytest.mark.torchair
def test_a_size_is_replayed_after_others_were_captured(monkeypatch):
    """Each capture gives its lengths to its own attention calls, see ``capture_updates``."""
    from npugraph_ex._acl_concrete_graph import acl_graph

    from torch_pagoda.compiler.targets.npu.aclgraph import aclgraph_route

    from captured_graphs import captured_graphs

    init = acl_graph.CapturedGraphUpdateAndReplay.__init__
    traced = lowered("llama", "aclgraph")[1].copy()
    prepare_weights(traced, fractal_nz=True, release=False)
    with captured_graphs(), monkeypatch.context() as patch:
        assert not any(outcomes(engine_of(AclGraphs(traced, traced.module, budget=3))).values())
        # As npugraph_ex has it: the lists of all captures are one.
        patch.setattr(aclgraph_route, "keep_updates_apart", lambda: None)
        patch.setattr(acl_graph.CapturedGraphUpdateAndReplay, "__init__", getattr(init, "__wrapped__", init))
        broken = outcomes(engine_of(AclGraphs(traced, traced.module, budget=3)))
    last = list(broken)[-1]
    assert not broken.pop(last) and all("did not get the lengths of this replay" in r for r in broken.values())


@pytest.mark.torchair
def test_a_capture_of_npugraph_ex_that_raises_half_way(monkeypatch, caplog):
    from npugraph_ex._acl_concrete_graph.acl_graph import AclGraph

    from captured_graphs import captured_graphs

    traced = lowered("llama", "aclgraph")[1].copy()
    prepare_weights(traced, fractal_nz=True, release=False)
    route = AclGraphs(traced, traced.module, budget=4)
    capture, attempts = AclGraph.capture, []

    def scarce(self: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        attempts.append(key)
        result = capture(self, key, *args, **kwargs)
        if len(attempts) == 2:
            raise RuntimeError("The resources are insufficient, error code is 207005")
        return result

    monkeypatch.setattr(AclGraph, "capture", scarce)
    with captured_graphs():
        engine = engine_of(route)
        wrong = {name: reason for name, reason in outcomes(engine).items() if reason}
        assert wrong == {"decode steps of 3 tokens": "it fails: The resources are insufficient, error code is 207005"}
        assert_same(complete(engine), served(traced, traced.module))
    assert len(attempts) == len(route.planned) and not route.eager_steps, "its steps run at the size of 4"


@pytest.mark.torchair
def test_graphs_of_torchair_are_compiled_and_compared():
    traced = lowered("llama")[1].copy()
    prepare_weights(traced, fractal_nz=True, release=False)
    route = GeGraphs(traced, sequences_per_graph=2)
    engine = engine_of(route)
    assert set(route.graphs) == {2, 4} and not any(outcomes(engine).values())
    graph = route.graphs[4]

    def wrong(*args: Any) -> Any:
        logits, *others = graph(*args)
        return (logits * 1.01, *others)

    route.graphs[4] = wrong
    engine = engine_of(route)
    assert set(route.graphs) == {2} and "differ" in outcomes(engine)["steps of 4 sequences"]
    assert_same(complete(engine), served(traced, traced.module))


@pytest.mark.torchair
def test_static_decode_graphs_come_first_and_a_wrong_one_is_dropped():
    traced = lowered("llama")[1].copy()
    prepare_weights(traced, fractal_nz=True, release=False)
    route = GeGraphs(traced, sequences_per_graph=2, static_decode=True)
    assert route.static is not None
    make = route.static._compile

    def compile_(inputs: Any) -> Run:
        graph = make(inputs)
        if inputs["slot_mapping"].shape[0] != 4:
            return graph
        return lambda *args: (graph(*args)[0] * 1.01,)

    route.static._compile = compile_
    engine = engine_of(route)
    found = outcomes(engine)
    names = [
        "decode steps of 4 sequences",
        "decode steps of 2 sequences",
        "steps of 4 sequences",
        "steps of 2 sequences",
    ]
    assert list(found) == names, found
    assert [name for name, reason in found.items() if reason] == ["decode steps of 4 sequences"], found
    assert set(route.static.graphs) == {2} and set(route.graphs) == {2, 4}
    assert_same(complete(engine), served(traced, traced.module))
    assert set(route.static.graphs) == {2} and not route.eager_steps
