"""Parameters become views of merged tensors: identity, values, memory, saving, and who notices what."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys

import pytest
import torch
from aten_graphs import aten_of_model, aten_of_module, run_graph
from safetensors.torch import load_file, save_file
from stored_weights import stored_weight
from torch import nn
from transformers import AutoModelForCausalLM

from torch_pagoda import LLM
from torch_pagoda.compiler import WeightGuard
from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.verify.self_check import check, reference_of_model
from torch_pagoda.compiler.weights.merged_weights import AddedArguments, link_merged_weights, merge_rows
from torch_pagoda.passes.recognize.linear import recognize_linear
from torch_pagoda.passes.rewrite.merge_linears import merge_linears

from tiny_models import build_tiny_model
from toy_lm import ToyLM, sdpa


def linears(sizes=(8, 4, 4), width=6, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(width, n, dtype=dtype) for n in sizes)


def weights(layers):
    return [layer.weight for layer in layers]


def merged_graph(model):
    graph = aten_of_model(model)
    recognize_linear(graph)
    assert merge_linears(graph).matches
    graph.recompile()
    return graph


def linked(model):
    graph = merged_graph(model)
    return link(graph, graph.module)


@pytest.fixture(scope="module")
def llama():
    """A tiny llama whose weights are merged; tests leave the weights as they are."""
    model = build_tiny_model("llama", num_hidden_layers=1)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    program = linked(model)
    return model, state, program


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def test_parameters_become_rows_and_keep_their_identity():
    layers = linears()
    before = [(p, p.detach().clone(), p.shape, p.stride(), p.requires_grad) for p in weights(layers)]
    whole = merge_rows(weights(layers))
    assert torch.equal(whole, torch.cat([values for _, values, *_ in before]))
    for layer, (p, values, shape, stride, requires_grad) in zip(layers, before, strict=True):
        assert layer.weight is p
        assert (p.shape, p.stride(), p.requires_grad, p.is_leaf) == (shape, stride, requires_grad, True)
        assert torch.equal(p, values)
        assert storage(p) == storage(whole)
    assert type(whole) is torch.Tensor
    assert not whole.requires_grad


def test_merging_again_moves_nothing():
    layers = linears()
    whole = merge_rows(weights(layers))
    again = merge_rows(weights(layers))
    assert again.data_ptr() == whole.data_ptr()
    part = merge_rows(weights(layers)[1:])
    assert part.data_ptr() == layers[1].weight.data_ptr()
    assert torch.equal(part, whole[8:])


def test_values_flow_both_ways():
    layers = linears()
    whole = merge_rows(weights(layers))
    layers.load_state_dict({name: tensor + 1 for name, tensor in layers.state_dict().items()})
    assert torch.equal(whole, torch.cat([p.detach() for p in weights(layers)]))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    sum(layer(torch.ones(2, 6)).sum() for layer in layers).backward()
    before = whole.clone()
    optimizer.step()
    assert torch.equal(whole, before - 1.0)


def test_biases_buffers_and_one_dimension():
    a, b = torch.randn(3), nn.Parameter(torch.randn(5))
    expected = torch.cat([a, b.detach()])
    assert torch.equal(merge_rows([a, b]), expected)
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_parameters_made_in_inference_mode():
    with torch.inference_mode():
        layers = linears()
        x = torch.randn(2, 6)
        expected = [layer(x) for layer in layers]
    whole = merge_rows(weights(layers))
    assert whole.is_inference()
    assert all(p.is_inference() for p in weights(layers))
    with torch.inference_mode():
        assert all(torch.equal(layer(x), y) for layer, y in zip(layers, expected, strict=True))


def test_ordinary_parameters_merged_in_inference_mode_stay_ordinary():
    layers = linears()
    with torch.inference_mode():
        merge_rows(weights(layers))
    assert not any(p.is_inference() for p in weights(layers))
    layers[0](torch.ones(1, 6)).sum().backward()


def test_state_dict_round_trips(tmp_path, llama):
    model, state, _ = llama
    assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == {
        name: tuple(t.shape) for name, t in state.items()
    }
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_file(tmp_path / "state.safetensors").items())
    torch.save(model.state_dict(), tmp_path / "state.pt")
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert os.path.getsize(tmp_path / "state.pt") < 1.5 * size + 20_000
    assert all(torch.equal(t, state[name]) for name, t in torch.load(tmp_path / "state.pt").items())


def test_save_pretrained_round_trips(tmp_path, llama):
    model, state, _ = llama
    model.save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert set(found) == set(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())


def test_copies_and_pickles_are_models_of_their_own(llama):
    model, state, _ = llama
    ids = torch.randint(3, 200, (1, 9))
    with torch.no_grad():
        expected = model(ids).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(ids).logits, expected)
            other.model.layers[0].self_attn.q_proj.weight.zero_()
            other.model.layers[0].mlp.up_proj.weight.zero_()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_copy_takes_no_more_memory_than_its_parameters():
    layers = linears((64, 32, 32), width=64)
    merge_rows(weights(layers))
    made = copy.deepcopy(layers)
    held = {storage(p): p.untyped_storage().nbytes() for p in made.parameters()}
    assert sum(held.values()) == sum(p.numel() * 4 for p in made.parameters())


def test_a_half_copy_and_a_saved_tensor_can_be_taken(llama):
    model, state, _ = llama
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half.model.layers[0].self_attn.k_proj.weight.dtype is torch.bfloat16
    buffer = io.BytesIO()
    torch.save(model.model.layers[0].self_attn.k_proj.weight, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), state["model.layers.0.self_attn.k_proj.weight"])


def test_two_programs_of_one_module_share_its_merged_weights(llama):
    model, _, program = llama
    reference = reference_of_model(model)
    places = [p.data_ptr() for p in model.parameters()]
    other = linked(model)
    assert [p.data_ptr() for p in model.parameters()] == places
    assert check(program, reference).ok
    assert check(other, reference).ok
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    changed = reference_of_model(model)
    assert not check(program, reference).ok
    assert check(program, changed).ok
    assert check(other, changed).ok
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.div_(1.5)


def test_tied_weights_stay_tied():
    model = build_tiny_model("llama", num_hidden_layers=1, tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight
    assert model.lm_head.weight is embedding
    place = embedding.data_ptr()
    linked(model)
    assert model.lm_head.weight is model.get_input_embeddings().weight is embedding
    assert embedding.data_ptr() == place


def test_linking_copies_of_a_graph_and_dropping_it_is_harmless():
    model = ToyLM(sdpa)
    reference = reference_of_model(model)
    plain = aten_of_model(model)
    recognize_linear(plain)
    graph = plain.copy()
    merge_linears(graph)
    for attempt in (graph.copy(), graph, graph.copy()):
        attempt.recompile()
        assert check(link(attempt, attempt.module), reference).ok
    assert storage(model.q.weight) == storage(model.v.weight)
    plain.recompile()
    assert check(link(plain, plain.module), reference).ok
    assert torch.equal(reference_of_model(model).logits[0], reference.logits[0])


def test_guards_of_older_programs_accept_a_merge_but_no_other_move():
    model = ToyLM(sdpa)
    guard = WeightGuard(model)
    program = linked(model)
    guard.check()
    own = WeightGuard(model, program.copied_weights, program.merged_weights)
    own.check()
    assert {id(t) for t in program.merged_weights} == {id(model.q.weight), id(model.k.weight), id(model.v.weight)}
    model.k.weight.data = model.k.weight.detach().clone()
    for each in (guard, own):
        with pytest.raises(RuntimeError, match=r"'k\.weight' of ToyLM was replaced or moved"):
            each.check()
    linked(model)
    for each in (guard, own):
        with pytest.raises(RuntimeError, match="weight' of ToyLM was replaced or moved"):
            each.check()


def test_another_grouping_leaves_the_older_program_stale_and_noticed():
    layers = linears()
    merge_rows(weights(layers))
    guard = WeightGuard(layers, merged=weights(layers))
    plain = WeightGuard(layers)
    merge_rows([layers[0].weight, layers[2].weight])
    plain.check()
    with pytest.raises(RuntimeError, match="was replaced or moved"):
        guard.check()


def to_half(model):
    model.to(torch.bfloat16)


def assign(model):
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def swap_data(model):
    model.q.weight.data = model.q.weight.detach().clone()


@pytest.mark.parametrize("move", [to_half, assign, swap_data])
def test_parameters_that_move_after_merging_are_noticed(move):
    model = ToyLM(sdpa)
    program = linked(model)
    guard = WeightGuard(model, program.copied_weights, program.merged_weights)
    model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
    guard.check()
    move(model)
    with pytest.raises(RuntimeError, match="was replaced or moved after the model was compiled"):
        guard.check()


def test_an_engine_follows_a_later_merge_and_notices_a_move():
    model = build_tiny_model("llama", num_hidden_layers=1)
    engine = LLM(model, codegen="none", num_blocks=16, max_num_seqs=2)
    engine.check_weights()
    linked(model)
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})
    engine.check_weights()
    model.model.layers[0].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' .* was replaced or moved"):
        engine.check_weights()


class Call(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(6, 8), nn.Linear(6, 4)
        self.requires_grad_(False)

    def forward(self, x):
        return torch.cat([self.q(x), self.k(x)], -1)


def test_a_call_that_receives_the_parameters_checks_them():
    module = Call()
    graph = aten_of_module(module, torch.randn(1, 5, 6))
    names = [n.name for n in graph.placeholders]
    recognize_linear(graph)
    merge_linears(graph)
    link_merged_weights(graph)
    graph.recompile()
    arguments = AddedArguments(graph, len(names))
    assert [tuple(t.shape) for t in arguments.tensors] == [(12, 6), (12,)]
    x = torch.randn(1, 7, 6)
    given = {name: graph.constants.get(name) for name in names}
    values = [given[name] if given[name] is not None else x if "x" in name else 7 for name in names]
    arguments.check(values)
    (result,) = graph.module(*values, *arguments.tensors)
    torch.testing.assert_close(result, module(x), atol=1e-6, rtol=1e-6)
    module.k.weight.data = module.k.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"'k\.weight' was replaced or moved"):
        arguments.check(values)
    torch.testing.assert_close(run_graph(graph, x), module(x), atol=1e-6, rtol=1e-6)


MERGE_192_MB = """
import psutil, torch
from torch_pagoda.compiler.weights.merged_weights import merge_rows

rss = lambda: psutil.Process().memory_info().rss
groups = [[torch.nn.Parameter(torch.ones(1024, 2048), requires_grad=False) for _ in range(3)] for _ in range(8)]
before = rss()
peak = 0
for group in groups:
    merge_rows(group)
    peak = max(peak, rss())
print(peak - before, rss() - before)
"""


def test_memory_does_not_grow_by_the_weights():
    """Memory of a fresh process while 192 MB of weights are merged, 24 MB at a time."""
    run = subprocess.run([sys.executable, "-c", MERGE_192_MB], capture_output=True, text=True, check=True)
    peak, after = map(int, run.stdout.split())
    assert peak < 60 * 2**20
    assert after < 40 * 2**20


@pytest.mark.parametrize("form", ["int4/g32/f16+z", "int8/row/f32", "e4m3/g32/f32"])
def test_stored_weights_become_rows_of_one(form):
    weights = [stored_weight(form, outputs, 64, seed=outputs) for outputs in (6, 3, 10)]
    before = [weight.dense() for weight in weights]
    whole = merge_rows(weights)
    assert torch.equal(whole.dense(), torch.cat(before))
    assert all(torch.equal(weight.dense(), dense) for weight, dense in zip(weights, before, strict=True))
    again = merge_rows(weights)  # for another graph: nothing is copied
    assert torch.equal(again.dense(), whole.dense()) and again.codes.data_ptr() == whole.codes.data_ptr()
    assert again.scales.data_ptr() == whole.scales.data_ptr()


def test_codes_that_lie_together_do_not_make_their_scales_do_so():
    """As in a file whose codes follow each other, and whose zeros were unpacked one by one."""
    weights = [stored_weight("int4/g32/f16+z", 4, 64, seed=i) for i in range(2)]
    before = [weight.dense() for weight in weights]
    codes, padded = torch.cat([weight.codes for weight in weights]), torch.zeros(16, 2, dtype=torch.float16)
    for i, weight in enumerate(weights):
        padded[8 * i : 8 * i + 4] = weight.scales
        weight.codes, weight.scales = codes[4 * i : 4 * i + 4], padded[8 * i : 8 * i + 4]
    assert torch.equal(merge_rows(weights).dense(), torch.cat(before))
