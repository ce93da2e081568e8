"""torch.compile(model, backend="pagoda"): any call with the user's own cache, and training left alone."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_pagoda.compiler import backend as backend_module
from torch_pagoda.compiler import options
from torch_pagoda.passes import PASSES, Pass, PassRecord
from torch_pagoda.passes.graph import fx_nodes
from torch_pagoda.passes.graph.fx_nodes import callee

from tiny_models import build_tiny_model

OPTIONS = {"codegen": "none"}


@pytest.fixture
def ids():
    return torch.randint(3, 200, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rewritten_graphs(monkeypatch):
    """Collect the graphs that the backend returns."""
    graphs = []
    original = backend_module._rewrite

    def spy(gm, example_inputs, options):
        result = original(gm, example_inputs, options)
        graphs.append(result)
        return result

    monkeypatch.setattr(backend_module, "_rewrite", spy)
    return graphs


def attention_calls(graph):
    return [n for n in graph.graph.nodes if n.target is torch.ops.pagoda.attention.default]


@pytest.fixture
def handed_on(monkeypatch):
    """The graphs that the backend hands to inductor as they are, in whose place they run uncompiled."""
    graphs = []

    def run(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(backend_module, "compile_fx", run)
    return graphs


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bloom"])
def test_forward_by_entry_point(name, ids, monkeypatch):
    graphs = rewritten_graphs(monkeypatch)
    model = build_tiny_model(name)
    with torch.no_grad():
        expected = model(ids).logits
        found = torch.compile(model, backend="pagoda", options=OPTIONS)(ids).logits
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    if name != "bloom":
        assert len(attention_calls(graphs[0])) == model.config.num_hidden_layers


@pytest.mark.usefixtures("two_threads")
def test_forward_and_generate_through_inductor(ids):
    model = build_tiny_model("llama", num_hidden_layers=1)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    settings["attention_mask"] = torch.ones_like(ids)
    with torch.no_grad():
        expected = model(ids).logits
        found = torch.compile(model, backend="pagoda")(ids).logits
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    continued = model.generate(ids, **settings)
    model.compile(backend="pagoda")
    assert torch.equal(model.generate(ids, **settings), continued)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_with_the_users_cache(cache, ids, monkeypatch):
    graphs = rewritten_graphs(monkeypatch)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if cache == "static":
        settings["cache_implementation"] = "static"
    model = build_tiny_model("llama")
    expected = model.generate(ids, attention_mask=mask, **settings)
    model.compile(backend="pagoda", options=OPTIONS)
    found = model.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(found, expected)
    assert graphs and all(len(attention_calls(g)) == model.config.num_hidden_layers for g in graphs)


def test_training_goes_to_inductor_unrewritten(ids, monkeypatch):
    graphs = rewritten_graphs(monkeypatch)
    monkeypatch.setattr(backend_module, "_warned_of_training", False)
    model = build_tiny_model("llama", num_hidden_layers=1).requires_grad_(True)
    reference = build_tiny_model("llama", num_hidden_layers=1).requires_grad_(True)
    with pytest.warns(UserWarning, match=r"torch\.inference_mode\(\)"):
        torch.compile(model, backend="pagoda")(ids, labels=ids).loss.backward()
    assert not graphs
    reference(ids, labels=ids).loss.backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, atol=1e-3, rtol=1e-2)


def test_training_is_warned_of_once(ids, monkeypatch, handed_on):
    monkeypatch.setattr(backend_module, "_warned_of_training", False)
    model = build_tiny_model("llama", num_hidden_layers=1).requires_grad_(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(model, backend="pagoda")
        compiled(ids, labels=ids)
        compiled(ids[:, :7], labels=ids[:, :7])
    assert len(handed_on) == 2
    assert len([w for w in caught if "torch.inference_mode()" in str(w.message)]) == 1


def test_a_module_in_train_mode_is_not_rewritten_under_no_grad(ids, monkeypatch, handed_on):
    graphs = rewritten_graphs(monkeypatch)
    monkeypatch.setattr(backend_module, "_warned_of_training", False)
    model = build_tiny_model("llama", num_hidden_layers=1).train()
    with pytest.warns(UserWarning, match=r"train\(\)"), torch.no_grad():
        torch.compile(model, backend="pagoda")(ids)
    assert handed_on and not graphs


def test_a_submodule_in_train_mode_counts(ids, monkeypatch, handed_on):
    graphs = rewritten_graphs(monkeypatch)
    monkeypatch.setattr(backend_module, "_warned_of_training", False)
    model = build_tiny_model("llama", num_hidden_layers=1)
    model.model.layers[0].train()
    with pytest.warns(UserWarning, match=r"train\(\)"), torch.no_grad():
        torch.compile(model, backend="pagoda", options=OPTIONS)(ids)
    assert handed_on and not graphs


def test_a_module_in_train_mode_counts_behind_a_decorator(ids, monkeypatch, handed_on):
    model = build_tiny_model("llama", num_hidden_layers=1).train()
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda *args, **kwargs: forward(*args, **kwargs))
    monkeypatch.setattr(backend_module, "_warned_of_training", False)
    with pytest.warns(UserWarning, match=r"train\(\)"), torch.no_grad():
        torch.compile(model, backend="pagoda")(ids)
    assert handed_on


GLOBAL_MODEL = None


def test_a_global_module_in_train_mode_counts(ids, monkeypatch, handed_on):
    graphs = rewritten_graphs(monkeypatch)
    monkeypatch.setattr(backend_module, "_warned_of_training", False)
    monkeypatch.setitem(globals(), "GLOBAL_MODEL", build_tiny_model("llama", num_hidden_layers=1).train())

    @torch.compile(backend="pagoda", options=OPTIONS)
    def logits(tokens):
        return GLOBAL_MODEL(tokens, use_cache=False).logits

    with pytest.warns(UserWarning, match=r"train\(\)"), torch.no_grad():
        logits(ids)
    assert handed_on and not graphs
    GLOBAL_MODEL.eval()
    torch._dynamo.reset()
    with torch.no_grad():
        logits(ids)
    assert graphs


def test_a_pass_that_fails_is_left_out(ids, monkeypatch, caplog):
    def fail(graph):
        raise IndexError("out of luck")

    monkeypatch.setattr(options, "PASSES", (*PASSES, Pass("unlucky", fail, required=False)))
    graphs = rewritten_graphs(monkeypatch)
    model = build_tiny_model("llama", num_hidden_layers=1)
    with torch.no_grad():
        expected = model(ids).logits
        found = torch.compile(model, backend="pagoda", options=OPTIONS)(ids).logits
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert len(attention_calls(graphs[0])) == model.config.num_hidden_layers
    assert "dropping pass unlucky" in caplog.text


def test_every_pass_leaves_out_the_one_that_changes_the_numbers(ids, monkeypatch, caplog):
    def scale(graph):
        head = next(n for n in reversed(graph.graph.nodes) if callee(n) == "linear")
        with graph.graph.inserting_after(head):
            wrong = graph.graph.call_function(torch.mul, (head, 2.0))
        wrong.meta["example_value"] = head.meta["example_value"]
        head.replace_all_uses_with(wrong, delete_user_cb=lambda u: u is not wrong)
        return PassRecord("scale", matches=1)

    monkeypatch.setattr(options, "PASSES", (*PASSES, Pass("scale", scale, required=False)))
    graphs = rewritten_graphs(monkeypatch)
    model = build_tiny_model("llama", num_hidden_layers=1)
    with torch.no_grad():
        torch.compile(model, backend="pagoda", options={**OPTIONS, "verify": "every-pass"})(ids)
    assert len(attention_calls(graphs[0])) == model.config.num_hidden_layers
    assert "dropping pass scale" in caplog.text


def test_packed_weights_are_not_for_the_drop_in(ids):
    compiled = torch.compile(
        build_tiny_model("llama", num_hidden_layers=1), backend="pagoda", options={"pack_weights": True}
    )
    with pytest.raises(Exception, match="pack_weights=True cannot be used with backend='pagoda'"), torch.no_grad():
        compiled(ids)


def test_nothing_is_quantized_whose_inputs_could_be_rounded(ids):
    compiled = torch.compile(
        build_tiny_model("llama", num_hidden_layers=1), backend="pagoda", options={"input_bits": 16}
    )
    with pytest.raises(Exception, match="input_bits=16 cannot be used with backend='pagoda'"), torch.no_grad():
        compiled(ids)


def test_the_callers_steps_have_no_static_graphs(ids):
    options = {"static_decode": True, "target": "npu", "codegen": "ge"}
    compiled = torch.compile(build_tiny_model("llama", num_hidden_layers=1), backend="pagoda", options=options)
    with pytest.raises(Exception, match="static_decode=True cannot be used with backend='pagoda'"), torch.no_grad():
        compiled(ids)


def test_the_callers_cache_is_not_rounded(ids):
    compiled = torch.compile(
        build_tiny_model("llama", num_hidden_layers=1), backend="pagoda", options={"kv_cache_dtype": "int8"}
    )
    with (
        pytest.raises(Exception, match="kv_cache_dtype='int8' cannot be used with backend='pagoda'"),
        torch.no_grad(),
    ):
        compiled(ids)


def test_unknown_options_are_named(ids):
    compiled = torch.compile(
        build_tiny_model("llama", num_hidden_layers=1), backend="pagoda", options={"verfy": "off"}
    )
    with pytest.raises(Exception, match="did you mean 'verify'"), torch.no_grad():
        compiled(ids)


def test_a_rewrite_that_changes_the_numbers_is_not_used(ids, monkeypatch, caplog):
    model = build_tiny_model("llama", num_hidden_layers=1)
    monkeypatch.setattr(backend_module, "difference", lambda *a: "its outputs differ")
    graphs = rewritten_graphs(monkeypatch)
    with torch.no_grad():
        torch.compile(model, backend="pagoda", options=OPTIONS)(ids)
    assert not attention_calls(graphs[0])
    assert "not used" in caplog.text


def fused_graphs(monkeypatch):
    """Collect the ATen graphs that the backend runs."""
    graphs = []
    original = backend_module.call_kernels

    def spy(traced):
        graphs.append(traced)
        return original(traced)

    monkeypatch.setattr(backend_module, "call_kernels", spy)
    return graphs


@pytest.mark.parametrize("opt_level", [0, 2])
def test_the_aten_graph_is_fused(opt_level, ids, monkeypatch):
    graphs = fused_graphs(monkeypatch)
    model = build_tiny_model("llama")
    layers = model.config.num_hidden_layers
    with torch.no_grad():
        expected = model(ids).logits
        found = torch.compile(model, backend="pagoda", options={**OPTIONS, "opt_level": opt_level})(ids).logits
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    names = [callee(n) for n in graphs[0].graph.nodes]
    if opt_level == 0:
        assert not {"add_rms_norm", "rms_norm", "rope", "gated_activation"} & set(names)
    else:
        assert names.count("add_rms_norm") == 2 * layers
        assert names.count("rope") == names.count("gated_activation") == layers
        assert names.count("linear") == 4 * layers + 1, "q, k, v and gate, up are one each"


def test_merged_weights_that_moved_are_noticed(ids):
    model = build_tiny_model("llama", num_hidden_layers=1)
    compiled = torch.compile(model, backend="pagoda", options=OPTIONS)
    with torch.no_grad():
        compiled(ids)
        weight = model.model.layers[0].self_attn.k_proj.weight
        weight.mul_(2)  # in place: seen
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits, atol=2e-4, rtol=1e-4)
        weight.data = weight.data.clone()
        with pytest.raises(RuntimeError, match="replaced or moved"):
            compiled(ids)


def add_in_place(steps):
    steps.add_(1)


def add_to_the_data(steps):
    steps.data.add_(1)


def add_to_a_view(steps):
    steps.view(1, 1)[0] += 1


def add_to_all_of_a_list(steps):
    torch._foreach_add_([steps], 1)


class Counting(nn.Module):
    """Attention times the number of calls, which is a parameter and a buffer."""

    def __init__(self, count, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.count, self.projection = count, nn.Linear(32, 32, dtype=dtype)
        self.steps = nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=False)
        self.register_buffer("calls", torch.zeros(1, dtype=dtype))

    def forward(self, x):
        self.count(self.steps)
        self.calls.add_(1)
        heads = self.projection(x).view(1, -1, 2, 16).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return out.transpose(1, 2).reshape(x.shape) * self.steps * self.calls


def check_counting(count, dtype):
    model = Counting(count, dtype).eval()
    expected = copy.deepcopy(model)
    compiled = torch.compile(model, backend="pagoda", options={**OPTIONS, "verify": "every-pass"})
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        for calls in (1, 2):
            torch.testing.assert_close(compiled(x), expected(x), atol=0.05, rtol=0.02)
            assert (model.steps.item(), model.calls.item()) == (calls, calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "count", [add_in_place, add_to_the_data, add_to_a_view, add_to_all_of_a_list], ids=lambda f: f.__name__
)
def test_parameters_are_written_into_once_a_call(count, dtype, monkeypatch):
    graphs = rewritten_graphs(monkeypatch)
    check_counting(count, dtype)
    assert attention_calls(graphs[0])


def test_a_write_that_passes_lose_is_seen_by_the_comparison(monkeypatch):
    graphs = rewritten_graphs(monkeypatch)
    true = fx_nodes.written_arguments
    monkeypatch.setattr(
        fx_nodes, "written_arguments", lambda node: [] if callee(node) == "_foreach_add_" else true(node)
    )
    check_counting(add_to_all_of_a_list, torch.float32)
    assert not attention_calls(graphs[0])


def test_numbers_of_modules_are_constants_when_all_is_dynamic(ids, monkeypatch):
    graphs = fused_graphs(monkeypatch)
    model = build_tiny_model("llama", num_hidden_layers=1)

    @torch.compile(backend="pagoda", options=OPTIONS, dynamic=True)
    def cooled(tokens, temperature):
        return model(tokens, use_cache=False).logits / temperature

    def compare(temperature):
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits / temperature
            torch.testing.assert_close(cooled(ids, temperature), expected, atol=2e-4, rtol=1e-4)

    compare(0.7)
    names = [callee(n) for n in graphs[-1].graph.nodes]
    assert names.count("add_rms_norm") == 2 * model.config.num_hidden_layers
    compiled = len(graphs)
    compare(0.9)
    assert len(graphs) == compiled, "what the caller passes stays an input"
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 0.5
    compare(0.9)
    assert len(graphs) > compiled, "Dynamo guards the constants"
