"""explain: its dict, tables and page; what is left when passes are off; models that cannot be served."""

from __future__ import annotations

import importlib
import json
import re
from html.parser import HTMLParser

import pytest
import torch

import torch_pagoda
from torch_pagoda.compiler import options
from torch_pagoda.compiler.costs.skeleton import Skeleton
from torch_pagoda.passes import PASSES, Pass, PassRecord, Rejection, UnsupportedModel
from torch_pagoda.passes.graph.attention_node import paged_attention_nodes
from torch_pagoda.reports import Explanation, explain
from torch_pagoda.reports.drop_in import observe
from torch_pagoda.reports.explain import cache_copies

from tiny_models import build_tiny_model
from toy_lm import ToyLM, causal_mask, repeat_kv, sdpa

LAYERS = 2


@pytest.fixture(scope="module")
def llama():
    return build_tiny_model("llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def full(llama):
    return explain(llama)


@pytest.fixture(scope="module")
def bare(llama):
    """Attention only, and a pass that says why it left a norm."""

    def hesitant(traced):
        reason = "an <eps> that no kernel takes"
        return PassRecord(
            "recognize_rms_norm", rejections=[Rejection("pow_1", reason, "model.layers.1.input_layernorm")]
        )

    with pytest.MonkeyPatch.context() as patch:
        entry = Pass("recognize_rms_norm", hesitant, stage="aten", required=False)
        kept = tuple(p for p in PASSES if p.stage == "dynamo")
        patch.setattr(options, "PASSES", (*kept, entry))
        yield explain(llama, verify="off")


def test_dict_has_the_keys_of_the_format(full):
    plain = json.loads(json.dumps(full.to_dict(), allow_nan=False))
    assert plain["model"] == "LlamaForCausalLM" and plain["target"] == "cpu"
    for entry in plain["passes"]:
        assert set(entry) >= {"name", "level", "matches", "near_misses", "seconds"}
        assert all(set(miss) >= {"module", "reason"} for miss in entry["near_misses"])
    assert [layer["index"] for layer in plain["layers"]] == list(range(LAYERS))
    for layer in plain["layers"]:
        assert all(isinstance(name, str) for name in layer["operators_before"] + layer["operators_after"])
    assert all(set(entry) >= {"operator", "module", "reason"} for entry in plain["leftovers"])
    keys = {"operators", "launches_per_layer", "cache_copies", "token_bytes", "state_bytes"}
    assert set(plain["target_graph"]) == keys
    assert plain["graph_breaks"] == plain["recompiles"] == 0
    assert plain["verdict"]["ok"] and plain["refused"] == ""


def test_memory_of_tokens_and_of_states(full, llama):
    config = llama.config
    per_token = LAYERS * 2 * config.num_key_value_heads * config.head_dim * 4
    assert (full.target_graph.token_bytes, full.target_graph.state_bytes) == (per_token, 0)
    assert re.search(rf"^memory +{per_token} B of keys and values per token *$", str(full), re.MULTILINE)
    model = build_tiny_model("falcon_h1", num_hidden_layers=LAYERS)
    found, config = explain(model, verify="off").target_graph, model.config
    channels = config.mamba_d_ssm + 2 * config.mamba_n_groups * config.mamba_d_state
    state = config.mamba_n_heads * config.mamba_d_head * config.mamba_d_state
    assert found.state_bytes == LAYERS * 4 * (channels * (config.mamba_d_conv - 1) + state)
    assert found.token_bytes == LAYERS * 4 * 2 * config.num_key_value_heads * model.model.layers[0].self_attn.head_dim


def test_passes_are_those_of_the_pipeline(full):
    assert {p.name for p in full.passes} <= {p.name for p in PASSES}
    levels = {p.name: p.level for p in PASSES if p.target in ("", "cpu")}
    assert all(p.level == levels[p.name] for p in full.passes)


def test_expected_counts_follow_the_number_of_layers(full):
    by_name = {p.name: p for p in full.passes}
    sdpa_pass = by_name["recognize_sdpa"]
    assert (sdpa_pass.matches, sdpa_pass.expected, sdpa_pass.expected_per_layer) == (LAYERS, LAYERS, 1)
    assert by_name["recognize_eager_attention"].expected == 0
    assert by_name["insert_paged_cache"].expected is None
    expected = {r.kind: r.expected for r in full.recognized}
    assert expected == {
        "attention": LAYERS,
        "norm": 2 * LAYERS + 1,
        "rope": 2 * LAYERS,
        "gated_mlp": LAYERS,
        "activation": 0,
        "moe": 0,
    }
    assert all(r.matched + len(r.missed) == r.expected for r in full.recognized)


def test_layers_before_and_after(full):
    for layer in full.layers:
        assert "aten.mm" in layer.operators_before and "aten.silu" in layer.operators_before
        assert not any(name.startswith("pagoda.") for name in layer.operators_before)
        assert layer.operators_after.count("pagoda.paged_attention") == 1
        assert not {"aten.view", "aten.t", "aten.transpose"} & set(layer.operators_before + layer.operators_after)
        assert layer.path == f"model.layers.{layer.index}"
        assert layer.expected["norm"] == 2
    assert full.launches_before == max(len(layer.operators_before) for layer in full.layers)
    assert full.target_graph.launches_per_layer == max(len(layer.operators_after) for layer in full.layers)
    assert full.target_graph.launches_per_layer < full.launches_before
    assert full.target_graph.operators["pagoda.paged_attention"] == LAYERS
    assert full.target_graph.cache_copies == 0


def test_fusions_move_fewer_bytes(full, bare):
    for fused, plain in zip(full.layers, bare.layers, strict=True):
        assert 0 < fused.traffic_after.per_token < plain.traffic_after.per_token
        # Every weight is read once, whatever is fused.
        parameters = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64)
        assert fused.traffic_before.weights == plain.traffic_after.weights == parameters


def test_nothing_of_norms_ropes_and_activations_is_left_over(full):
    assert [x for x in full.leftovers if x.region in ("norm", "rope", "activation")] == []


def test_leftovers_give_the_near_miss_of_their_module(bare):
    norms = [x for x in bare.leftovers if x.region == "norm"]
    assert {x.layer for x in norms} == {-1, *range(LAYERS)}
    reasons = {x.module: x.reason for x in norms}
    assert reasons["model.layers.1.input_layernorm"] == "recognize_rms_norm: an <eps> that no kernel takes"
    assert reasons["model.layers.0.input_layernorm"] == "no pass recognized it"
    assert {x.operator for x in norms} >= {"aten.pow", "aten.rsqrt"}
    assert {x.region for x in bare.leftovers} == {"norm", "rope", "activation"}
    assert not {"aten.mm", "aten.linear", "aten.embedding"} & {x.operator for x in bare.leftovers}
    missed = next(r for r in bare.recognized if r.kind == "norm").missed
    assert len(missed) == 2 * LAYERS + 1


def test_tables(full, bare):
    text = repr(full)
    assert "LlamaForCausalLM" in text and "recognize_sdpa" in text and "pagoda.paged_attention" in text
    assert "equal to the model" in text and "Near misses" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert re.search(r"Near misses.*an <eps> that no kernel takes", repr(bare), re.DOTALL)
    assert "not compared" in repr(bare)


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag not in ("meta", "path", "rect", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_well_formed_escaped_and_needs_nothing_else(bare, tmp_path):
    bare.to_html(tmp_path / "report.html", layer=1)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = _Page(text)
    assert page.open == [] and page.links == []
    assert text.count('<div class="drawings">') == 1 and text.split('<div class="drawings">')[1].count("<svg") == 2
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "an &lt;eps&gt; that no kernel takes" in text and "<eps>" not in text
    assert "model.layers.1, operator by operator" in text
    with pytest.raises(ValueError, match="layer=7"):
        bare.to_html(tmp_path / "report.html", layer=7)


def test_a_wrong_pass_on_the_aten_graph_is_left_out_and_named(monkeypatch, caplog):
    def scale(traced):
        for node in paged_attention_nodes(traced):
            node.args = (*node.args[:11], node.args[11] * 1.05, *node.args[12:])
        return PassRecord("wrong_scale", matches=1)

    kept = tuple(p for p in PASSES if p.stage == "dynamo")
    monkeypatch.setattr(options, "PASSES", (*kept, Pass("wrong_scale", scale, stage="aten", required=False)))
    explanation = explain(ToyLM(sdpa))
    dropped = explanation.to_dict()["dropped_passes"]
    assert [entry["name"] for entry in dropped] == ["wrong_scale"]
    assert "standard deviations" in dropped[0]["reason"]
    assert explanation.verdict is not None and explanation.verdict.ok
    assert "dropped" in repr(explanation) and "dropping pass wrong_scale" in caplog.text


def test_a_refused_model_is_explained_as_far_as_it_goes(tmp_path):
    def masked_by_data(m, q, k, v, pos):
        mask = causal_mask(pos) & (q[..., :1] > -100)
        return torch.nn.functional.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=mask)

    explanation = explain(ToyLM(masked_by_data))
    assert "depends on the tokens" in explanation.refused
    assert explanation.to_dict()["target_graph"]["launches_per_layer"] is None
    assert "refused" in repr(explanation)
    misses = [miss.reason for p in explanation.passes for miss in p.near_misses]
    assert any("depends on the tokens" in reason for reason in misses)
    explanation.to_html(tmp_path / "report.html")
    json.dumps(explanation.to_dict(), allow_nan=False)


def test_a_model_that_breaks_the_graph_says_where():
    model = ToyLM(sdpa, before=lambda m, h, pos: h if float(h.sum()) > 0 else -h)
    explanation = explain(model, verify="off")
    assert "cannot be traced into one graph" in explanation.refused
    assert explanation.drop_in.graph_breaks >= 1 and explanation.drop_in.reasons


def test_an_example_counts_graph_breaks_and_recompiles():
    tokens = torch.arange(9)[None]
    seen = explain(ToyLM(sdpa), {"input_ids": tokens, "position_ids": tokens}, verify="off").drop_in
    assert (seen.observed, seen.graphs, seen.graph_breaks) == (True, 1, 0)
    assert seen.recompiles == 1, "the second length makes the length dynamic, the third needs nothing"
    by_position = observe(ToyLM(sdpa), (tokens, tokens))
    assert (by_position.graphs, by_position.recompiles) == (1, 1)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: explain(m, target="tpu"), ValueError, "target='tpu'"),
        (lambda m: explain(m, target="npu", soc="Ascend7"), ValueError, "soc='Ascend7'"),
        (lambda m: explain(m, target="npu", context=0), ValueError, "context=0"),
        (lambda m: explain(m, opt_level=7), ValueError, "opt_level=7"),
        (lambda m: explain(m, nonsense=1), ValueError, "nonsense"),
        (lambda m: explain("a/path"), TypeError, "pagoda inspect"),
        (lambda m: explain(m, 3), TypeError, "example is a int"),
        (lambda m: explain(m, {"input_ids": "text"}), ValueError, "fails on the example"),
    ],
)
def test_mistakes(call, error, words):
    with pytest.raises(error, match=words):
        call(ToyLM(sdpa))


def test_a_model_in_training_is_refused():
    with pytest.raises(ValueError, match=r"model\.eval"):
        explain(ToyLM(sdpa).train())


def test_a_model_on_another_device_is_refused():
    """The stand-in for a CUDA device is "meta", which every build of torch has."""
    for verify in ("model", "off"):
        with pytest.raises(ValueError, match=r"model is on meta.*model\.to\('cpu'\)"):
            explain(ToyLM(sdpa).to("meta"), verify=verify)


def test_copies_of_caches_are_counted():
    graph = torch.fx.Graph()
    cache, rows = graph.placeholder("key_cache_0"), graph.placeholder("rows")
    fake = torch.empty(6, 4, 2, 8, device="meta")
    cache.meta["example_value"], rows.meta["example_value"] = fake, fake[0]
    view = graph.call_function(torch.ops.aten.view.default, (cache, [24, 2, 8]))
    copy = graph.call_function(torch.ops.aten.clone.default, (view,))
    part = graph.call_function(torch.ops.aten.select.int, (cache, 0, 1))
    small = graph.call_function(torch.ops.aten.clone.default, (part,))
    for node, value in ((view, fake.view(24, 2, 8)), (copy, fake.view(24, 2, 8)), (part, fake[1]), (small, fake[1])):
        node.meta["example_value"] = value
    graph.output((copy, small))
    assert cache_copies(graph) == 1


def test_public_name():
    assert torch_pagoda.explain is explain
    assert torch_pagoda.Explanation is Explanation
    assert "explain" in dir(torch_pagoda)


def test_a_model_without_values_that_cannot_be_traced_is_not_run(llama, monkeypatch):
    def refuse(model):
        raise UnsupportedModel("it has a loop")

    def run(*given, **named):
        raise AssertionError("the model was run")

    module = importlib.import_module("torch_pagoda.reports.explain")
    monkeypatch.setattr(module, "capture", refuse)
    monkeypatch.setattr(module, "observe", run)
    found = explain(Skeleton(llama, (0, 1)))
    assert found.refused == "it has a loop" and "no values" in found.drop_in.reasons[0]
    with pytest.raises(AssertionError, match="was run"):
        explain(llama, verify="off")
