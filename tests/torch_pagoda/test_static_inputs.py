"""Checkpoints that say by which scale and offset inputs are rounded are served with such inputs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import write_beside_dense
from quantized_oracle import given_inputs
from safetensors.torch import load_file, save_file
from stored_weights import packed_weight
from transformers import AutoModelForCausalLM

import torch_pagoda as pagoda
from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler.weights.tensor_contents import stored_digest
from torch_pagoda.runtime.ops.linear.quantized_linear import quantized_linear_cpu, quantized_linear_reference
from torch_pagoda.runtime.ops.linear.quantized_weight import Quantization, pack_weight, scheme_of
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight
from torch_pagoda.runtime.ops.linear.weight_format import InputScale, WeightFormat

from hf_reference import logits_of
from tiny_models import build_tiny_model

CPU = torch.device("cpu")
PROMPTS = [torch.randint(10, 190, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 40, 90)]
STEP = float(torch.tensor(1 / 30))
FORMATS = ("slim-w8a8-static", "ct-w8a8-static", "ct-w8a8-static-asym")


@pytest.fixture(autouse=True)
def compile_once() -> None:
    """Every program is compiled: what a format asks for does not show in the weights that it means."""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Compile them before something is compared."""
    pagoda.compile(build_tiny_model("llama"), num_blocks=16, quantization="int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function of a format and a model: a checkpoint in it, with ``dense`` in it, what its weights mean."""
    made: dict[tuple[str, str], Path] = {}

    def make(name: str, model_type: str = "llama") -> Path:
        if (name, model_type) not in made:
            made[name, model_type] = write_beside_dense(tmp_path_factory.mktemp(name), name, model_type)
        return made[name, model_type]

    return make


def file_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def scales_of(folder: Path) -> dict[str, tuple[float, int]]:
    """Layer → scale and offset of its inputs, of the file's own tensors."""
    stored = load_file(file_of(folder))
    found = {}
    for key, scale in stored.items():
        owner, _, leaf = key.rpartition(".")
        if leaf == "input_scale":
            offset = stored.get(f"{owner}.input_offset", stored.get(f"{owner}.input_zero_point", torch.zeros(1)))
            found[owner] = float(scale), int(offset)
    return found


def errors(folder: Path, given: dict[str, tuple[float, int]], **options: Any) -> torch.Tensor:
    """Errors of the log-probabilities of prompts in nats, beside transformers with such inputs in float64."""
    llm = pagoda.LLM(folder, dtype="float32", block_size=16, num_blocks=64, max_num_batched_tokens=48, **options)
    params = pagoda.SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32).eval()
    found = []
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        with given_inputs(model, given):
            expected = logits_of(model, prompt).log_softmax(-1)
        for i, entry in enumerate(output.prompt_logprobs[1:]):
            found.append(abs(entry[prompt[i + 1]].logprob - float(expected[i, prompt[i + 1]])))
    return torch.tensor(found)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("slim-w8a8-static", "llama"),
        ("ct-w8a8-static", "llama"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("ct-w8a8-static-asym", "llama"),
                ("slim-w8a8-static-bits", "llama"),
                ("slim-w8a8-static", "qwen3_moe"),
            )
        ),
    ],
)
def test_the_numbers_are_those_of_the_formula(name: str, model_type: str, folder: Callable[..., Path]) -> None:
    given = scales_of(folder(name, model_type))
    assert len(given) >= 8
    as_made = errors(folder(name, model_type), given)
    # A number that lies between two steps falls to either side by float32's rounding: few rows have one.
    assert as_made.median() < 1e-5
    assert as_made.quantile(0.8) < 1e-3


@pytest.mark.parametrize("mistake", ["offset", "scale", "rows"])
def test_other_scales_and_offsets_are_other_numbers(mistake: str, folder: Callable[..., Path]) -> None:
    given = scales_of(folder("slim-w8a8-static"))
    wrong = {
        "offset": {name: (scale, offset - (1 if offset > 0 else -1)) for name, (scale, offset) in given.items()},
        "scale": {name: (scale * 1.02, offset) for name, (scale, offset) in given.items()},
        "rows": {},
    }
    assert errors(folder("slim-w8a8-static"), wrong[mistake]).median() > 1e-3


def test_all_bits_are_kept_on_request(folder: Callable[..., Path]) -> None:
    assert errors(folder("ct-w8a8-static"), {}, input_bits=16).median() > 1e-3


@pytest.mark.parametrize("offset", [0, 7, -128, 127])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_exact(offset: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(offset + 200)
    codes = torch.randint(-127, 128, (130, 200), generator=generator).to(torch.int8)
    x = (torch.randn(40, 200, generator=generator) * 2).to(dtype)
    x[0, :3] = torch.tensor([1e30, -1e30, torch.inf])  # the last number, and the first
    scheme = Quantization(8, 0, 8, input_scale=InputScale(STEP, offset))
    packed = pack_weight(codes, torch.ones(130, 1), scheme)
    given = (x, packed, None, 130, *scheme.arguments())
    whole = (x.float() / STEP + offset).round().clamp(-128, 127).double() - offset
    exact = (whole @ codes.double().T) * STEP
    assert whole.abs().max() > 127 or not offset
    for found in (quantized_linear_cpu(*given), quantized_linear_reference(*given)):
        tolerance = 1e-6 if dtype is torch.float32 else 2**-8
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=1e-6 * float(exact.abs().max()))
    without = exact + (offset * STEP) * codes.double().sum(1)  # what a sum is without the offset's term
    assert not offset or (quantized_linear_cpu(*given).double() - without).abs().max() > 1


@pytest.mark.parametrize("offset", [0, -9])
def test_codes_with_zeros_of_their_own(offset: int) -> None:
    weight, packed, _ = packed_weight("int8/row/f32+z", 70, 130)
    scheme = Quantization(8, 0, 8, True, input_scale=InputScale(STEP, offset))
    x = torch.randn(9, 130)
    whole = (x / STEP + offset).round().clamp(-128, 127).double() - offset
    exact = (whole @ weight.dense().double().T) * STEP
    for multiply in (quantized_linear_cpu, quantized_linear_reference):
        found = multiply(x, packed, None, 70, *scheme.arguments()).double()
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6 * float(exact.abs().max()))


def test_a_row_with_a_nan_is_nan() -> None:
    scheme = Quantization(8, 0, 8, input_scale=InputScale(STEP, 3))
    packed = pack_weight(torch.ones(5, 70, dtype=torch.int8), torch.ones(5, 1), scheme)
    x = torch.ones(2, 70)
    x[1, 69] = torch.nan
    for multiply in (quantized_linear_cpu, quantized_linear_reference):
        assert multiply(x, packed, None, 5, *scheme.arguments()).isnan().all(-1).tolist() == [False, True]


@pytest.mark.parametrize(
    ("bits", "given", "expected"),
    [
        (None, InputScale(STEP, 2), Quantization(8, 0, 8, input_scale=InputScale(STEP, 2))),
        (16, InputScale(STEP, 2), Quantization(8, 0, 16)),
        (None, None, Quantization(8, 0, 16)),
    ],
)
def test_which_inputs_are_rounded(bits: int | None, given: InputScale | None, expected: Quantization) -> None:
    form = WeightFormat("int", 8, 0, input_bits=8, static_inputs=True)
    assert WeightFormat.parse(str(form)) == form and str(form) == "int8/row/f32/x8static"
    assert scheme_of(form, bits, given) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightFormat("int", 8, 128, input_bits=8, static_inputs=True), "static_inputs=True of int8"),
        (lambda: WeightFormat("int", 8, 0, static_inputs=True), "static_inputs=True of int8"),
        (lambda: Quantization(8, 0, 8, input_scale=InputScale(0.1)), "input_scale=0.1 is not supported"),
        (lambda: Quantization(8, 0, 8, input_scale=InputScale(0.0)), "input_scale=0.0 is not supported"),
        (lambda: Quantization(8, 0, 8, input_scale=InputScale(STEP, 128)), "input_offset=128 is not supported"),
        (lambda: Quantization(4, 0, 8, input_scale=InputScale(STEP)), "is for 8 bits on both sides"),
    ],
)
def test_schemes_that_do_not_fit(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


LAYER = "model.layers.1.self_attn.q_proj"
ANOTHER = torch.tensor([0.5])


def edited(folder: Path, to: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of a checkpoint in which tensors of a layer are others, or left out."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("dense"))
    tensors = load_file(file_of(to))
    for leaf, tensor in changes.items():
        if tensor is None:
            del tensors[f"{LAYER}.{leaf}"]
        else:
            tensors[f"{LAYER}.{leaf}"] = tensor
    save_file(tensors, file_of(to), metadata={"format": "pt"})
    return to


REFUSED: dict[str, tuple[str, dict[str, torch.Tensor | None], str]] = {
    "no scale": ("slim-w8a8-static", {"input_scale": None}, "input_scale"),
    "no offset": ("slim-w8a8-static", {"input_offset": None}, "input_offset"),
    "no unit": ("slim-w8a8-static", {"deq_scale": None}, "deq_scale"),
    "no sums": ("slim-w8a8-static", {"quant_bias": None}, "quant_bias"),
    "scale 0": ("slim-w8a8-static", {"input_scale": torch.zeros(1)}, "input_scale"),
    "scale NaN": ("slim-w8a8-static", {"input_scale": torch.tensor([torch.nan])}, "input_scale"),
    "scale below 0": ("slim-w8a8-static", {"input_scale": -ANOTHER}, "input_scale"),
    "scales": ("slim-w8a8-static", {"input_scale": torch.ones(2)}, "input_scale"),
    "whole scale": ("slim-w8a8-static", {"input_scale": torch.ones(1, dtype=torch.int32)}, "input_scale"),
    "half an offset": ("slim-w8a8-static", {"input_offset": ANOTHER}, "input_offset"),
    "offset 128": ("slim-w8a8-static", {"input_offset": torch.tensor([128.0])}, "input_offset"),
    "offset NaN": ("slim-w8a8-static", {"input_offset": torch.tensor([torch.nan])}, "input_offset"),
    "offsets": ("slim-w8a8-static", {"input_offset": torch.zeros(3)}, "input_offset"),
    "unit 0": ("slim-w8a8-static", {"deq_scale": torch.zeros(64)}, "deq_scale"),
    "unit of others": ("slim-w8a8-static", {"deq_scale": torch.ones(32)}, "deq_scale"),
    "unit below 0": ("slim-w8a8-static", {"deq_scale": -torch.ones(64)}, "deq_scale"),
    "wide bits": ("slim-w8a8-static", {"deq_scale": torch.full((64,), 1 << 40)}, "deq_scale"),
    "unit that contradicts": ("slim-w8a8-static", {"deq_scale": torch.ones(64)}, "deq_scale"),
    "units that no weight has": (
        "slim-w8a8-static",
        {"deq_scale": torch.full((64,), 1e30), "input_scale": torch.tensor([1e-20]), "weight_scale": None},
        "deq_scale",
    ),
    "units that leave nothing": (
        "slim-w8a8-static",
        {"deq_scale": torch.full((64,), 1e-30), "input_scale": torch.tensor([1e20]), "weight_scale": None},
        "deq_scale",
    ),
    "float sums": ("slim-w8a8-static", {"quant_bias": torch.ones(64)}, "quant_bias"),
    "sums of others": ("slim-w8a8-static", {"quant_bias": torch.ones(32, dtype=torch.int32)}, "quant_bias"),
    "weights with offsets": ("slim-w8a8-static", {"weight_offset": torch.ones(64, 1)}, "weight_offset"),
    "ct, no scale": ("ct-w8a8-static", {"input_scale": None}, "input_scale"),
    "ct, scale 0": ("ct-w8a8-static", {"input_scale": torch.zeros(1)}, "input_scale"),
    "ct, an offset": ("ct-w8a8-static", {"input_zero_point": torch.ones(1, dtype=torch.int8)}, "input_zero_point"),
    "ct, no offset": ("ct-w8a8-static-asym", {"input_zero_point": None}, "input_zero_point"),
    "ct, offset alone": (
        "ct-w8a8-dynamic",
        {"input_zero_point": torch.ones(1, dtype=torch.int8)},
        "input_zero_point",
    ),
    "ct, not stated": ("ct-w8a8-dynamic", {"input_scale": ANOTHER}, "input_scale"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_do_not_fit(case: str, folder: Callable[..., Path], tmp_path: Path) -> None:
    name, changes, leaf = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(f"{LAYER}.{leaf}")) as error:
        load_model(edited(folder(name), tmp_path / "it", **changes), "float32", False, CPU)
    assert "is quantized" in str(error.value)


def test_symmetric_offsets_of_0_are_none(folder: Callable[..., Path], tmp_path: Path) -> None:
    zero = torch.zeros(1, dtype=torch.int8)
    copy = edited(folder("ct-w8a8-static"), tmp_path / "it", input_zero_point=zero)
    weight = load_model(copy, "float32", False, CPU).get_parameter(f"{LAYER}.weight")
    assert isinstance(weight, StoredWeight) and weight.input_scale is not None and weight.input_scale.offset == 0


def test_layers_with_other_scales_are_not_merged(folder: Callable[..., Path], tmp_path: Path) -> None:
    copy = edited(folder("ct-w8a8-static"), tmp_path / "it", input_scale=ANOTHER)
    shutil.copytree(folder("ct-w8a8-static") / "dense", copy / "dense")
    llm = pagoda.LLM(copy, dtype="float32", block_size=16, num_blocks=64, verify="off")
    merged = next(record for record in llm.compile_report.passes if record.name == "merge_linears")
    assert "the formats of their weights" in {rejection.reason.rpartition(": ")[2] for rejection in merged.rejections}
    as_made = errors(copy, scales_of(copy), verify="off")
    assert as_made.median() < 1e-5


def test_scales_tell_programs_apart(folder: Callable[..., Path]) -> None:
    weight = load_model(folder("ct-w8a8-static"), "float32", False, CPU).get_parameter(f"{LAYER}.weight")
    assert isinstance(weight, StoredWeight)
    other = weight.replaced(input_scale=InputScale(STEP))
    assert weight.stored_as != other.stored_as and stored_digest(weight) != stored_digest(other)
    assert torch.equal(weight.dense(), other.dense())


def test_experts_keep_16_bits(folder: Callable[..., Path], tmp_path: Path) -> None:
    source = folder("slim-w8a8-static", "qwen3_moe")
    shutil.copytree(source, tmp_path / "it", ignore=shutil.ignore_patterns("dense"))
    tensors = load_file(file_of(tmp_path / "it"))
    kinds = json.loads((source / "quant_model_description.json").read_text())
    for key in [key for key in tensors if ".experts." in key and key.endswith(".weight")]:
        owner = key.removesuffix(".weight")
        scale, step = tensors.pop(f"{owner}.weight_scale"), ANOTHER.clone()
        del tensors[f"{owner}.weight_offset"]
        made = {"input_scale": step, "input_offset": torch.zeros(1), "deq_scale": scale[:, 0] * step}
        made["quant_bias"] = torch.zeros(len(scale), dtype=torch.int32)
        tensors |= {f"{owner}.{leaf}": tensor for leaf, tensor in made.items()}
        kinds[key] = "W8A8"
    save_file(tensors, file_of(tmp_path / "it"), metadata={"format": "pt"})
    (tmp_path / "it" / "quant_model_description.json").write_text(json.dumps(kinds))
    model = load_model(tmp_path / "it", "float32", False, CPU)
    forms = {(p.dim(), p.form.input_bits) for p in model.parameters() if isinstance(p, StoredWeight)}
    assert forms == {(3, 0), (2, 8)}
