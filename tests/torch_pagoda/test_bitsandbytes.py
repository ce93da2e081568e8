"""Checkpoints of bitsandbytes are unpacked to what the package makes of them, with a warning; broken ones refused."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes_files import CONFIGS, eight_bits, four_bits
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import torch_pagoda as pagoda
from torch_pagoda.checkpoint.loading import checkpoint_files, load_model
from torch_pagoda.checkpoint.readers.bitsandbytes import read_bitsandbytes
from torch_pagoda.checkpoint.readers.parts import Quantized
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight

from tiny_models import build_tiny_model

CPU = torch.device("cpu")
LAYER = "model.layers.1.self_attn.q_proj"
LOGGER = "torch_pagoda.checkpoint.quantized_tensors"


def read(tensors: dict[str, torch.Tensor], dtype: torch.dtype, config: str = "") -> torch.Tensor:
    leaves = {leaf.removeprefix("weight."): tensor for leaf, tensor in tensors.items()}
    found = read_bitsandbytes(Quantized("layer", leaves, CONFIGS.get(config, {}), dtype))
    return found["layer.weight"]


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "block"), [((64, 300), 64), ((3, 33), 64), ((8, 64), 128), ((5, 4096), 4096)])
def test_every_number_is_that_of_the_formula(
    shape: tuple[int, int], block: int, dtype: torch.dtype, kind: str, nested: bool
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 9
    weight[0, :2] = 0
    tensors, expected = four_bits(weight, kind, block=block, nested=nested, dtype=dtype)
    assert torch.equal(read(tensors, dtype), expected)
    assert torch.equal(read(tensors, torch.float32), expected.float()), "rounded to the dtype that it was made from"


def test_many_blocks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_pagoda.checkpoint.readers.bitsandbytes._AT_ONCE", 512)
    tensors, expected = four_bits(torch.randn(9, 301), "nf4")
    assert torch.equal(read(tensors, torch.bfloat16), expected)
    tensors, expected = eight_bits(torch.randn(40, 300))
    assert torch.equal(read(tensors, torch.float32), expected)


def test_bytes_that_are_held_as_floats() -> None:
    """``bnb_4bit_quant_storage``, which some ways of sharding need."""
    tensors, expected = four_bits(torch.randn(8, 64), "nf4")
    tensors["weight"] = tensors["weight"].view(-1).view(torch.bfloat16)[:, None]
    assert torch.equal(read(tensors, torch.bfloat16), expected)


def swapped(tensors: dict[str, torch.Tensor]) -> None:
    tensors["weight"] = tensors["weight"] >> 4 | tensors["weight"] << 4


def other_state(**changes: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        (key,) = (key for key in tensors if "quant_state" in key)
        state = json.loads(bytes(tensors[key].tolist()))
        state |= changes
        tensors[key] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    "mistake",
    [swapped, other_state(nested_offset=0.0), lambda t: t.update({"weight.absmax": t["weight.absmax"].roll(1)})],
    ids=["swapped halves", "without the offset", "scales of others"],
)
def test_mistakes_are_other_numbers(mistake: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors, expected = four_bits(torch.randn(16, 128), "nf4")
    mistake(tensors)
    assert (read(tensors, torch.bfloat16) != expected).double().mean() > 0.5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A function of a format: the quantized folder, and a float one of what it means."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            build_tiny_model("llama").save_pretrained(folder / "dense")
            shutil.copytree(folder / "dense", folder / "quantized")
            state, stored = load_file(folder / "dense" / "model.safetensors"), {}
            for key, tensor in list(state.items()):
                if ".layers." not in key or tensor.dim() != 2:
                    stored[key] = tensor
                    continue
                owner = key.removesuffix(".weight")
                parts, state[key] = eight_bits(tensor) if name == "int8" else four_bits(tensor, name)
                stored |= {f"{owner}.{leaf}": part.contiguous() for leaf, part in parts.items()}
            state = {key: tensor.float().contiguous() for key, tensor in state.items()}
            save_file(state, folder / "dense" / "model.safetensors", metadata={"format": "pt"})
            save_file(stored, folder / "quantized" / "model.safetensors", metadata={"format": "pt"})
            file = folder / "quantized" / "config.json"
            said = {"quant_method": "bitsandbytes", **CONFIGS[name]}
            file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": said}))
            made[name] = folder / "quantized", folder / "dense"
        return made[name]

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_unpacked_with_a_warning(
    name: str, folders: Callable[[str], tuple[Path, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    quantized, dense = folders(name)
    with caplog.at_level(logging.WARNING, LOGGER):
        model = load_model(quantized, "float32", False, CPU)
    (message,) = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert "(bitsandbytes) with codes that no kernel multiplies: 14 weights are unpacked to float32" in message
    expected = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).state_dict()
    for key, tensor in model.state_dict().items():
        assert not isinstance(tensor, StoredWeight) and torch.equal(tensor, expected[key]), key


def test_a_head_in_codes_is_not_tied(folders: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """Whatever the config says: it is another matrix than the embeddings that it was made from."""
    shutil.copytree(folders("nf4")[0], tmp_path / "it")
    file, config = tmp_path / "it" / "model.safetensors", tmp_path / "it" / "config.json"
    tensors = load_file(file)
    codes, means = four_bits(tensors.pop("lm_head.weight"), "nf4")
    tensors |= {f"lm_head.{leaf}": tensor for leaf, tensor in codes.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    model = load_model(tmp_path / "it", "float32", False, CPU)
    assert torch.equal(model.get_output_embeddings().weight, means.float())
    assert torch.equal(model.get_input_embeddings().weight, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_tokens_are_those_of_the_floats(name: str, folders: Callable[[str], tuple[Path, Path]]) -> None:
    quantized, dense = folders(name)
    params = pagoda.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = [list(range(5, 5 + n)) for n in (3, 17)]
    outputs = pagoda.LLM(quantized, dtype="float32", block_size=4, num_blocks=64).generate(prompts, params)
    reference = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = reference.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert output.outputs[0].token_ids == tokens[0, len(prompt) :].tolist()


def test_programs_are_not_known_by_its_files(folders: Callable[[str], tuple[Path, Path]]) -> None:
    quantized, dense = folders("nf4")
    assert checkpoint_files(quantized, "float32") is None and checkpoint_files(dense, "float32") is not None


STATE = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
NAN = torch.tensor([torch.nan])


def state_of(tensors: dict[str, torch.Tensor], **changes: Any) -> torch.Tensor:
    state = {**json.loads(bytes(tensors[STATE].tolist())), **changes}
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


REFUSED: dict[str, tuple[str, str, Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor | None]]] = {
    "no absmax": ("nf4", "weight.absmax", lambda all, it: None),
    "no table": ("nf4", "weight.quant_map", lambda all, it: None),
    "no nested table": ("nf4", "weight.nested_quant_map", lambda all, it: None),
    "no state": ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda all, it: None),
    "no weight": ("nf4", "weight", lambda all, it: None),
    "short weight": ("nf4", "weight", lambda all, it: it[1:]),
    "short absmax": ("nf4", "weight.absmax", lambda all, it: it[1:]),
    "short nested": ("nf4", "weight.nested_absmax", lambda all, it: it.repeat(2)),
    "nested NaN": ("nf4", "weight.nested_absmax", lambda all, it: it * NAN),
    "nested table NaN": ("nf4", "weight.nested_quant_map", lambda all, it: it * NAN),
    "float codes of scales": ("nf4", "weight.absmax", lambda all, it: it.float()),
    "another table": ("nf4", "weight.quant_map", lambda all, it: it.flip(0)),
    "no JSON": ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda all, it: it[2:]),
    "a list": ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda all, it: torch.tensor([91, 93]).byte()),
    "another kind": ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda a, it: state_of(a, quant_type="fp4")),
    "blocks": ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda a, it: state_of(a, blocksize=48)),
    "shape": ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda a, it: state_of(a, shape=[64, -64])),
    "dtype": ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda a, it: state_of(a, dtype="int8")),
    "offset": ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda a, it: state_of(a, nested_offset=1e999)),
    "offset beyond floats": (
        *("nf4", "weight.quant_state.bitsandbytes__nf4"),
        lambda a, it: state_of(a, nested_offset=10**400),
    ),
    "deep state": (
        *("nf4", "weight.quant_state.bitsandbytes__nf4"),
        lambda all, it: torch.full((100_000,), ord("["), dtype=torch.uint8),
    ),
    "weights beyond floats": (
        *("nf4", "weight.nested_absmax"),
        lambda all, it: torch.full_like(it, torch.finfo(torch.float32).max),
    ),
    "not nested": ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda a, it: state_of(a, nested_blocksize=None)),
    "no SCB": ("int8", "SCB", lambda all, it: None),
    "SCB NaN": ("int8", "SCB", lambda all, it: it * NAN),
    "SCB below 0": ("int8", "SCB", lambda all, it: -it),
    "SCB of others": ("int8", "SCB", lambda all, it: it[1:]),
    "columns": ("int8", "weight_format", lambda all, it: it + 2),
    "format NaN": ("int8", "weight_format", lambda all, it: torch.tensor(torch.nan)),
    "SCB beyond floats": ("int8", "SCB", lambda all, it: torch.full_like(it, torch.finfo(torch.float32).max)),
    "float rows": ("int8", "weight", lambda all, it: it.float()),
}
TOLD_BY = {
    "no state": "weight.absmax",
    "no weight": "weight",
    "no SCB": "weight_format",
    "weights beyond floats": "weight.absmax",
}
"""Of those that another tensor's name tells."""


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_do_not_fit(case: str, folders: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    name, leaf, change = REFUSED[case]
    shutil.copytree(folders(name)[0], tmp_path / "it")
    file = tmp_path / "it" / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors, tensors.pop(f"{LAYER}.{leaf}") if case == "no weight" else tensors[f"{LAYER}.{leaf}"])
    if changed is None:
        tensors.pop(f"{LAYER}.{leaf}", None)
    else:
        tensors[f"{LAYER}.{leaf}"] = changed.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(f"'{LAYER}.{TOLD_BY.get(case, leaf)}")) as error:
        load_model(tmp_path / "it", "float32", False, CPU)
    assert "is quantized (bitsandbytes)" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, "it is nf4, but its config states 'fp4'"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "it has 4 bits, but its config states 8"),
    ],
)
def test_a_config_that_contradicts(
    changes: dict[str, Any], word: str, folders: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    shutil.copytree(folders("nf4")[0], tmp_path / "it")
    file = tmp_path / "it" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=word):
        load_model(tmp_path / "it", "float32", False, CPU)
