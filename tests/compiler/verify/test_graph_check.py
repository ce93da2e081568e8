"""The comparison of graphs in float32: what it accepts, and the mistakes that it must not."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from stored_weights import stored_weight
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_pagoda.compiler import CompileOptions, UnsupportedModel, options
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport, Verdict
from torch_pagoda.compiler.tolerance import TOLERANCE
from torch_pagoda.compiler.verify import float32_run, graph_check
from torch_pagoda.compiler.verify.graph_check import check_graph, measure_rounding
from torch_pagoda.compiler.verify.self_check import check, reference_of_model
from torch_pagoda.passes import PASSES, Pass, PassRecord
from torch_pagoda.passes.graph.attention_node import paged_attention_nodes
from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.runtime.program import StateSpec

from shared_graphs import capture
from tiny_models import build_tiny_model
from toy_lm import ToyLM, captured, sdpa

PLAIN = CompileOptions(codegen="none", target="cpu")
_SCALE, _WINDOW, _SOFTCAP = 11, 12, 14


@pytest.fixture(scope="module", params=["llama-float32", "llama-bfloat16", "gemma2-float32", "gemma2-bfloat16"])
def graphs(request):
    """``(name, captured graph, rewritten graph)`` of a tiny model."""
    name, dtype = request.param.split("-")
    model = build_tiny_model(name).to(getattr(torch, dtype))
    found = capture(model)
    return name, found.traced, run_pipeline(found, PLAIN, None, CompileReport(name))


def change_attention(graph, place, change, which=slice(None)):
    for node in list(paged_attention_nodes(graph))[which]:
        node.args = (*node.args[:place], change(node.args[place]), *node.args[place + 1 :])


def scale_scores(graph):
    change_attention(graph, _SCALE, lambda scale: scale * 1.02)


def scale_scores_of_one_layer(graph):
    change_attention(graph, _SCALE, lambda scale: scale * 1.02, slice(0, 1))


def drop_softcap(graph):
    change_attention(graph, _SOFTCAP, lambda softcap: 0.0)


def widen_window(graph):
    change_attention(graph, _WINDOW, lambda window: window + 1 if window else 0)


def norms(graph):
    return [n for n in graph.graph.nodes if callee(n).removeprefix("pagoda.") in ("rms_norm", "add_rms_norm")]


def raise_eps(graph):
    found = norms(graph)
    assert found
    for node in found:
        place = next(i for i, x in enumerate(node.args) if isinstance(x, float))
        node.args = (*node.args[:place], node.args[place] * 10, *node.args[place + 1 :])


def raise_eps_of_the_last(graph):
    node = norms(graph)[-1]
    place = next(i for i, x in enumerate(node.args) if isinstance(x, float))
    node.args = (*node.args[:place], node.args[place] * 10, *node.args[place + 1 :])


def exchange_norm_scales(graph):
    first, second = norms(graph)[:2]
    ours = [next(x for x in reversed(n.args) if isinstance(x, torch.fx.Node)) for n in (first, second)]
    first.replace_input_with(ours[0], ours[1])


def test_what_the_passes_make_is_accepted(graphs):
    _, original, rewritten = graphs
    verdict = check_graph(original, rewritten)
    assert verdict.ok and verdict.error < 1e-4, verdict


@pytest.mark.parametrize(
    ("mutate", "only"),
    [
        (scale_scores, ""),
        (scale_scores_of_one_layer, ""),
        (raise_eps, ""),
        (raise_eps_of_the_last, "llama"),
        (exchange_norm_scales, ""),
        (drop_softcap, "gemma2"),
        (widen_window, "gemma2"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_slightly_wrong_graph_is_refused(graphs, mutate, only):
    name, original, rewritten = graphs
    if only not in ("", name):
        pytest.skip(f"{name} has none")
    mutant = rewritten.copy()
    mutate(mutant)
    verdict = check_graph(original, mutant)
    assert not verdict.ok
    assert "in float32 logits differ" in verdict.reason


@pytest.mark.parametrize(("kind", "longest"), [("tokens", 75), ("state", 150), ("indexer", 150)])
def test_sequences_are_longer_than_two_chunks_where_chunks_or_choices_count(kind, longest, monkeypatch):
    found = captured(ToyLM(sdpa)).traced
    if kind == "state":
        found.caches = [*found.caches, StateSpec("conv_state", (2, 4, 4), torch.float32)]
    monkeypatch.setattr(graph_check, "chooses_keys", lambda graph: kind == "indexer")
    ran = []

    def compared(original, rewritten, weights, **given):
        ran.append(weights.schedule.lengths)
        return Verdict(True, 0.0, 1.0, 1, "")

    monkeypatch.setattr(graph_check, "_compare", compared)
    assert check_graph(found, found).ok
    assert [max(lengths) for lengths in ran] == [longest, 12]


def amplifying(factor):
    """``(captured graph, rewritten graph)`` of a model that amplifies what rounding does to its logits."""
    found = captured(ToyLM(sdpa, finish=lambda logits: (logits * factor).sin()))
    return found.traced, run_pipeline(found, PLAIN, None, CompileReport("toy"))


def test_rounding_that_a_model_amplifies_is_tolerated(monkeypatch):
    monkeypatch.setattr(graph_check, "TOLERANCE", 1e-4)  # processors round differently
    original, rewritten = amplifying(3000)
    verdict = check_graph(original, rewritten)
    assert verdict.ok and 1e-4 < verdict.error < verdict.tolerance < 0.02, verdict


def test_more_than_rounding_is_not_tolerated_where_indexers_choose(monkeypatch):
    """What another choice of keys changes is no measure of rounding."""
    monkeypatch.setattr(graph_check, "TOLERANCE", 1e-4)
    original, rewritten = amplifying(3000)
    monkeypatch.setattr(graph_check, "chooses_keys", lambda graph: True)
    assert not check_graph(original, rewritten).ok


@pytest.mark.parametrize(("factor", "wrong"), [(100, 1e-4), (3000, 1e-4)])
def test_a_scale_that_is_wrong_by_more_than_rounding_is_refused(factor, wrong):
    original, rewritten = amplifying(factor)
    change_attention(rewritten, _SCALE, lambda scale: scale * (1 + wrong))
    verdict = check_graph(original, rewritten)
    assert not verdict.ok and verdict.error > graph_check.TOLERANCE, verdict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_scale_refuses_the_model_whatever_its_dtype(monkeypatch, dtype):
    """2 % are less than what rounding to bfloat16 does to the logits."""

    def wrong(graph):
        scale_scores(graph)
        return PassRecord("wrong_scale", matches=1)

    monkeypatch.setattr(options, "PASSES", (*PASSES, Pass("wrong_scale", wrong, required=True)))
    with pytest.raises(UnsupportedModel, match="pass wrong_scale is not exact"):
        build_program(ToyLM(sdpa).to(dtype), PLAIN)


def test_rounding_is_measured_and_not_supposed():
    model = ToyLM(sdpa).to(torch.bfloat16)
    reference = reference_of_model(model)
    assert reference.tolerance == TOLERANCE[torch.bfloat16]
    measure_rounding(captured(model), reference)
    assert 0.005 < reference.tolerance < 0.25


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, and the most that are alive at once."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self.known = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if type(t) in (torch.Tensor, Parameter)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is not torch.Tensor:
                continue
            storage = tensor.untyped_storage()
            if id(storage) not in given and storage not in self.known:
                self.known.add(storage)
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)
                weakref.finalize(storage, self.free, storage.nbytes())
        return result

    def free(self, size):
        self.alive -= size


@pytest.mark.parametrize("stored", [False, True], ids=["bfloat16", "4 bits"])
def test_rounding_is_measured_some_rows_at_a_time(stored, monkeypatch):
    """No matrix is widened whole: a head of 32768 tokens, whose logits are few beside it."""
    outputs, width = 32768, 512
    model = build_tiny_model("llama", hidden_size=width, vocab_size=outputs, tie_word_embeddings=False)
    model = model.to(torch.bfloat16)
    if stored:
        weight = stored_weight("int4/g128/bf16", outputs, width)
        weight.scales.mul_(0.02)
        model.lm_head.weight = Parameter(weight, requires_grad=False)
    reference = reference_of_model(model)
    reference.tokens[-1] = reference.tokens[-1][:9]
    found = capture(model)

    def measured():
        with LiveBytes() as live:
            measure_rounding(found, reference)
        return live.peak

    in_float32 = outputs * width * 4
    assert measured() < 0.5 * in_float32
    in_parts = reference.tolerance
    monkeypatch.setattr(float32_run, "AT_ONCE", 1 << 30)
    assert measured() > in_float32, "the count sees a head that is widened whole"
    assert in_parts == pytest.approx(reference.tolerance, rel=1e-2) and in_parts > 0


def test_a_program_that_raises_is_not_right():
    program = build_program(ToyLM(sdpa), dataclasses.replace(PLAIN, verify="off"))

    def fail(*args):
        raise ValueError("a block is missing")

    program._run = fail
    program._recorded = None
    verdict = check(program, reference_of_model(ToyLM(sdpa)))
    assert (verdict.ok, verdict.reason) == (False, "the program failed: a block is missing")


def first_chunk_doubled(model, hidden, positions):
    return hidden * 2.0 if hidden.shape[1] <= 64 else torch.cat([hidden[:, :64] * 2.0, hidden[:, 64:]], dim=1)


def quarters_exchanged(model, hidden, positions):
    return hidden + hidden.view(4, -1, 8).transpose(0, 1).reshape(hidden.shape)


@pytest.mark.parametrize("chunks", [first_chunk_doubled, quarters_exchanged])
def test_what_holds_for_some_lengths_only_refuses_the_model(chunks):
    with pytest.raises(UnsupportedModel, match=r"takes another path at .* tokens"):
        build_program(ToyLM(sdpa, before=chunks), PLAIN)
