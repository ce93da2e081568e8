"""Recorded steps give what the graph gives, bit for bit, as long as nothing else has changed."""

from __future__ import annotations

import operator
import threading
import weakref

import pytest
import torch
from torch import fx, nn

from torch_pagoda import LLM, SamplingParams
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.targets.cpu import recorded_step
from torch_pagoda.compiler.targets.cpu.kernels import GraphCalls, kernel_calls
from torch_pagoda.compiler.targets.cpu.recorded_step import RecordedSteps, _Step
from torch_pagoda.runtime.cache.kv_cache import allocate_kv_cache
from torch_pagoda.runtime.ops import OPERATORS
from torch_pagoda.runtime.ops.collectives import GROUP, all_reduce, drop_group, set_group
from torch_pagoda.runtime.ops.native import load_kernels
from torch_pagoda.runtime.step_metadata import StepMetadata

from legal_models import build_legal_model
from tiny_models import build_tiny_model

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="no C++ kernels, no records")
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [20] * 17, [31, 32]]


@pytest.fixture
def replays(monkeypatch):
    """Counts the steps that are replayed."""
    counted, original = [], _Step.replay

    def replay(self, args):
        found = original(self, args)
        counted.append(found is not None)
        return found

    monkeypatch.setattr(_Step, "replay", replay)
    return counted


def generated(llm):
    """Tokens and their log-probabilities of four requests, two of which are sampled."""
    params = [
        SamplingParams(max_tokens=20, temperature=temperature, seed=1, logprobs=3, ignore_eos=True)
        for temperature in (0.0, 1.0, 0.0, 0.8)
    ]
    return [
        (output.outputs[0].token_ids, [{t: p.logprob for t, p in at.items()} for at in output.outputs[0].logprobs])
        for output in llm.generate(PROMPTS, params)
    ]


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "dtype", "settings"),
    [
        ("qwen3", torch.bfloat16, {"quantization": "int4"}),
        ("llama", torch.float32, {"quantization": "int8", "kv_cache_dtype": "int8"}),
        ("gemma3_text", torch.bfloat16, {}),
        ("gpt_oss", torch.float32, {}),
        ("bloom", torch.bfloat16, {}),
    ],
    ids=str,
)
def test_tokens_and_logprobs_are_the_same(kind, dtype, settings, replays, monkeypatch):
    model = build_tiny_model(kind, dtype=dtype)
    llm = LLM(model, max_num_seqs=3, max_model_len=128, enable_prefix_caching=False, **settings)
    found = generated(llm)
    assert sum(replays) > 15
    assert all(replays)
    count = len(replays)
    monkeypatch.setattr(recorded_step, "MOST_TOKENS", 0)
    assert generated(llm) == found
    assert len(replays) == count


class Served:
    """A program of a tiny model, called for one token of one sequence after the other."""

    def __init__(self, kind="llama", dtype=torch.bfloat16):
        self.model = build_tiny_model(kind, dtype=dtype)
        self.program = build_program(self.model, CompileOptions(pack_weights=False))
        self.caches = allocate_kv_cache(self.program.caches, 16, 4)
        self.program.bind(self.caches)

    def step(self, token, position, slot=None, width=None):
        width = width or position // 4 + 1
        metadata = StepMetadata(
            slot_mapping=torch.tensor([position if slot is None else slot]),
            block_table=torch.arange(width, dtype=torch.int32)[None],
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([position + 1], dtype=torch.int32),
            logits_rows=torch.tensor([0]),
            token_lengths=torch.tensor([position + 1]),
        )
        return self.program(torch.tensor([[token]]), torch.tensor([[position]]), metadata).clone()

    def graph(self, *args):
        """The same without records."""
        recorded, self.program._recorded = self.program._recorded, None
        try:
            return self.step(*args)
        finally:
            self.program._recorded = recorded


@pytest.fixture
def served():
    return Served()


def warm_up(served):
    for position in range(4):
        served.step(20 + position, position)


@needs_kernels
def test_block_tables_of_other_widths_share_a_record(served, replays):
    for position in range(40):
        found = served.step(20 + position, position)
        assert torch.equal(found, served.graph(20 + position, position))
    assert replays == [True] * 38


@needs_kernels
def test_weights_changed_in_place_count(served, replays):
    warm_up(served)
    before = served.step(9, 4)
    with torch.no_grad():
        for parameter in served.model.parameters():
            parameter.mul_(1.1)
    after = served.step(9, 4)
    assert not torch.equal(before, after)
    assert torch.equal(after, served.graph(9, 4))
    assert len(replays) == 4


@needs_kernels
def test_weights_that_moved_are_recorded_anew(served, replays):
    warm_up(served)
    served.step(9, 4)
    count = len(replays)
    weight = served.model.model.layers[0].post_attention_layernorm.weight
    weight.data = weight.detach() * 2
    after = served.step(9, 4)
    assert len(replays) == count
    assert torch.equal(after, served.graph(9, 4))
    assert torch.equal(served.step(9, 4), after)
    assert len(replays) == count + 1


@needs_kernels
def test_other_caches_are_recorded_anew(served, replays):
    warm_up(served)
    former = weakref.ref(served.caches[0][0])
    served.caches = allocate_kv_cache(served.program.caches, 16, 4)
    served.program.bind(served.caches)
    assert former() is None
    count = len(replays)
    for position in range(4):
        found = served.step(20 + position, position)
        assert torch.equal(found, served.graph(20 + position, position))
    assert len(replays) == count + 2


@needs_kernels
def test_a_refused_step_says_why(served, replays):
    warm_up(served)
    expected = served.graph(9, 4)
    with pytest.raises(ValueError, match=r"slot_mapping\[0\] is 999"):
        served.step(9, 4, 999)
    assert replays[-1] is False
    assert torch.equal(served.step(9, 4), expected)


class OneRank:
    """A group of this process alone, in which torch computes nothing."""

    rank, size, name = 0, 1, GROUP

    def __init__(self):
        self.calls = 0

    def all_reduce(self, x):
        self.calls += 1
        out = torch.empty_like(x)
        out.numpy()[:] = x.numpy()
        return out


@pytest.fixture
def exchanging():
    """A program that sums its logits over a group, and the group."""
    served, group = Served(dtype=torch.float32), OneRank()
    module = served.program._run.module
    (output,) = module.graph.find_nodes(op="output")
    logits = output.args[0][0]
    with module.graph.inserting_before(output):
        total = module.graph.call_function(OPERATORS[all_reduce].cpu, (logits, GROUP))
    output.replace_input_with(logits, total)
    module.recompile()
    served.program._recorded = served.program._records(GraphCalls(module), served.program.linkage)
    set_group(group)
    yield served, group
    drop_group(GROUP)


@needs_kernels
def test_each_step_exchanges_once_and_is_not_run_again(exchanging, replays):
    served, group = exchanging
    warm_up(served)
    expected = served.graph(9, 4)
    group.calls = 0
    assert torch.equal(served.step(9, 4), expected)
    assert replays[-1] is True and group.calls == 1
    with pytest.raises(RuntimeError, match="in a step that several ranks run together, so it isn't run again"):
        served.step(9, 4, 999)
    assert replays[-1] is False and group.calls == 1
    assert torch.equal(served.step(9, 4), expected)


@needs_kernels
def test_a_sequence_that_its_blocks_do_not_hold_is_refused(served, replays):
    """Also where the record has columns for them, from a longer sequence."""
    for position in range(12):
        served.step(20 + position, position)
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 9;"):
        served.step(9, 8, width=2)
    assert replays[-1] is False


@needs_kernels
def test_more_threads_are_recorded_anew(served, replays):
    warm_up(served)
    threads, count = torch.get_num_threads(), len(replays)
    try:
        torch.set_num_threads(threads + 1)
        assert torch.equal(served.step(9, 4), served.graph(9, 4))
        assert len(replays) == count
    finally:
        torch.set_num_threads(threads)


@needs_kernels
def test_a_second_thread_does_not_wait(served, replays):
    warm_up(served)
    expected, found = served.step(9, 4), []
    count = len(replays)
    with served.program._recorded._lock:
        thread = threading.Thread(target=lambda: found.append(served.step(9, 4)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)
    assert len(replays) == count


@needs_kernels
def test_memory_is_taken_again():
    """A deep graph needs no more memory than a shallow one."""

    def pieces(layers):
        served = Served()
        served.model = build_tiny_model("llama", num_hidden_layers=layers, dtype=torch.bfloat16)
        served.program = build_program(served.model, CompileOptions(pack_weights=False))
        served.program.bind(allocate_kv_cache(served.program.caches, 16, 4))
        warm_up(served)
        return len(served.program._recorded._memory._pieces)

    assert 0 < pieces(5) == pieces(2)


def steps_of(build, varying=(0,)):
    graph = fx.Graph()
    build(graph)
    calls = kernel_calls(fx.GraphModule(nn.Module(), graph))
    assert isinstance(calls, GraphCalls)
    return RecordedSteps(calls, varying, ())


@needs_kernels
def test_a_graph_that_looks_at_values_is_not_recorded(replays):
    def build(graph):
        x = graph.placeholder("x")
        largest = graph.call_function(torch.ops.aten.amax.default, (x,))
        number = graph.call_function(torch.ops.aten._local_scalar_dense.default, (largest,))
        count = graph.call_function(torch.ops.aten.add_.Tensor, (graph.placeholder("count"), 1))
        graph.output((graph.call_function(torch.ops.aten.mul.Scalar, (x, number)), count))

    steps, count = steps_of(build), torch.zeros(())
    for i in range(4):
        x = torch.tensor([[1.0, 2.0, 3.0 + i]])
        assert torch.equal(steps([x, count])[0], x * (3 + i))
        assert count == i + 1
    assert not replays


@needs_kernels
@pytest.mark.parametrize("spelled", ["aten", "operator", "method"])
def test_operators_that_write_are_repeated(spelled, replays):
    def build(graph):
        x, state = graph.placeholder("x"), graph.placeholder("state")
        if spelled == "method":
            written = graph.call_method("add_", (state, x))
        else:
            function = torch.ops.aten.add_.Tensor if spelled == "aten" else operator.iadd
            written = graph.call_function(function, (state, x))
        graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (written, 2)),))

    steps, state = steps_of(build), torch.zeros(1, 2)
    for total in range(1, 6):
        (found,) = steps([torch.ones(1, 2), state])
        assert torch.equal(state, torch.full((1, 2), float(total)))
        assert torch.equal(found, 2 * state)
    assert len(replays) == 3


@needs_kernels
def test_a_graph_that_sets_modes_is_not_recorded(replays):
    def build(graph):
        x = graph.placeholder("x")
        graph.call_function(torch._C._set_grad_enabled, (False,))
        graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, 2)),))

    steps = steps_of(build)
    with torch.no_grad():
        for i in range(4):
            assert torch.equal(steps([torch.full((1, 2), float(i))])[0], torch.full((1, 2), 2.0 * i))
    assert not replays


def test_what_was_lowered_for_an_npu_is_not_recorded(replays):
    options = CompileOptions(target="npu", codegen="none")
    program = build_program(build_legal_model("llama", dtype=torch.bfloat16), options)
    assert program._recorded is None
    assert not replays


@needs_kernels
def test_what_torch_computes_for_a_kernel_is_repeated(replays):
    """A norm whose weight and bias differ in dtype converts both before it calls its kernel."""

    def build(graph):
        x, weight, bias = (graph.placeholder(name) for name in ("x", "weight", "bias"))
        normed = graph.call_function(torch.ops.pagoda.layer_norm.default, (x, weight, bias, 1e-5))
        graph.output((graph.call_function(torch.ops.pagoda.activation.default, (normed, "silu")),))

    steps = steps_of(build)
    weight, bias = torch.randn(64).bfloat16(), torch.randn(64)
    for _ in range(4):
        x = torch.randn(1, 64).bfloat16()
        (found,) = steps([x, weight, bias])
        normed = torch.ops.pagoda.layer_norm(x, weight, bias, 1e-5)
        assert torch.equal(found, torch.ops.pagoda.activation(normed, "silu"))
        with torch.no_grad():
            bias += 1
    assert len(replays) == 2


@needs_kernels
@pytest.mark.parametrize("inference", [False, True])
def test_what_is_copied_for_a_kernel_is_repeated(replays, inference):
    """A convolution copies inputs that do not lie row by row, by what counts as a view in inference mode."""

    def build(graph):
        x, weight = (graph.placeholder(name) for name in ("x", "weight"))
        rows = graph.call_function(torch.ops.aten.transpose.int, (x, 1, 2))
        graph.output((graph.call_function(torch.ops.pagoda.causal_conv1d_seq.default, (rows, weight, None, "")),))

    steps, weight = steps_of(build), torch.randn(64, 4)
    for _ in range(4):
        x = torch.randn(1, 64, 9)
        with torch.inference_mode(inference):
            (found,) = steps([x, weight])
            assert torch.equal(found, torch.ops.pagoda.causal_conv1d_seq(x.transpose(1, 2), weight, None, ""))
    assert len(replays) == 2


@needs_kernels
def test_the_oldest_record_goes_first(served, monkeypatch):
    monkeypatch.setattr(recorded_step, "MOST_STEPS", 2)
    steps = steps_of(lambda graph: graph.output((graph.placeholder("x"),)))
    for tokens in (1, 2, 3):
        for _ in range(2):
            steps([torch.zeros(1, tokens)])
    assert [key[3] for key in steps._steps] == [(1, 2), (1, 3)]
