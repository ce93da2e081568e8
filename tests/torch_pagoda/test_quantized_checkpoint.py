"""Checkpoints whose numbers are codes, of which nothing says how to read them, are refused, whatever gives them
away."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from torch_pagoda.checkpoint.loading import load_model

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")
LAYER = "model.layers.1.self_attn.q_proj"
WEIGHT = f"{LAYER}.weight"


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A folder of one's own with the tiny llama, float32 ``[64, 64]`` queries."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def refused(folder: Path, one_line: Callable[[BaseException], str]) -> str:
    with pytest.raises(ValueError) as error:
        load_model(folder, "auto", False, CPU)
    message = one_line(error.value)
    assert message.startswith(f"model={str(folder)!r}") and "pass the float checkpoint" in message, message
    return message


def codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 and a scale per output."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def int8_with(*companions: str) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        tensors[WEIGHT], scale = codes(tensors[WEIGHT])
        for companion in companions:
            tensors[f"{LAYER}.{companion}"] = scale.clone()

    return change


def gptq(tensors: Tensors) -> None:
    del tensors[WEIGHT]
    tensors[f"{LAYER}.qweight"] = torch.zeros(8, 64, dtype=torch.int32)
    tensors[f"{LAYER}.qzeros"] = torch.zeros(1, 8, dtype=torch.int32)
    tensors[f"{LAYER}.scales"] = torch.ones(1, 64, dtype=torch.float16)
    tensors[f"{LAYER}.g_idx"] = torch.zeros(64, dtype=torch.int32)


def awq(tensors: Tensors) -> None:
    gptq(tensors)
    del tensors[f"{LAYER}.g_idx"]


def fp8(companion: str) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        tensors[WEIGHT] = tensors[WEIGHT].to(torch.float8_e4m3fn)
        if companion:
            tensors[f"{LAYER}.{companion}"] = torch.ones(1, 1)

    return change


def packed(tensors: Tensors) -> None:
    del tensors[WEIGHT]
    tensors[f"{LAYER}.weight_packed"] = torch.zeros(64, 8, dtype=torch.int32)
    tensors[f"{LAYER}.weight_scale"] = torch.ones(64, 1)


def nf4(tensors: Tensors) -> None:
    tensors[WEIGHT] = torch.zeros(2048, 1, dtype=torch.uint8)
    tensors[f"{WEIGHT}.absmax"] = torch.ones(64)
    tensors[f"{WEIGHT}.quant_state.bitsandbytes__nf4"] = torch.zeros(8, dtype=torch.uint8)


def mxfp4(tensors: Tensors) -> None:
    del tensors[WEIGHT]
    tensors["model.layers.1.mlp.experts.down_proj_blocks"] = torch.zeros(2, 2, 1, 16, dtype=torch.uint8)
    tensors["model.layers.1.mlp.experts.down_proj_scales"] = torch.zeros(2, 2, 1, dtype=torch.uint8)


BY_TENSORS: dict[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "int8 and a scale": (int8_with("weight_scale"), ("compressed-tensors or msModelSlim", f"{LAYER}.weight_scale")),
    "msModelSlim": (int8_with("weight_scale", "weight_offset"), ("msModelSlim", "weight_offset")),
    "msModelSlim, static": (int8_with("deq_scale", "quant_bias", "input_scale"), ("msModelSlim", "deq_scale")),
    "GPTQ": (gptq, ("GPTQ", "g_idx")),
    "AWQ": (awq, ("AWQ", "qweight")),
    "compressed-tensors": (packed, ("compressed-tensors", "weight_packed")),
    "FP8": (fp8("weight_scale"), ("FP8", "weight_scale")),
    "FP8 in blocks": (fp8("weight_scale_inv"), ("FP8", "weight_scale_inv")),
    "8-bit floats alone": (fp8(""), (WEIGHT, "float8_e4m3")),
    "int8 alone": (int8_with(), (WEIGHT, "int8")),
    "bitsandbytes": (nf4, ("bitsandbytes", "absmax")),
    "MXFP4": (mxfp4, ("MXFP4", "down_proj_blocks")),
}


@pytest.mark.parametrize("case", BY_TENSORS)
def test_tensors_give_codes_away(case: str, copy: Path, one_line: Callable[[BaseException], str]) -> None:
    change, words = BY_TENSORS[case]
    rewrite(copy, change)
    message = refused(copy, one_line)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("case", ["int8 and a scale", "FP8", "int8 alone"])
def test_so_they_do_in_files_of_torch(case: str, copy: Path, one_line: Callable[[BaseException], str]) -> None:
    change, words = BY_TENSORS[case]
    rewrite(copy, change)
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    torch.save(tensors, copy / "pytorch_model.bin")
    message = refused(copy, one_line)
    assert all(word in message for word in words), message


def test_so_they_do_in_the_second_of_two_files(copy: Path, one_line: Callable[[BaseException], str]) -> None:
    rewrite(copy, int8_with("weight_scale"))
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    parts = [{k: v for k, v in tensors.items() if (LAYER in k) == last} for last in (False, True)]
    files = [f"model-{i}-of-00002.safetensors" for i in (1, 2)]
    for file, part in zip(files, parts, strict=True):
        save_file(part, copy / file, metadata={"format": "pt"})
    index = {key: file for file, part in zip(files, parts, strict=True) for key in part}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert f"{LAYER}.weight_scale" in refused(copy, one_line)


@pytest.mark.parametrize("leaf", ["scales", "bias", "weight_extra", "lora_A.weight"])
def test_what_is_left_over_beside_a_loaded_weight(
    leaf: str, copy: Path, one_line: Callable[[BaseException], str]
) -> None:
    rewrite(copy, lambda tensors: tensors.update({f"{LAYER}.{leaf}": torch.ones(64)}))
    message = refused(copy, one_line)
    assert f"{LAYER}.{leaf}" in message and f"reads {WEIGHT!r} without it" in message


def test_integers_in_place_of_another_parameter(copy: Path, one_line: Callable[[BaseException], str]) -> None:
    """A bias of integers is not a weight by its name, and no table that the model keeps."""
    change_config(copy, attention_bias=True)

    def change(tensors: Tensors) -> None:
        for layer in (0, 1):
            for part, size in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
                dtype = torch.int8 if (layer, part) == (1, "q") else torch.float32
                tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = torch.ones(size, dtype=dtype)

    rewrite(copy, change)
    message = refused(copy, one_line)
    assert f"{LAYER}.bias" in message and "int8" in message


def test_masks_and_tables_of_a_float_checkpoint_are_left_alone(copy: Path) -> None:
    """Buffers that old checkpoints hold, under names of modules that have no weights."""

    def change(tensors: Tensors) -> None:
        tensors["model.layers.1.self_attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["model.position_ids"] = torch.arange(8)[None]

    weight = load_file(copy / "model.safetensors")[WEIGHT]
    rewrite(copy, change)
    assert torch.equal(load_model(copy, "auto", False, CPU).state_dict()[WEIGHT], weight)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ("GPTQ", "a quantization_config")),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ("bitsandbytes",)),
        ({"quantization_config": {"quant_method": "torchao"}}, ("torchao",)),
        ({"quantization_config": {"quant_method": "hqq"}}, ("hqq",)),
        ({"quantization_config": {"bits": 8}}, ("an unnamed method",)),
        ({"compression_config": {"format": "pack-quantized"}}, ("compressed-tensors", "a compression_config")),
        (
            {"text_config": {"quantization_config": {"quant_method": "modelopt"}}},
            ("ModelOpt", "text_config.quantization_config"),
        ),
    ],
    ids=str,
)
def test_the_config_says_so(
    entries: dict[str, Any], words: tuple[str, ...], copy: Path, one_line: Callable[[BaseException], str]
) -> None:
    change_config(copy, **entries)
    message = refused(copy, one_line)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("file", "method"),
    [
        ("quant_model_description.json", "msModelSlim"),
        ("quant_model_description_w8a8_dynamic.json", "msModelSlim"),
        ("quantize_config.json", "GPTQ"),
        ("quant_config.json", "AWQ"),
        ("hf_quant_config.json", "ModelOpt"),
    ],
)
def test_a_file_beside_it_says_so(
    file: str, method: str, copy: Path, one_line: Callable[[BaseException], str]
) -> None:
    (copy / file).write_text("{}")
    message = refused(copy, one_line)
    assert f"({method}: {file}" in message
