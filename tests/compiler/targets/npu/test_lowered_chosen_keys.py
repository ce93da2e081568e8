"""Models whose attention reads keys that an indexer chooses, lowered for Ascend and run by the reference kernels."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from lowered_models import assert_same, lowered, served
from npu_calls import illegal_calls
from static_routes import AsItIs
from torch import fx
from transformers import PreTrainedModel

from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import AclGraphs
from torch_pagoda.compiler.targets.npu.ge.static_graph import why_not_static
from torch_pagoda.passes import TracedGraph, UnsupportedModel
from torch_pagoda.passes.graph.provenance import decoder_layers, launches_work, operator_name
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.program import is_cache_input
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from captured_graphs import captured_graphs
from hf_reference import assert_served
from legal_models import build_legal_model
from shared_graphs import capture

MODELS = ("deepseek_v32", "axk2", pytest.param("glm_moe_dsa", marks=pytest.mark.slow))
INDEXER, SPARSE = "npu.npu_lightning_indexer", "npu.npu_sparse_flash_attention"
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=8)


@cache
def with_sinks() -> PreTrainedModel:
    """HY-V4 with two layers, of which one takes over the choice of the other."""
    kinds = {"mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "shared"]}
    return build_legal_model("hy_v4", num_hidden_layers=2, layer_types=["indexed_attention"] * 2, **kinds)


def lowered_on(soc: str, model: PreTrainedModel, **options: Any) -> TracedGraph:
    captured = capture(model)
    captured.traced.npu = NpuTarget(soc, block_size=16, float32_as=torch.bfloat16)
    asked = CompileOptions(codegen="none", target="npu", verify="off", soc=soc, **options)
    report = CompileReport(soc)
    traced = run_pipeline(captured, asked, None, report)
    assert not report.dropped_passes
    return traced


def served_as_transformers_answers(model: PreTrainedModel, traced: TracedGraph) -> None:
    """Prompts longer than the 8 keys that are chosen, in chunks that end inside blocks, several sequences at once."""
    assert model.config.index_topk == 8
    module = traced.copy().module
    engine = Engine(link(traced, module), block_size=16, num_blocks=40, max_num_seqs=3, max_num_batched_tokens=19)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 250, (n,), generator=draw).tolist() for n in (45, 5, 23)]
    assert_served(model, engine.generate(prompts, GREEDY))
    engine.block_manager.check()


@pytest.mark.parametrize("model_type", MODELS)
def test_prompts_chunks_and_decoded_tokens_are_exact(model_type: str) -> None:
    model, traced = lowered(model_type)
    assert illegal_calls(traced, traced.npu) == []
    assert not [n for n in traced.graph.nodes if str(n.target).startswith("pagoda.")]
    served_as_transformers_answers(model, traced)


def test_the_chip_with_sinks() -> None:
    traced = lowered_on("Ascend950PR", with_sinks())
    assert illegal_calls(traced, traced.npu) == []
    names = Counter(operator_name(n) for n in traced.graph.nodes)
    assert (names[INDEXER], names[SPARSE]) == (1, 2)
    served_as_transformers_answers(with_sinks(), traced)


def test_launches_of_a_layer() -> None:
    """Nothing but these: the norm that queries are made from comes out of the prolog, for the indexer's, too."""
    _, traced = lowered("deepseek_v32")
    layers = decoder_layers(traced.graph)
    found = Counter(operator_name(n) for n in layers.nodes(0) if launches_work(n))
    places = "aten.clamp aten.div aten.remainder aten.stack".split()  # of the slots, once for all layers
    rest = Counter({name: count for name, count in found.items() if name not in places})
    most = {
        "npu.npu_add_rms_norm": 1,
        "npu.npu_rms_norm": 1,
        "npu.npu_mla_prolog_v3": 1,
        "npu.npu_linear": 5,
        "aten.native_layer_norm": 1,
        "npu.npu_rotary_mul": 2,
        "aten.cat": 2,
        "aten.constant_pad_nd": 2,  # of the tables, once for all layers
        "npu.npu_scatter_nd_update_": 1,
        INDEXER: 1,
        SPARSE: 1,
        "npu.npu_transpose_batchmatmul": 1,
        "npu.npu_swiglu": 1,
    }
    assert not rest - Counter(most), found
    for name in ("npu.npu_mla_prolog_v3", "npu.npu_scatter_nd_update_", INDEXER, SPARSE):
        assert rest[name] == 1, found
    assert max(found[name] for name in places) <= 1


def test_a_lowering_that_was_left_out_is_what_the_refusal_names() -> None:
    model, _ = lowered("deepseek_v32")
    with pytest.raises(UnsupportedModel, match=r"absorb_latent_attention, which lowers it, was left out"):
        lowered_on("Ascend910B3", model, opt_level=1)


def test_sinks_on_other_chips_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"knows no sinks on Ascend910B3, only on Ascend950; use target='cpu'"):
        lowered_on("Ascend910B3", with_sinks())


MUTANTS: dict[str, Any] = {
    "the choice of another token": lambda call: changed(call, 3, lambda x: x.roll(1, 0)),
    "one key less": lambda call: changed(call, 3, lambda x: x.masked_fill(torch.arange(x.shape[2]) > 6, -1)),
    "every key is the first": lambda call: changed(call, 3, lambda x: x.clamp(max=0)),
    "no key is masked": lambda call: {**call, "sparse_mode": 0},
    "another scale": lambda call: {**call, 4: call[4] * 1.1},
    "no rotated part": lambda call: {**call, "query_rope": call["query_rope"] * 0},
}


def changed(call: dict[Any, Any], at: Any, by: Any) -> dict[Any, Any]:
    return {**call, at: by(call[at])}


class Mutated(fx.Interpreter):
    """Runs a graph with the arguments of one operator changed."""

    def __init__(self, module: fx.GraphModule, operator: str, change: Any) -> None:
        super().__init__(module)
        self.operator, self.change = operator, change

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if str(target).removesuffix(".default") == self.operator:
            given = self.change({**dict(enumerate(args)), **kwargs})
            args = tuple(given.pop(i) for i in range(len(args)))
            kwargs = given
        return super().call_function(target, args, kwargs)


def found_out(operator: str, change: Any) -> bool:
    model, traced = lowered("deepseek_v32")
    copy = traced.copy()
    mutant = Mutated(copy.module, operator, change)
    engine = Engine(link(copy, mutant.run), block_size=16, num_blocks=40, max_num_batched_tokens=19)
    outputs = engine.generate([torch.arange(3, 27).tolist()], GREEDY)
    try:
        assert_served(model, outputs)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("name", [name for name in MUTANTS if name != "no key is masked"])
def test_mutants_of_the_attention_are_found(name: str) -> None:
    assert found_out(SPARSE, MUTANTS[name])


INDEXER_MUTANTS: dict[str, Any] = {
    "weights of another token": lambda call: changed(call, 2, lambda x: x.roll(1, 0)),
    "negative weights": lambda call: changed(call, 2, lambda x: -x),
    "no lengths of queries": lambda call: changed(
        call, "actual_seq_lengths_query", lambda x: torch.arange(1, len(x) + 1).int()
    ),
}


@pytest.mark.parametrize("name", INDEXER_MUTANTS)
def test_mutants_of_the_indexer_are_found(name: str) -> None:
    assert found_out(INDEXER, INDEXER_MUTANTS[name])


def test_without_a_change_nothing_is_found() -> None:
    """A key behind the query is chosen nowhere, so the attention's own mask changes nothing."""
    assert not found_out(SPARSE, lambda call: call)
    assert not found_out(SPARSE, MUTANTS["no key is masked"])


def test_decode_steps_have_graphs_of_fixed_sizes() -> None:
    _, traced = lowered("deepseek_v32")
    assert why_not_static(traced) == ""
    route = AsItIs(traced, sequences_per_graph=2)
    assert_same(served(traced, route, max_tokens=4), served(traced, traced.module, max_tokens=4))
    assert route.static is not None and not route.static.dropped and set(route.steps) == {2, 4}


def test_captured_graphs_are_planned() -> None:
    _, traced = lowered("deepseek_v32", "aclgraph")
    route = AclGraphs(traced, traced.module, budget=3)
    assert not route.lists and not route.refusal


@pytest.mark.torchair
def test_captured_graphs_serve_the_same() -> None:
    traced = lowered("deepseek_v32", "aclgraph")[1].copy()
    route = AclGraphs(traced, traced.module, budget=3)
    with captured_graphs() as graphs:
        assert_same(served(traced, route), served(traced, traced.module))
    assert len(graphs) == len(route.captured) > 0 and not route.eager_steps
    assert sum(graph.replays for graph in graphs) > len(graphs)
    for graph in graphs:
        names = [str(call.function).removesuffix(".default") for call in graph.calls]
        assert names.count(SPARSE) == names.count(INDEXER) == 2
        assert not [name for name in names if "_functional" in name or name == "aten.copy_"], "caches are copied"


def test_caches_are_whole_inputs_written_once() -> None:
    _, traced = lowered("deepseek_v32")
    caches = [n for n in traced.placeholders if is_cache_input(n.name)]
    assert len(caches) == 3 * 2
    for node in caches:
        writers = [n for n in node.users if any(a.is_write for a in n.target._schema.arguments)]
        assert len(writers) == 1
        assert sorted(node.users)[0] is writers[0]
