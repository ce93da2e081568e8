"""Quantized checkpoints are read as they are stored, and served as what they mean."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import FORMATS, QUICK, quantize_folder, write_means
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import torch_pagoda as pagoda
from torch_pagoda.checkpoint.format_bytes import formats_of
from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight, as_dense

from tiny_models import build_tiny_model

CPU = torch.device("cpu")
MODELS = {"mxfp4-experts": "gpt_oss", "slim-w4a8-experts": "qwen3_moe"}
"""Of formats that are not for every model."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Path]]:
    """A function of a model and a format: the quantized folder, and a float one of what it means."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(model_type: str, name: str) -> tuple[Path, Path]:
        if (model_type, name) not in made:
            folder = tmp_path_factory.mktemp(name)
            model = build_tiny_model(model_type)
            model.save_pretrained(folder / "dense")
            shutil.copytree(folder / "dense", folder / "quantized")
            write_means(folder / "dense", quantize_folder(folder / "quantized", name))
            made[model_type, name] = folder / "quantized", folder / "dense"
        return made[model_type, name]

    return make


def check_tokens(llm: pagoda.LLM, dense: Path) -> None:
    """Compare greedy tokens with those of transformers over the float folder."""
    prompts = [list(range(5, 5 + n)) for n in (3, 17, 40)]
    outputs = llm.generate(prompts, pagoda.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    reference = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_is_what_the_numbers_mean(folders: Callable[[str, str], tuple[Path, Path]], name: str) -> None:
    quantized, dense = folders(MODELS.get(name, "llama"), name)
    model = load_model(quantized, "float32", False, CPU)
    expected = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).state_dict()
    found = dict(model.named_parameters())
    assert sum(isinstance(parameter, StoredWeight) for parameter in found.values()) >= 2
    for key, parameter in found.items():
        assert torch.equal(as_dense(parameter), expected[key]), key
    served = {one.served for one in formats_of(found.items(), torch.float32)}
    assert served - {"float"} == {"as stored" if FORMATS[name].kernel else "unpacked"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FORMATS])
def test_served_as_transformers_serves_what_it_means(
    folders: Callable[[str, str], tuple[Path, Path]], name: str
) -> None:
    quantized, dense = folders(MODELS.get(name, "llama"), name)
    llm = pagoda.LLM(quantized, dtype="float32", input_bits=16, block_size=4, num_blocks=64)
    reads = {record.name: record.matches for record in llm.compile_report.passes}
    assert bool(reads["quantize_experts" if name in MODELS else "stored_linears"]) == FORMATS[name].kernel
    assert llm.compile_report.verdict is not None and llm.compile_report.verdict.tolerance < 1e-2
    check_tokens(llm, dense)


LAYER = "model.layers.1.self_attn.q_proj"


def nan_in(leaf: str) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.{leaf}"].view(-1)[3] = torch.nan

    return change


def zero_in(leaf: str) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.{leaf}"].view(-1)[3] = 0

    return change


def without(leaf: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(f"{LAYER}.{leaf}")


def cut(leaf: str) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.{leaf}"] = tensors[f"{LAYER}.{leaf}"][:-1].contiguous()

    return change


def as_dtype(leaf: str, dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.{leaf}"] = tensors[f"{LAYER}.{leaf}"].to(dtype)

    return change


def uneven(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.g_idx"][0] = 1 - tensors[f"{LAYER}.g_idx"][0]


def not_a_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.weight"].view(torch.uint8).view(-1)[5] = 0x7F


def exchanged(tensors: dict[str, torch.Tensor]) -> None:
    """The first of two outputs in the high half of their byte."""
    halves = tensors[f"{LAYER}.weight"].view(torch.uint8)
    tensors[f"{LAYER}.weight"] = (halves >> 4 | halves << 4).view(torch.int8)


def along_inputs(tensors: dict[str, torch.Tensor]) -> None:
    """Two inputs in a byte in the place of two outputs."""
    halves = tensors[f"{LAYER}.weight"].view(torch.uint8)
    numbers = torch.stack([halves & 15, halves >> 4], 1).flatten(0, 1)
    tensors[f"{LAYER}.weight"] = (numbers[:, ::2] | numbers[:, 1::2] << 4).view(torch.int8)


def one_in_a_byte(tensors: dict[str, torch.Tensor]) -> None:
    """As files without a version hold them."""
    halves = tensors[f"{LAYER}.weight"].view(torch.uint8) ^ 0x88
    tensors[f"{LAYER}.weight"] = torch.stack([halves & 15, halves >> 4], 1).flatten(0, 1).to(torch.int8) - 8


def in_groups_of(size: int) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        second = tensors[f"{LAYER}.weight_scale_second"]
        inputs = tensors[f"{LAYER}.weight"].shape[1]
        tensors[f"{LAYER}.weight_scale_second"] = second.repeat_interleave(inputs // size // second.shape[1], 1)

    return change


def of_others(leaf: str) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.{leaf}"] = tensors[f"{LAYER}.{leaf}"].roll(1, 0)

    return change


def in_groups(tensors: dict[str, torch.Tensor]) -> None:
    """Scales of groups that the sums do not know of."""
    tensors[f"{LAYER}.weight_scale_second"] = torch.full((len(tensors[f"{LAYER}.weight_scale"]), 2), 1.5)


def second(leaf: str, number: float) -> Callable[[dict[str, torch.Tensor]], object]:
    """A tensor of groups, two for each output, beside a weight that has none."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.{leaf}"] = torch.full((len(tensors[f"{LAYER}.weight_scale"]), 2), number)

    return change


def one_in_a_byte_without_sums(tensors: dict[str, torch.Tensor]) -> None:
    one_in_a_byte(tensors)
    del tensors[f"{LAYER}.scale_bias"]


def without_inputs(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"][:, :0].contiguous()


def uneven_groups(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.weight_scale_second"] = torch.ones(len(tensors[f"{LAYER}.weight_scale"]), 3)


def tiny_scales(tensors: dict[str, torch.Tensor]) -> None:
    """Whose products vanish in float32."""
    tensors[f"{LAYER}.weight_scale"].fill_(1e-30)
    tensors[f"{LAYER}.weight_scale_second"].fill_(1e-30)


def exchanged_groups(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.weight_scale_second"] = tensors[f"{LAYER}.weight_scale_second"].flip(1).contiguous()


BROKEN: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = {
    "scales are missing": ("gptq-4-g32", without("scales"), "scales"),
    "zeros are missing": ("awq", without("qzeros"), "qzeros"),
    "codes are missing": ("ct-w4a16", without("weight_packed"), "weight_packed"),
    "the shape is missing": ("ct-w4a16", without("weight_shape"), "weight_shape"),
    "scales are of another shape": ("ct-w4a16", cut("weight_scale"), "weight_scale"),
    "codes are of another shape": ("awq", cut("qweight"), LAYER),
    "zeros are of another shape": ("gptq-4-g32", cut("qzeros"), "qzeros"),
    "zeros of compressed-tensors are": ("ct-w4a16-asym", cut("weight_zero_point"), "weight_zero_point"),
    "a grid is of another shape": ("fp8-blocks", cut("weight_scale_inv"), "weight_scale_inv"),
    "scales are integers": ("ct-w4a16", as_dtype("weight_scale", torch.int32), "weight_scale"),
    "codes are floats": ("gptq-4-g32", as_dtype("qweight", torch.float32), "qweight"),
    "a scale is NaN": ("ct-w4a16", nan_in("weight_scale"), "weight_scale"),
    "a scale of GPTQ is NaN": ("gptq-4-g32", nan_in("scales"), "scales"),
    "a scale is 0": ("awq", zero_in("scales"), "scales"),
    "a scale of a grid is 0": ("fp8-blocks", zero_in("weight_scale_inv"), "weight_scale_inv"),
    "a weight is NaN": ("fp8-blocks", not_a_number, "weight"),
    "groups are uneven": ("gptq-4-order", uneven, "g_idx"),
    "an offset is not 0": ("slim-w8a8-dynamic", lambda t: t[f"{LAYER}.weight_offset"].fill_(1), "weight_offset"),
    "halves of bytes are exchanged": ("slim-w4a8", exchanged, "scale_bias"),
    "a byte holds two inputs": ("slim-w4a8", along_inputs, "weight"),
    "a byte holds more than 4 bits": ("slim-w4a8-g32-plain", lambda t: t[f"{LAYER}.weight"].fill_(8), "weight"),
    "scales are of other outputs": ("slim-w4a8", of_others("weight_scale"), "scale_bias"),
    "sums are missing": ("slim-w4a8", without("scale_bias"), "scale_bias"),
    "sums are NaN": ("slim-w4a8", nan_in("scale_bias"), "scale_bias"),
    "sums are of another shape": ("slim-w4a8", cut("scale_bias"), "scale_bias"),
    "groups have scales that the sums do not": ("slim-w4a8", in_groups, "scale_bias"),
    "an offset of W4A8 is not 0": ("slim-w4a8", lambda t: t[f"{LAYER}.weight_offset"].fill_(1), "weight_offset"),
    "scales of groups are missing": ("slim-w4a8-g32", without("weight_scale_second"), "weight_scale_second"),
    "scales of groups are of another shape": ("slim-w4a8-g32", cut("weight_scale_second"), "weight_scale_second"),
    "groups do not divide the inputs": ("slim-w4a8-g32", uneven_groups, "weight_scale_second"),
    "groups are of another size": ("slim-w4a8-g32", in_groups_of(16), "weight_scale_second"),
    "groups are exchanged": ("slim-w4a8-g32", exchanged_groups, "scale_bias"),
    "a scale of a group is 0": ("slim-w4a8-g32", zero_in("weight_scale_second"), "weight_scale_second"),
    "a scale of a group is NaN": ("slim-w4a8-g32-plain", nan_in("weight_scale_second"), "weight_scale_second"),
    "scales of groups are integers": (
        "slim-w4a8-g32",
        as_dtype("weight_scale_second", torch.int32),
        "weight_scale_second",
    ),
    "products of scales vanish": ("slim-w4a8-g32-plain", tiny_scales, "weight_scale_second"),
    "an offset of a group is not 0": (
        "slim-w4a8-g32",
        lambda t: t[f"{LAYER}.weight_offset_second"].fill_(1),
        "weight_offset_second",
    ),
    "sums of groups are missing": ("slim-w4a8-g32", without("scale_bias"), "scale_bias"),
    "offsets of groups are alone": ("slim-w4a8", second("weight_offset_second", 0), "weight_scale_second"),
    "offsets other than 0 are alone": ("slim-w4a8", second("weight_offset_second", 1), "weight_scale_second"),
    "W8A8 has scales of groups": ("slim-w8a8-dynamic", second("weight_scale_second", 2), "weight_scale_second"),
    "W8A8 has offsets of groups": ("slim-w8a8-dynamic", second("weight_offset_second", 1), "weight_offset_second"),
    "W8A16 has scales of groups": ("slim-w8a16", second("weight_scale_second", 2), "weight_scale_second"),
    "static W8A8 has scales of groups": ("slim-w8a8-static", second("weight_scale_second", 2), "weight_scale_second"),
    "static W8A8 has offsets of groups": (
        "slim-w8a8-static",
        second("weight_offset_second", 1),
        "weight_offset_second",
    ),
    "one number in a byte without sums": ("slim-w4a8-g32", one_in_a_byte_without_sums, "scale_bias"),
    "there are no inputs": ("slim-w4a8", without_inputs, "weight"),
    "an 8-bit float has no scale": ("fp8-blocks", without("weight_scale_inv"), LAYER),
}


def changed(folder: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    copy = Path(shutil.copytree(folder, tmp_path / "changed"))
    file = next(copy.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_tensor_is_named(
    folders: Callable[[str, str], tuple[Path, Path]],
    case: str,
    tmp_path: Path,
    one_line: Callable[[BaseException], str],
) -> None:
    name, change, leaf = BROKEN[case]
    with pytest.raises(ValueError, match="is quantized") as error:
        load_model(changed(folders("llama", name)[0], tmp_path, change), "float32", False, CPU)
    message = one_line(error.value)
    assert LAYER in message and leaf in message, message


@pytest.mark.parametrize("group_size", [0, 32])
def test_a_byte_may_hold_one_number(
    folders: Callable[[str, str], tuple[Path, Path]], group_size: int, tmp_path: Path
) -> None:
    """As files without a version hold them; the sums are compared where they are there."""
    name = "slim-w4a8-g32" if group_size else "slim-w4a8"
    expected = dict(load_model(folders("llama", name)[0], "float32", False, CPU).named_parameters())
    folder = changed(folders("llama", name)[0], tmp_path, one_in_a_byte)
    found = dict(load_model(folder, "float32", False, CPU).named_parameters())[f"{LAYER}.weight"]
    assert isinstance(found, StoredWeight) and found.form.group_size == group_size
    assert torch.equal(found.dense(), as_dense(expected[f"{LAYER}.weight"]))


def test_sums_may_be_rounded_to_16_bits(folders: Callable[[str, str], tuple[Path, Path]], tmp_path: Path) -> None:
    folder = changed(folders("llama", "slim-w4a8")[0], tmp_path, as_dtype("scale_bias", torch.bfloat16))
    parameter = dict(load_model(folder, "float32", False, CPU).named_parameters())[f"{LAYER}.weight"]
    assert isinstance(parameter, StoredWeight) and parameter.form.bits == 4


CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown version": ("gptq-4-g32", {"checkpoint_format": "gptq_v3"}, "gptq_v3"),
    "another form of AWQ": ("awq", {"version": "gemv"}, "gemv"),
    "a form of AWQ for one kernel": ("awq", {"version": "marlin"}, "marlin"),
    "an unknown packing": ("autoround-awq", {"packing_format": "auto_round:llm"}, "auto_round:llm"),
    "a packing like a known one": ("autoround-gptq", {"packing_format": "auto_round:gptq"}, "auto_round:gptq"),
    "no packing": ("autoround-gptq", {"packing_format": None}, "packing_format=None"),
    "blocks of another size": ("fp8-blocks", {"weight_block_size": [16, 16]}, "weight_scale_inv"),
    "rotated weights": ("ct-w4a16", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    "not compressed": ("ct-w4a16", {"quantization_status": "frozen"}, "quantization_status"),
    "sparse": ("ct-w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    "groups of another size": (
        "ct-w4a16",
        {"config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 16}}}},
        "weight_packed",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_config_that_contradicts_the_tensors(
    folders: Callable[[str, str], tuple[Path, Path]],
    case: str,
    tmp_path: Path,
    one_line: Callable[[BaseException], str],
) -> None:
    name, entries, word = CONTRADICTIONS[case]
    copy = changed(folders("llama", name)[0], tmp_path, lambda tensors: None)
    file = copy / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= entries
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is quantized") as error:
        load_model(copy, "float32", False, CPU)
    assert word in one_line(error.value)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_other_bits_of_compressed_tensors(
    folders: Callable[[str, str], tuple[Path, Path]], bits: int, tmp_path: Path
) -> None:
    """7 bits take as many words as 8: a word has as many numbers as fit in it whole."""
    codes = torch.zeros(64, -(-64 // (32 // bits)), dtype=torch.int32)
    copy = changed(folders("llama", "ct-w4a16")[0], tmp_path, lambda t: t.update({f"{LAYER}.weight_packed": codes}))
    with pytest.raises(ValueError, match=rf"{LAYER}\.weight_packed"):
        load_model(copy, "float32", False, CPU)
    file = copy / "config.json"
    config = json.loads(file.read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    config["quantization_config"]["config_groups"]["group_1"] = {**group, "weights": {**group["weights"]}}
    config["quantization_config"]["config_groups"]["group_1"]["weights"]["num_bits"] = bits
    file.write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=rf"weight_packed.*its config states \[{bits}\] bits; only 4 and 8 are supported"
    ):
        load_model(copy, "float32", False, CPU)


def test_bits_of_single_modules(folders: Callable[[str, str], tuple[Path, Path]], tmp_path: Path) -> None:
    """A GPTQ config may override them; the module's own tensors say how many they are."""
    copy = changed(folders("llama", "gptq-4-g32")[0], tmp_path, lambda tensors: None)
    file = copy / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["bits"] = 8
    file.write_text(json.dumps(config))
    model = load_model(copy, "float32", False, CPU)
    assert {p.form.bits for p in model.parameters() if isinstance(p, StoredWeight)} == {4}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({f"{LAYER}.weight": "W8A8_MIX"}, "W8A8_MIX"),
        ({f"{LAYER}.weight": "W4A4_DYNAMIC"}, "W4A4_DYNAMIC"),
        ({f"{LAYER}.weight": "W4A8_DYNAMIC"}, "expected two outputs to a byte"),
        ({"model.norm.weight": "W8A8_DYNAMIC"}, "model.norm.weight"),
        ({"optional": {"quarot": {"rotation_map": {"heads": "x"}}}}, "rotations"),
    ],
    ids=str,
)
def test_descriptions_of_modelslim(
    folders: Callable[[str, str], tuple[Path, Path]],
    change: dict[str, Any],
    word: str,
    tmp_path: Path,
    one_line: Callable[[BaseException], str],
) -> None:
    copy = changed(folders("llama", "slim-w8a8-dynamic")[0], tmp_path, lambda tensors: None)
    file = copy / "quant_model_description.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match="is quantized") as error:
        load_model(copy, "float32", False, CPU)
    assert word in one_line(error.value)


@pytest.mark.parametrize("stated", ["32", 32.0, True, [32], 16, -1])
@pytest.mark.parametrize("name", ["slim-w4a8", "slim-w4a8-g32", "slim-w4a8-g32-plain"])
def test_sizes_of_groups_that_modelslim_does_not_write(
    folders: Callable[[str, str], tuple[Path, Path]],
    name: str,
    stated: object,
    tmp_path: Path,
    one_line: Callable[[BaseException], str],
) -> None:
    copy = changed(folders("llama", name)[0], tmp_path, lambda tensors: None)
    file = copy / "quant_model_description.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"group_size": stated}))
    if name == "slim-w4a8" and stated == -1:
        assert load_model(copy, "float32", False, CPU)
        return
    with pytest.raises(ValueError, match="is quantized") as error:
        load_model(copy, "float32", False, CPU)
    message = one_line(error.value)
    assert "weight_scale_second" in message or f"group_size={stated!r}" in message


def test_one_global_rotation_changes_nothing(
    folders: Callable[[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    copy = changed(folders("llama", "slim-w8a8-dynamic")[0], tmp_path, lambda tensors: None)
    file = copy / "quant_model_description.json"
    rotation = {"optional": {"quarot": {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | rotation))
    assert load_model(copy, "float32", False, CPU)


def test_quantized_twice(
    folders: Callable[[str, str], tuple[Path, Path]], one_line: Callable[[BaseException], str]
) -> None:
    with pytest.raises(ValueError, match="already quantized") as error:
        pagoda.LLM(folders("llama", "ct-w8a8")[0], quantization="int4")
    one_line(error.value)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen3_moe", "gptq-4-g32"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("mixtral", "awq"),
                ("deepseek_v3", "ct-w8a8"),
                ("qwen3_moe", "fp8-blocks"),
                ("qwen3_moe", "slim-w4a8"),
            )
        ),
    ],
)
def test_experts_are_served_as_they_are_stored(
    folders: Callable[[str, str], tuple[Path, Path]], model_type: str, name: str
) -> None:
    quantized, dense = folders(model_type, name)
    llm = pagoda.LLM(quantized, dtype="float32", input_bits=16, block_size=4, num_blocks=64)
    reads = {record.name: record.matches for record in llm.compile_report.passes}
    assert bool(reads["quantize_experts"]) == FORMATS[name].kernel
    check_tokens(llm, dense)


def test_experts_of_separate_tensors_are_fused_as_they_are_stored(
    folders: Callable[[str, str], tuple[Path, Path]],
) -> None:
    quantized, dense = folders("qwen3_moe", "fp8-blocks")
    model = load_model(quantized, "float32", False, CPU)
    expected = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).state_dict()
    stored = {key: p for key, p in model.named_parameters() if isinstance(p, StoredWeight)}
    assert any(parameter.dim() == 3 for parameter in stored.values())
    assert all(torch.equal(parameter.dense(), expected[key]) for key, parameter in stored.items())
