"""A live module that changes after it was compiled is never served as it was: calls and steps raise, or compute
again."""

from __future__ import annotations

import pytest
import torch

import torch_pagoda
from torch_pagoda import LLM, SamplingParams
from torch_pagoda.compiler import ModuleGuard

from tiny_models import build_tiny_model

PROMPT = [5, 9, 17, 33, 12]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda m, args, output: output * 2)


def attribute(model):
    model.model.layers[0].self_attn.scaling = 0.3


def setting(model):
    model.config.rms_norm_eps = 0.5


def forward(model):
    layer = model.model.layers[0].mlp
    layer.forward = lambda x: layer.down_proj(x)


def activation(model):
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()


def submodule(model):
    model.model.layers[0].self_attn.q_proj = torch.nn.Linear(64, 64, bias=False)


def mode(model):
    model.train()


def inner_dict(model):
    model.model.layers[0].scales["default"] = 2.0


def inner_list(model):
    model.model.layers[0].active.append("other")


CHANGES = (hook, attribute, setting, forward, activation, submodule, mode, inner_dict, inner_list)


def scaled(layer, args, output):
    return output * layer.scales[layer.active[0]]


@pytest.fixture
def model():
    model = build_tiny_model("llama", num_hidden_layers=2)
    model.model.layers[0].scales, model.model.layers[0].active = {"default": 1.0}, ["default"]
    model.model.layers[0].register_forward_hook(scaled)
    return model


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_changes_are_noticed(model, change):
    guard = ModuleGuard(model)
    guard.check(fully=True)
    change(model)
    with pytest.raises(RuntimeError, match="recompile it"):
        guard.check()


def test_patched_classes_are_noticed(model, monkeypatch):
    guard = ModuleGuard(model)
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, x: x)
    with pytest.raises(RuntimeError, match=r"LlamaRMSNorm\.forward"):
        guard.check(fully=True)


def test_what_is_back_where_it_was_is_accepted(model):
    guard = ModuleGuard(model)
    model.train()
    model.eval()
    guard.check(fully=True)


def test_weights_written_between_steps_are_used_with_keys_of_their_own(model):
    llm = LLM(model, verify="off")
    llm.submit(PROMPT, PARAMS)
    first = llm.step()[0].outputs[0].token_ids
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-1.5)
    while llm.has_unfinished():
        output = llm.step()[0]
    found = list(output.outputs[0].token_ids)
    ids = torch.tensor([PROMPT + found])
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits[0].argmax(-1).tolist()
    assert found[: len(first)] == list(first)
    assert found[len(first) :] == expected[len(PROMPT) - 1 + len(first) : -1]

    # Prefixes that were computed with the former weights are forgotten, too.
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-1.5)
    again = llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids
    fresh = LLM(model, verify="off").generate([PROMPT], PARAMS)[0].outputs[0].token_ids
    assert list(again) == list(fresh)

    hook(model)
    with pytest.raises(RuntimeError, match="recompile it"):
        llm.generate([PROMPT], PARAMS)


def test_calls_without_effect_do_not_end_a_service(model):
    llm = LLM(model, verify="off")
    before = llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids
    torch.compile(model, backend="eager")(torch.tensor([PROMPT]))
    model(torch.tensor([PROMPT]), output_hidden_states=True)
    model.config.pad_token_id = 0
    assert llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids == before
    again = LLM(model, verify="off").generate([PROMPT], PARAMS)[0].outputs[0].token_ids
    assert again == before


def test_compile_builds_a_changed_model_anew(model):
    torch_pagoda.compile(model, verify="off")
    ids = torch.tensor([PROMPT])
    model.generate(ids, max_new_tokens=2, do_sample=False)
    hook(model)
    with pytest.raises(RuntimeError, match="recompile it"):
        model.generate(ids, max_new_tokens=2, do_sample=False)
    torch_pagoda.compile(model)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 7)
