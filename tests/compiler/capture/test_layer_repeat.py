"""One layer compiled for all that are like it: the program is the one that compiling all layers makes, or else all
layers are compiled."""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from torch_pagoda.compiler import CompileOptions, UnsupportedModel
from torch_pagoda.compiler import build as build_module
from torch_pagoda.compiler.build import build_program, build_unpacked
from torch_pagoda.compiler.capture import layer_repeat
from torch_pagoda.compiler.capture.layer_repeat import LEAST_SAVED, CannotRepeat, LayerRepeat
from torch_pagoda.compiler.link.linkage import Linkage
from torch_pagoda.compiler.link.linker import LinkedProgram
from torch_pagoda.compiler.user_passes import register_pass, unregister_pass
from torch_pagoda.compiler.verify.self_check import SHORT_SCHEDULE, Schedule, compared_steps, reference_of_model
from torch_pagoda.passes import PassRecord
from torch_pagoda.passes.graph.attention_node import paged_attention_nodes
from torch_pagoda.passes.graph.fx_nodes import cache_index, callee
from torch_pagoda.passes.graph.provenance import decoder_layers
from torch_pagoda.runtime.ops.linear.packed_linear import can_pack
from torch_pagoda.runtime.program import is_cache_input

from tiny_models import build_tiny_model

DEPTH = 6
OPTIONS = CompileOptions(codegen="none", target="cpu")
FULL, SLIDING = "full_attention", "sliding_attention"


def deep(kind, depth=DEPTH, **settings):
    return build_tiny_model(kind, num_hidden_layers=depth, **settings)


def layer_types(*period, depth):
    return {"layer_types": (list(period) * depth)[:depth]}


def logits(program, reference):
    return torch.cat([found.clone() for _, found, _ in compared_steps(program, reference)])


@pytest.fixture(autouse=True)
def one_is_enough(monkeypatch):
    """It is worth while where one layer is spared: models have few to compile."""
    monkeypatch.setattr(layer_repeat, "LEAST_SAVED", 1)


CASES = {
    "llama": (DEPTH, {}, 4),
    "gpt2": (5, {}, 4),  # transposed weights
    "bloom": (5, {}, 4),  # a table of slopes for each layer
    # A rotary table of its own for one layer in three, which is read first behind layers that are compared.
    "gemma3_text": (11, layer_types(SLIDING, SLIDING, FULL, depth=11), 8),
    "deepseek_v3": (6, {}, 5),  # the first layer has no experts
}
"""Architecture → layers, settings, layers compiled."""


@cache
def reference_of(kind):
    depth, settings, _ = CASES[kind]
    return reference_of_model(deep(kind, depth, **settings))


@cache
def built(kind):
    """What is made of few layers; the repeat, and the graph that it unrolls."""
    depth, settings, _ = CASES[kind]
    unroll, given = LayerRepeat.unroll, []

    def noted(repeat, traced):
        given.append((repeat, traced.copy()))
        return unroll(repeat, traced)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerRepeat, "unroll", noted)
        found = build_unpacked(deep(kind, depth, **settings), OPTIONS, reference=reference_of(kind))
    return found, *given[0]


@pytest.mark.parametrize("kind", CASES)
def test_layers_that_are_alike_are_compiled_once(kind):
    (found, repeat, _), (depth, _, kept) = built(kind), CASES[kind]
    report = found.program.report
    assert (report.layers_compiled, repeat.total) == (kept, depth)
    assert report.attention_recognized == report.attention_total == depth
    assert report.verdict.ok
    caches = {node.name: cache_index(node) for node in found.traced.placeholders if is_cache_input(node.name)}
    assert set(caches.values()) == set(range(depth))
    assert all(name.endswith(f"_cache_{index}") for name, index in caches.items())
    windows = [spec.sliding_window > 0 for spec in found.traced.caches]
    assert windows == [kind == "gemma3_text" and i % 3 < 2 for i in range(depth)]


@pytest.mark.parametrize("kind", CASES)
def test_program_is_the_one_of_all_layers(kind):
    found, (depth, settings, _) = built(kind)[0], CASES[kind]
    whole = build_unpacked(deep(kind, depth, **settings), replace(OPTIONS, verify="off"))
    assert whole.program.report.layers_compiled is None

    def operators(graph):
        return Counter(callee(n) for n in graph.graph.nodes if n.op == "call_function")

    assert operators(found.traced) == operators(whole.traced)
    # Equal tables become one.
    assert len(found.traced.placeholders) <= len(whole.traced.placeholders)
    linkage, expected = Linkage.of(found.traced), Linkage.of(whole.traced)
    assert linkage.caches == expected.caches
    assert sorted(map(len, linkage.merged.values())) == sorted(map(len, expected.merged.values()))
    reference = reference_of(kind)
    assert torch.equal(logits(found.program, reference), logits(whole.program, reference))


@pytest.mark.parametrize("differs", [None, 4])
def test_numbers_that_are_read_off_layers_are_those_of_all(differs):
    """A scale stands in the copies of a layer as a number: too little off for the self-check to tell."""
    model = deep("llama", attn_implementation="eager")
    for i, layer in enumerate(model.model.layers):
        scale = layer.self_attn.scaling * (1.0 + 1e-6 * (i == differs))
        layer.self_attn.scaling = nn.Parameter(torch.tensor(scale), requires_grad=False)
    found = build_unpacked(model, OPTIONS)
    report = found.program.report
    assert (report.verdict.ok, report.layers_compiled) == (True, 4 if differs is None else None)
    guarded = {id(tensor) for tensor in found.program.copied_weights}
    assert {id(layer.self_attn.scaling) for layer in model.model.layers} <= guarded


def test_nodes_say_which_layer_they_are_of():
    layers = decoder_layers(built("llama")[0].traced.graph)
    assert layers.paths == tuple(f"model.layers.{i}" for i in range(DEPTH))
    assert len({len(layers.nodes(i)) for i in range(1, DEPTH - 1)}) == 1
    weights = [name for node in layers.nodes(4) for n in node.all_input_nodes if "weight" in (name := n.name)]
    assert weights
    assert all(re.search(r"layers_4_|_merged|folded", name) for name in weights)


@pytest.mark.parametrize(
    "given", [{"pack_weights": True}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}], ids=str
)
def test_how_weights_and_caches_are_held(given):
    if "pack_weights" in given and not can_pack(torch.bfloat16):
        pytest.skip("no packed bf16 products on this CPU")
    program = build_program(deep("llama", dtype=torch.bfloat16), CompileOptions(codegen="none", **given))
    assert program.report.layers_compiled == 4
    assert program.report.verdict.ok
    names = [r.name for r in program.report.passes if r.matches]
    if "kv_cache_dtype" in given:
        assert {spec.dtype for spec in program.caches} == {torch.int8}
    else:
        assert ("pack_linears" if "pack_weights" in given else "quantize_linears") in names
        (record,) = (r for r in program.report.passes if r.name in ("pack_linears", "quantize_linears") and r.matches)
        assert record.matches == 4 * DEPTH + 1


def test_inductor_takes_the_deep_graph():
    program = build_program(deep("llama"), CompileOptions(codegen="inductor"))
    assert (program.report.codegen, program.report.layers_compiled) == ("inductor", 4)
    assert program.report.verdict.ok


def exchanged(values, one, other):
    values[one], values[other] = values[other], values[one]


def down_projections(inputs, *layers):
    """Inputs that receive a matrix of the MLP of each of these layers."""
    return [next(name for name in inputs if re.search(rf"layers_(modules_)?{i}_.*down_proj", name)) for i in layers]


@pytest.mark.parametrize("verify", ["model", "full"])
@pytest.mark.parametrize("fault", ["exchanged", "read twice"])
def test_weights_of_other_layers_are_found_out_before_anything_is_packed(verify, fault, monkeypatch, caplog):
    unroll = LayerRepeat.unroll

    def wrong(repeat, traced):
        unrolled = unroll(repeat, traced)
        one, other = down_projections(unrolled.constants, 4, 5)
        if fault == "exchanged":
            exchanged(unrolled.constants, one, other)
        else:
            unrolled.constants[one] = unrolled.constants[other]
        return unrolled

    monkeypatch.setattr(LayerRepeat, "unroll", wrong)
    with caplog.at_level(logging.INFO):
        report = build_program(deep("llama"), replace(OPTIONS, verify=verify)).report
    assert report.layers_compiled is None and report.verdict.ok
    assert "compiling all layers of LlamaForCausalLM: model.layers" in caplog.text


@pytest.mark.parametrize("verify", ["model", "full"])
@pytest.mark.parametrize("layers", [(4, 5), (1, 2)], ids=["copies", "compiled"])
def test_weights_that_are_packed_in_the_place_of_others_are_refused(verify, layers, monkeypatch):
    pack = LinkedProgram.pack_weights

    def wrong(program, **how):
        size = pack(program, **how)
        if len(program.caches) == DEPTH:
            inputs = program.linkage.inputs
            exchanged(program._args, *map(inputs.index, down_projections(inputs, *layers)))
        return size

    monkeypatch.setattr(LinkedProgram, "pack_weights", wrong)
    options = CompileOptions(codegen="none", quantization="int8", verify=verify)
    found = "the packed weight" if verify == "model" and layers == (4, 5) else "logits differ"
    with pytest.raises(UnsupportedModel, match=f"with rounded weights {found}"):
        build_program(deep("llama"), options)


def test_few_layers_are_compared_or_all(monkeypatch):
    original, given = build_module.reference_of_model, []

    def noted(model, schedule=None):
        given.append((len(model.model.layers), schedule))
        return original(model, schedule)

    monkeypatch.setattr(build_module, "reference_of_model", noted)
    build_program(deep("llama"), OPTIONS)
    assert given == [(4, None)]
    given.clear()
    build_unpacked(deep("llama"), OPTIONS, compares_all=True)
    assert given == [(DEPTH, SHORT_SCHEDULE), (4, None)]
    given.clear()
    build_program(deep("llama"), replace(OPTIONS, verify="full"))
    assert given == [(DEPTH, None)]


class OddLayer(LlamaDecoderLayer):
    """The last layer is another one, and no attribute says so."""

    def forward(self, hidden_states, *args, **kwargs):
        hidden_states = super().forward(hidden_states, *args, **kwargs)
        return hidden_states.flip(-1) if self.self_attn.layer_idx == 4 else hidden_states


def test_layers_that_only_seem_alike_are_found_out(caplog, monkeypatch):
    monkeypatch.setattr(layer_repeat, "_check_code", lambda model: None)
    model = deep("llama", 5)
    for layer in model.model.layers:
        layer.__class__ = OddLayer
    assert LayerRepeat.of(model) is not None
    with caplog.at_level(logging.INFO):
        report = build_program(model, replace(OPTIONS, verify="full")).report
    assert report.layers_compiled is None
    assert report.verdict.ok
    assert report.attention_total == 5
    assert "compiling all layers of" in caplog.text and ": logits differ" in caplog.text


class LateLayer(LlamaDecoderLayer):
    """The upper layers are others, but not for the tokens that the self-check runs."""

    def forward(self, hidden_states, *args, **kwargs):
        hidden_states = super().forward(hidden_states, *args, **kwargs)
        if self.self_attn.layer_idx >= 4:
            hidden_states = torch.where(kwargs["position_ids"][..., None] > 60, -hidden_states, hidden_states)
        return hidden_states


def test_layers_that_differ_beyond_what_is_compared_are_all_compiled(caplog):
    model = deep("llama")
    for layer in model.model.layers:
        layer.__class__ = LateLayer
    with caplog.at_level(logging.INFO):
        program = build_program(model, OPTIONS)
    assert "model.layers.0 runs code other than transformers'" in caplog.text
    assert program.report.layers_compiled is None
    long = reference_of_model(model, Schedule((11, 27, 100), (3, 9, 60), 4))
    for _, found, expected in compared_steps(program, long):
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)


class MasksByIndex(LlamaModel):
    """Hands a window to the upper half of its layers, longer than what the self-check runs."""

    def forward(self, input_ids=None, position_ids=None, use_cache=None, **kwargs):
        hidden = self.embed_tokens(input_ids)
        rope = self.rotary_emb(hidden, position_ids)
        behind = torch.arange(hidden.shape[1])[:, None] - torch.arange(hidden.shape[1])
        full, window = (
            torch.where((behind >= 0) & (behind < most), 0.0, torch.finfo(torch.float32).min)[None, None]
            for most in (1 << 20, 256)
        )
        for i, layer in enumerate(self.layers):
            mask = full if i < len(self.layers) // 2 else window
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rope)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


def test_windows_by_the_layers_index_are_served():
    model = deep("llama", sliding_window=256, max_position_embeddings=1024).eval()
    model.model.__class__ = MasksByIndex
    program = build_program(model, CompileOptions(codegen="none", target="cpu"))
    assert program.report.layers_compiled is None and program.report.verdict.ok
    assert [spec.sliding_window for spec in program.caches] == [1 << 20] * 3 + [256] * 3


def test_code_from_elsewhere_is_seen(monkeypatch):
    def patched(model):
        model.model.forward = model.model.forward.__func__.__get__(model.model)
        assert LayerRepeat.of(model) is not None
        model.model.forward = lambda *args, **kwargs: type(model.model).forward(model.model, *args, **kwargs)

    def hooked(model):
        model.model.register_forward_hook(lambda *_: None)

    def hooked_before(model):
        model.model.layers[3].register_forward_pre_hook(lambda *_: None)

    def registered(model):
        monkeypatch.setitem(AttentionInterface._global_mapping, "by_index", lambda *args, **_: args[1])
        model.config._attn_implementation = "by_index"

    for change in (patched, hooked, hooked_before, registered):
        model = deep("llama")
        assert LayerRepeat.of(model) is not None
        change(model)
        assert LayerRepeat.of(model) is None, change.__name__


class Doubling(nn.Module):
    def forward(self, x):
        return x * 2


def test_layers_that_differ_are_all_compiled():
    def scale(model):
        model.model.layers[DEPTH - 2].self_attn.scaling *= 1.1

    def submodule(model):
        model.model.layers[DEPTH - 2].mlp.act_fn = Doubling()

    def width(model):
        mlp = model.model.layers[DEPTH - 2].mlp
        mlp.up_proj, mlp.gate_proj = (nn.Linear(64, 80, bias=False) for _ in range(2))
        mlp.down_proj = nn.Linear(80, 64, bias=False)

    def entry_of_the_config(model):
        model.config.some_list = [0] * (DEPTH - 2) + [1, 0]

    for change in (scale, submodule, width, entry_of_the_config):
        model = deep("llama")
        assert LayerRepeat.of(model) is not None
        change(model)
        assert LayerRepeat.of(model) is None, change.__name__


def test_scale_by_depth_is_seen():
    assert LayerRepeat.of(deep("gpt2", scale_attn_by_inverse_layer_idx=True)) is None


def test_first_layers_may_differ():
    model = deep("llama", 10)
    model.model.layers[1].self_attn.scaling *= 1.1
    repeat = LayerRepeat.of(model)
    assert repeat is not None
    assert (repeat.kept, repeat.period) == (6, 1)


@pytest.mark.parametrize(("depth", "kept"), [(12, 9), (13, 10), (14, 8)])
def test_whole_periods_are_repeated(depth, kept):
    repeat = LayerRepeat.of(deep("gemma3_text", depth, **layer_types(SLIDING, SLIDING, FULL, depth=depth)))
    assert repeat is not None
    assert (repeat.kept, repeat.period) == (kept, 3)


def test_lists_inside_of_layers_are_none_of_layers():
    model = deep("llama")
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(2 * DEPTH))
    repeat = LayerRepeat.of(model)
    assert repeat is not None
    assert (repeat.path, repeat.kept) == ("model.layers", 4)


def test_few_layers_are_not_worth_while(monkeypatch):
    monkeypatch.setattr(layer_repeat, "LEAST_SAVED", LEAST_SAVED)
    assert LayerRepeat.of(deep("llama", 7)) is None
    assert LayerRepeat.of(deep("llama", 8)) is not None


def test_model_has_all_its_layers_again():
    model = deep("llama")
    layers, names = model.model.layers, [name for name, _ in model.named_modules()]
    repeat = LayerRepeat.of(model)
    with pytest.raises(RuntimeError), repeat.shortened():
        assert len(model.model.layers) == 4
        raise RuntimeError
    assert model.model.layers is layers
    assert [name for name, _ in model.named_modules()] == names


def test_what_cannot_be_checked_is_compiled_with_all_layers(monkeypatch):
    asked = []
    monkeypatch.setattr(LayerRepeat, "of", asked.append)
    model = deep("llama", 1)
    build_program(model, replace(OPTIONS, verify="off"))
    register_pass("mine", lambda graph: PassRecord("mine"))
    try:
        build_program(model, OPTIONS)
    finally:
        unregister_pass("mine")
    assert not asked
    build_program(model, OPTIONS)
    assert asked == [model]


@pytest.fixture
def kept_graph():
    """The repeat, and a copy of the rewritten graph of the kept layers."""
    _, repeat, traced = built("llama")
    return repeat, traced.copy()


def test_number_in_one_layer_alone(kept_graph):
    repeat, traced = kept_graph
    node = list(paged_attention_nodes(traced))[-1]
    node.args = (*node.args[:11], node.args[11] * 2, *node.args[12:])
    with pytest.raises(CannotRepeat, match=r"differ$"):
        repeat.unroll(traced)


def test_operator_in_one_layer_alone(kept_graph):
    repeat, traced = kept_graph
    node = list(paged_attention_nodes(traced))[-1]
    query = node.args[0]
    with traced.before(node):
        node.replace_input_with(query, traced.call(torch.ops.aten.neg.default, query))
    with pytest.raises(CannotRepeat, match="operators follow each other"):
        repeat.unroll(traced)


def test_layer_that_reads_another_than_the_one_before(kept_graph):
    repeat, traced = kept_graph
    calls = [
        n for n in traced.graph.nodes if callee(n).startswith("pagoda.add_rms_norm") or "add_rms_norm" in callee(n)
    ]
    last = list(paged_attention_nodes(traced))[-1]
    call = next(n for n in reversed(calls) if n < last)
    call.args = (calls[0].args[0], *call.args[1:])
    with pytest.raises(CannotRepeat):
        repeat.unroll(traced)


def test_head_that_reads_a_layer_in_the_middle(kept_graph):
    repeat, traced = kept_graph
    middle, head = list(paged_attention_nodes(traced))[-2], traced.output.args[0][0]
    with traced.before(traced.output):
        extra = traced.call(torch.ops.aten.add.Tensor, head, traced.call(torch.ops.aten.sum.default, middle))
    traced.output.args = ((extra,),)
    with pytest.raises(CannotRepeat, match="not the last"):
        repeat.unroll(traced)


def test_unrolling_leaves_the_given_graph(kept_graph):
    repeat, traced = kept_graph
    before = [n.format_node() for n in traced.graph.nodes]
    assert len(list(paged_attention_nodes(repeat.unroll(traced)))) == DEPTH
    assert [n.format_node() for n in traced.graph.nodes] == before
    assert len(traced.caches) == 4
