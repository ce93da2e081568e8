"""Whole models with rounded weights: logits against transformers, perplexity, batch mates, options."""

from __future__ import annotations

import copy
import math
import sys

import pytest
import torch
from trained_model import TINY_PYDOC
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from torch_pagoda import LLM, SamplingParams
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.calibrate import calibrate
from torch_pagoda.compiler.verify.self_check import compared_steps, reference_of_model
from torch_pagoda.runtime.ops.linear.quantized_weight import (
    Quantization,
    quantize_weight,
    restored_weight,
    unpack_weight,
)

from perplexity import loss_per_token
from tiny_models import build_tiny_model

sys.path.append(str(TINY_PYDOC.parent))
from pydoc_text import is_prose, paragraphs, reference_texts


@pytest.fixture(autouse=True)
def threads(two_threads: None) -> None:
    """Two of them."""


@pytest.mark.parametrize("quantization", ["int8", "int8-weight-only"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral", "deepseek_v3"])
def test_logits_are_those_of_transformers_but_for_rounding(name, quantization):
    model = build_tiny_model(name)
    program = build_program(model, CompileOptions(verify="off", codegen="none", quantization=quantization))
    errors = torch.cat(
        [
            (found - right).abs().amax(-1) / right.std(-1)
            for _, found, right in compared_steps(program, reference_of_model(model))
        ]
    )
    assert program.weight_bits == 8
    assert errors.median() < 0.15 and errors.isfinite().all()
    assert errors.median() > 1e-4  # it is rounded


@pytest.mark.parametrize("quantization", ["int8-weight-only", "int4-weight-only"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox"])
def test_logits_are_those_of_transformers_with_the_rounded_weights(name, quantization):
    """Every layer is rounded as it should be, and nothing else: 16 bits of the inputs are next to exact."""
    model = build_tiny_model(name)
    options = CompileOptions(verify="off", codegen="none", quantization=quantization)
    program = build_program(model, options)
    rounded = copy.deepcopy(model)
    head = rounded.get_output_embeddings()
    for layer in rounded.modules():
        if isinstance(layer, torch.nn.Linear):
            scheme = Quantization(8, 256, 16) if layer is head else options.weight_quantization
            packed = quantize_weight(layer.weight, scheme)
            weight = restored_weight(*unpack_weight(packed, *layer.weight.shape, scheme), scheme)
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    for _, found, right in compared_steps(program, reference_of_model(rounded)):
        assert ((found - right).abs().amax(-1) / right.std(-1)).max() < 0.02


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    """What the model was trained on: every Python has the text that help("topic") shows."""
    found = [p for _, texts in reference_texts() for text in texts for p in paragraphs(text) if is_prose(p)]
    ids = AutoTokenizer.from_pretrained(TINY_PYDOC)("\n\n".join(found))["input_ids"]
    return torch.tensor(ids[: 32 * 256]).view(32, 256)


@pytest.fixture(scope="module")
def text(windows) -> torch.Tensor:
    return windows[:16]


@pytest.fixture(scope="module")
def loss(text) -> float:
    model = AutoModelForCausalLM.from_pretrained(TINY_PYDOC, dtype=torch.float32)
    return loss_per_token(build_program(model, CompileOptions(verify="off", codegen="none")), text)


@pytest.mark.parametrize(("quantization", "limit"), [("int8", 1.005), ("int8-weight-only", 1.005)])
def test_perplexity_of_the_trained_model(quantization, limit, text, loss):
    model = AutoModelForCausalLM.from_pretrained(TINY_PYDOC, dtype=torch.float32)
    program = build_program(model, CompileOptions(verify="off", codegen="none", quantization=quantization))
    ratio = math.exp(loss_per_token(program, text) - loss)
    assert 1 / limit < ratio < limit


@pytest.fixture(scope="module")
def calibrated(windows) -> PreTrainedModel:
    """In its own bfloat16, and on other text than that which is measured."""
    model = AutoModelForCausalLM.from_pretrained(TINY_PYDOC, dtype=torch.bfloat16)
    calibrate(model, windows[16:32], 64)
    return model.float()


@pytest.mark.parametrize("quantization", ["int4", "int4-weight-only"])
def test_perplexity_of_the_calibrated_model(quantization, calibrated, text, loss):
    """Rounded to nearest it is 1.2 and more."""
    options = CompileOptions(verify="off", codegen="none", quantization=quantization, group_size=64)
    ratio = math.exp(loss_per_token(build_program(calibrated, options), text) - loss)
    assert 1.0 < ratio < 1.13


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_tokens_do_not_depend_on_batch_mates(quantization):
    llm = LLM(TINY_PYDOC, dtype="float32", quantization=quantization, group_size=64, max_model_len=256)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [list(range(5, 5 + n)) for n in (3, 17, 40, 90)]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert together == [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]


def test_a_live_module_keeps_its_weights():
    model = build_tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    llm = LLM(model, quantization="int8", max_model_len=64)
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"q_proj.weight.*was written to after the model was compiled"):
        llm.generate([[5, 6, 7]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int5"}, "quantization='int5' is not one of 'int8', 'int8-weight-only'"),
        ({"group_size": 128}, "group_size=128 cannot be used with quantization=None: it is for quantized weights"),
        ({"quantization": "int4", "group_size": 96}, "group_size=96 is not supported; use a multiple of 64"),
        ({"quantization": "int4", "target": "npu"}, "quantization='int4' cannot be used with target='npu'"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        LLM(build_tiny_model("llama"), **options)
