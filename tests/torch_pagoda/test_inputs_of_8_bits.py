"""Checkpoints whose weights were made for inputs of 8 bits are served with such inputs, row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import write_beside_dense
from quantized_oracle import inputs_of_8_bits
from transformers import AutoModelForCausalLM

import torch_pagoda as pagoda
from torch_pagoda.runtime.ops.linear.quantized_weight import Quantization, scheme_of
from torch_pagoda.runtime.ops.linear.weight_format import WeightFormat

from hf_reference import logits_of
from tiny_models import build_tiny_model

PROMPTS = [torch.randint(10, 190, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 40, 90)]


@pytest.fixture(autouse=True)
def compile_once() -> None:
    """Every program is compiled: what a format asks for does not show in the weights that it means."""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Compile them before something is compared."""
    pagoda.compile(build_tiny_model("llama"), num_blocks=16, quantization="int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function of a format and a model: a checkpoint in it, with ``dense`` in it, a float one of what its weights
    mean."""
    made: dict[tuple[str, str], Path] = {}

    def make(name: str, model_type: str = "llama") -> Path:
        if (name, model_type) not in made:
            made[name, model_type] = write_beside_dense(tmp_path_factory.mktemp(name), name, model_type)
        return made[name, model_type]

    return make


def errors(folder: Path, **options: Any) -> torch.Tensor:
    """Errors of the log-probabilities of prompts in nats, beside transformers with inputs of 8 bits in float64."""
    llm = pagoda.LLM(folder, dtype="float32", block_size=16, num_blocks=64, max_num_batched_tokens=48, **options)
    params = pagoda.SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32).eval()
    found = []
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        with inputs_of_8_bits(model):
            expected = logits_of(model, prompt).log_softmax(-1)
        for i, entry in enumerate(output.prompt_logprobs[1:]):
            found.append(abs(entry[prompt[i + 1]].logprob - float(expected[i, prompt[i + 1]])))
    return torch.tensor(found)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("ct-w8a8-dynamic", "llama"),
        ("slim-w4a8", "qwen3_moe"),
        ("slim-w4a8-g32", "qwen3_moe"),
        pytest.param("slim-w4a8", "deepseek_v3", marks=pytest.mark.slow),
        pytest.param("slim-w4a8", "llama", marks=pytest.mark.slow),
        pytest.param("slim-w8a8-dynamic", "llama", marks=pytest.mark.slow),
    ],
)
def test_the_numbers_are_those_of_the_formula(name: str, model_type: str, folder: Callable[..., Path]) -> None:
    as_made = errors(folder(name, model_type))
    # A number that lies between two steps falls to either side by float32's rounding: few rows have one.
    assert as_made.median() < 1e-5
    assert as_made.quantile(0.8) < 1e-3


def test_all_bits_are_kept_on_request(folder: Callable[..., Path]) -> None:
    kept = errors(folder("ct-w8a8-dynamic"), input_bits=16)
    assert kept.median() > 1e-3, "inputs of 16 bits have other numbers"


@pytest.mark.parametrize(
    ("form", "bits", "expected"),
    [
        (WeightFormat("int", 8, 0, input_bits=8), None, Quantization(8, 0, 8)),
        (WeightFormat("int", 8, 0, input_bits=8), 8, Quantization(8, 0, 8)),
        (WeightFormat("int", 8, 0, input_bits=8), 16, Quantization(8, 0, 16)),
        (WeightFormat("int", 8, 0), None, Quantization(8, 0, 16)),
        (WeightFormat("int", 8, 128, input_bits=8), None, Quantization(8, 128, 8, whole_rows=True)),
        (WeightFormat("int", 4, 256, input_bits=8), None, Quantization(4, 256, 8, whole_rows=True)),
        (WeightFormat("int", 4, 256, input_bits=8), 16, Quantization(4, 256, 16)),
        (WeightFormat("int", 4, 256), None, Quantization(4, 256, 16)),
        (WeightFormat("int", 4, 0, input_bits=8), None, Quantization(4, 0, 8)),
        (WeightFormat("int", 4, 0, zeros=True, input_bits=8), None, Quantization(4, 0, 8, True)),
    ],
)
def test_which_inputs_are_rounded(form: WeightFormat, bits: int | None, expected: Quantization) -> None:
    assert scheme_of(form, bits) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_bits": 4}, "input_bits=4 is not one of None, 8, 16"),
        (
            {"input_bits": 16, "quantization": "int8"},
            "cannot be used with quantization='int8': quantization already sets the inputs",
        ),
        ({"input_bits": 16}, "this one is not; omit it"),
    ],
)
def test_what_does_not_fit(options: dict[str, Any], message: str, folder: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=message):
        pagoda.LLM(folder("ct-w8a8-dynamic") / "dense", num_blocks=16, **options)
