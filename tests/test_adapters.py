"""Adapters of PEFT on a live module: what is switched after compiling is never served as it was."""

from __future__ import annotations

import pytest
import torch

import torch_pagoda
from torch_pagoda import LLM, SamplingParams

from tiny_models import build_tiny_model

peft = pytest.importorskip("peft")

PROMPT = [5, 9, 17, 33, 12]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
CHANGED = r"recompile it|make a new LLM"


def adapted():
    """A tiny Llama with two adapters that change its answers, "default" being active."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build_tiny_model("llama", num_hidden_layers=2), config)
    model.add_adapter("other", config)
    return model.eval().requires_grad_(False)


def disable(model):
    model.base_model.disable_adapter_layers()


def switch(model):
    model.set_adapter("other")


def scale(model):
    for module in model.modules():
        if hasattr(module, "set_scale") and hasattr(module, "lora_A"):
            module.set_scale("default", 3.0)


def merge(model):
    model.merge_adapter()


@pytest.fixture(scope="module")
def right():
    """Tokens that transformers gives with the adapter as it is."""
    model = adapted()
    ids = model.generate(input_ids=torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    return ids[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("change", [disable, switch, scale, merge], ids=lambda f: f.__name__)
def test_what_is_switched_is_noticed(change, right):
    model = adapted()
    llm = LLM(model.get_base_model(), max_num_seqs=2, max_model_len=64)
    assert list(llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids) == right
    change(model)
    with pytest.raises(RuntimeError, match=CHANGED):
        llm.generate([PROMPT], PARAMS)


def test_disabled_by_transformers_is_noticed():
    model = build_tiny_model("llama", num_hidden_layers=2)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    llm = LLM(model.eval().requires_grad_(False), max_num_seqs=2, max_model_len=64)
    model.disable_adapters()
    with pytest.raises(RuntimeError, match=CHANGED):
        llm.generate([PROMPT], PARAMS)


def test_compiling_again_serves_the_other_adapter(right):
    model = adapted()
    base = torch_pagoda.compile(model.get_base_model(), max_num_seqs=2, max_model_len=64)
    ids = torch.tensor([PROMPT])
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert base.generate(input_ids=ids, **settings)[0, len(PROMPT) :].tolist() == right
    with model.disable_adapter():
        base = torch_pagoda.compile(base, max_num_seqs=2, max_model_len=64)
        found = base.generate(input_ids=ids, **settings)
        torch_pagoda.restore(base)
        expected = base.generate(input_ids=ids, **settings)
    assert torch.equal(found, expected)
