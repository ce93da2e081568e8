"""Models with state lowered for an NPU and run by the reference kernels: tokens, legality, writes of states."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from lowered_models import assert_same, lowered, served
from npu_calls import illegal_calls

from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import AclGraphs
from torch_pagoda.compiler.targets.npu.decode_steps import DecodeCalls
from torch_pagoda.compiler.targets.npu.route import Route
from torch_pagoda.compiler.targets.npu.sizes.step_padding import StepSize
from torch_pagoda.compiler.verify.self_check import check, reference_of_model
from torch_pagoda.passes.graph.provenance import decoder_layers, launches_work, operator_name
from torch_pagoda.passes.lower.npu.decode_graph import decode_graph
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.program import StateSpec
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.state_tables import CHUNK_TABLES
from torch_pagoda.runtime.step_metadata import StepMetadata

from hf_reference import assert_served
from legal_models import build_legal_model

MODELS = ("lfm2", "qwen3_5_text", "mamba2", "jamba")
OTHERS = (
    *("lfm2_moe", "lfm3", "qwen3_next", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid"),
    *("bamba", "falcon_h1", "nemotron_h", "granitemoehybrid", "zamba2", "mamba", "falcon_mamba", "zamba"),
)
ALL = [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=8)
LONGER = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=8)
TOLERANCE = 1e-4
# One is longer than every chunk, and so is what of it is left for the second step.
LENGTHS = (40, 5, 23, 200)


def prompts(*lengths):
    return [torch.randint(3, 250, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


@pytest.mark.parametrize("model_type", ALL, scope="module")
def test_prefill_chunks_and_decode_are_exact(model_type):
    model, traced = lowered(model_type)
    engine = Engine(link(traced, traced.module), block_size=16, num_blocks=64, max_num_batched_tokens=150)
    assert_served(model, engine.generate(prompts(*LENGTHS), GREEDY))


@pytest.mark.parametrize("model_type", ALL, scope="module")
def test_every_call_is_legal_and_each_state_is_written_once(model_type):
    _, traced = lowered(model_type)
    assert illegal_calls(traced, traced.npu) == []
    assert not [n for n in traced.graph.nodes if str(n.target).startswith("pagoda.")]
    states = [f"{s.name}_{i}" for i, s in enumerate(traced.caches) if isinstance(s, StateSpec)]
    assert states
    for name in states:
        users = Counter(operator_name(user) for user in traced.placeholder(name).users)
        assert users == {"aten.index_select": 1, "npu.npu_scatter_nd_update_": 1}


def of_kinds(traced):
    """Calls of both graphs, and how many steps each ran."""
    decode, steps = decode_graph(traced), [0, 0]

    def counted(kind, run):
        def call(*args):
            steps[kind] += 1
            return run(*args)

        return call

    calls = DecodeCalls(traced, decode, counted(0, decode.module), counted(1, traced.module))
    return calls, decode, steps


@pytest.mark.parametrize("graph_mode", ["ge", "aclgraph"])
@pytest.mark.parametrize("model_type", [name for name in ALL if name != "lfm2"], scope="module")
def test_decode_steps_of_their_own_are_exact(model_type, graph_mode):
    model, traced = lowered(model_type, graph_mode=graph_mode)
    if not any(s.name == "recurrent_state" for s in traced.caches if isinstance(s, StateSpec)):
        assert decode_graph(traced) is None
        return
    calls, decode, steps = of_kinds(traced)
    assert illegal_calls(decode, decode.npu) == []
    assert [n.name for n in decode.placeholders] == [n.name for n in traced.placeholders]
    engine = Engine(link(traced, calls), block_size=16, num_blocks=64, max_num_batched_tokens=150)
    assert_served(model, engine.generate(prompts(*LENGTHS, 1), LONGER))
    assert min(steps) > 1


def test_captured_graphs_call_the_operators_of_the_delta_rule():
    """That over chunks in the graph of prompts, the recurrent one in that of decode steps."""
    model, traced = lowered("qwen3_5_text", graph_mode="aclgraph")
    count = sum(spec.name == "recurrent_state" for spec in traced.caches if isinstance(spec, StateSpec))
    for graph, fused, other in ((traced, "chunk", "recurrent"), (decode_graph(traced), "recurrent", "chunk")):
        names = [operator_name(node) for node in graph.graph.nodes]
        assert names.count(f"npu.npu_{fused}_gated_delta_rule") == count
        assert f"npu.npu_{other}_gated_delta_rule" not in names
    assert not [name for name in traced.step_inputs if name.startswith(CHUNK_TABLES)]
    assert illegal_calls(traced, traced.npu) == []
    engine = Engine(link(traced, traced.module), block_size=16, num_blocks=64, max_num_batched_tokens=150)
    assert_served(model, engine.generate(prompts(*LENGTHS), GREEDY))


LAUNCHES = {
    ("qwen3_next", "ge"): 57,
    ("qwen3_next", "aclgraph"): 45,
    ("qwen3_5_text", "ge"): 42,
    ("qwen3_5_text", "aclgraph"): 32,
}
"""Most of a layer with a gated delta rule in decode steps, in bfloat16."""
EXPERTS = {"qwen3_next": {"num_experts": 32}}
"""As many as the operator that chooses them takes at least."""


@pytest.mark.parametrize(("model_type", "graph_mode"), LAUNCHES)
def test_launches_of_a_decode_step(model_type, graph_mode):
    _, traced = lowered(model_type, graph_mode=graph_mode, dtype=torch.bfloat16, **EXPERTS.get(model_type, {}))
    decode = decode_graph(traced)
    layers = decoder_layers(decode.graph)
    counts = Counter(layer for node, layer in layers.of.items() if launches_work(node))
    of_states = {layers.of[n] for n in decode.graph.nodes if "softplus" in operator_name(n)}
    assert max(counts[layer] for layer in of_states) <= LAUNCHES[model_type, graph_mode]


def test_steps_that_recurrences_do_not_take():
    _, traced = lowered("qwen3_5_text")
    program = link(traced, traced.module)
    with pytest.raises(ValueError, match="at most 4096 tokens of a sequence per step; lower it to 4096"):
        program.reserve(4, 8192, 8192)
    assert program.reserve(4, 8192, 4096) == 0
    _, convolutions = lowered("lfm2")
    assert link(convolutions, convolutions.module).reserve(4, 8192, 8192) == 0


@pytest.mark.parametrize(
    ("model_type", "mode", "reason"),
    [
        ("qwen3_5_text", "aclgraph", ""),
        ("lfm2", "aclgraph", ""),
        ("jamba", "aclgraph", ""),
        ("mamba2", "aclgraph", "no attention call"),
    ],
)
def test_which_steps_are_captured(model_type, mode, reason):
    """Recurrences in chunks are captured where every sequence has one token; without attention nothing is."""
    _, traced = lowered(model_type, graph_mode=mode)
    route = AclGraphs(traced, traced.module)
    assert (reason in route.refusal) if reason else not route.refusal
    assert route._only_decode == (model_type in ("jamba", "mamba2"))


def test_the_self_check_takes_them():
    """Slots that nobody wrote are NaN there, and some are read by a step that writes others."""
    program = build_program(build_legal_model("lfm2"), CompileOptions(codegen="none", target="npu"))
    assert program.report.verdict.ok and not program.report.dropped_passes


MUTANTS = {"reads what it is to write": ("index_select", 2), "writes what it read": ("npu_scatter_nd_update_", 1)}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_self_check_sees_wrong_slots(name):
    operator, place = MUTANTS[name]
    model, traced = lowered("lfm2")
    graph = traced.copy()
    node = next(n for n in graph.placeholder("conv_state_0").users if operator in str(n.target))
    other = graph.placeholder("state_write" if operator == "index_select" else "state_read")
    with graph.before(node):
        slots = graph.call(torch.ops.aten.clamp.default, other, 0)
        if operator != "index_select":
            slots = graph.call(torch.ops.aten.unsqueeze.default, slots, -1)
    node.args = (*node.args[:place], slots, *node.args[place + 1 :])
    graph.recompile()
    reference = reference_of_model(model)
    assert check(link(traced, traced.module), reference).ok
    assert not check(link(graph, graph.module), reference).ok


def test_states_are_left_behind_and_swapped():
    """Prefixes that are found again are read from slots that must stay; too few blocks send states to the host."""
    model, traced = lowered("lfm2")
    engine = Engine(
        link(traced, traced.module),
        block_size=16,
        num_blocks=32,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
    )
    (prefix,) = prompts(96)
    for _ in range(2):
        assert_served(model, engine.generate([prefix + more for more in prompts(7, 9)], GREEDY))
    assert engine.stats()["cached_tokens"] > 80
    small = Engine(link(traced, traced.module), block_size=16, num_blocks=6, preemption="swap", swap_space=1 << 22)
    assert_served(model, small.generate(prompts(30, 31, 29, 28), LONGER))
    assert small.stats()["preemptions"] > 0


class Padded(Route):
    """Runs each step by the reference kernels among dummy sequences, with tokens and without."""

    name = "test"

    def plan(self, max_num_seqs, max_num_batched_tokens, max_model_len):
        self.sequences = max_num_seqs + 3
        return 20

    def size_for(self, size):
        return StepSize(size.tokens + 2, self.sequences, size.rows, size.blocks + 1)

    def __call__(self, *args):
        self.bound = [args[i] for i, n in enumerate(self.traced.placeholders) if "_state_" in n.name]
        return self.traced.module(*args)


def test_dummy_sequences_write_to_the_spare_slot():
    _, traced = lowered("lfm2")
    route = Padded(traced)
    assert_same(served(traced, route), served(traced, traced.module))
    assert route._spare_slot == route.bound[0].shape[0] - route._spare_blocks
    assert route._first_spare_block == 24, "of the keys and values, whichever cache comes first"


def test_a_sequence_that_writes_nowhere_is_refused():
    _, traced = lowered("lfm2")
    program = link(traced, traced.module)
    Engine(program, block_size=16, num_blocks=8)  # binds it
    slots = torch.tensor([-1], dtype=torch.int32)
    step = StepMetadata(
        slot_mapping=torch.arange(3),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        query_start_loc=torch.tensor([0, 3], dtype=torch.int32),
        seq_lens=torch.tensor([3], dtype=torch.int32),
        logits_rows=torch.tensor([2]),
        token_lengths=torch.arange(1, 4),
        state_read=slots,
        state_write=slots,
    )
    with pytest.raises(ValueError, match="writes the state of every sequence"):
        program(torch.ones(1, 3, dtype=torch.int64), torch.arange(3)[None], step)
