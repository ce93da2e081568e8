"""Programs over quantized checkpoints are kept, found by the files alone, and not taken once these have changed."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import quantize_folder
from safetensors.torch import load_file, save_file

import torch_pagoda as pagoda
from torch_pagoda import compiled_model
from torch_pagoda.checkpoint import quantized_tensors
from torch_pagoda.checkpoint.loading import checkpoint_files
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.warm_start import record
from torch_pagoda.compiler.warm_start.file import DISABLE
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight
from torch_pagoda.runtime.ops.native import kernel_function

from tiny_models import build_tiny_model

CASES = {"ct-w4a16-asym": "llama", "gptq-4-order": "llama", "slim-w8a8-static": "llama", "fp8-blocks": "qwen3_moe"}
LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def compile_once() -> None:
    """Takes the place of the fixture that compiles without the store."""


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    """Those of the process, before each test has a cache of its own."""
    assert kernel_function("pagoda_quantize_weight") is not None


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of the test's own, and processes that have not loaded the model's code."""
    monkeypatch.delenv(DISABLE)
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(record, "loaded_of_models", lambda names, loaded: None)
    return tmp_path / "cache"


def written(folder: Path, name: str) -> Path:
    model = build_tiny_model(CASES[name], num_hidden_layers=1)
    model.save_pretrained(folder)
    quantize_folder(folder, name)
    return folder


def started(folder: Path) -> pagoda.LLM:
    return pagoda.LLM(folder, dtype="float32", block_size=4, num_blocks=64)


def tokens(llm: pagoda.LLM) -> list[int]:
    params = pagoda.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return llm.generate([list(range(5, 22))], params)[0].outputs[0].token_ids


@pytest.mark.parametrize("name", CASES)
def test_a_second_start_loads_no_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torch_pagoda")
    folder = written(tmp_path / "checkpoint", name)
    first = started(folder)
    assert not first.compile_report.stored
    with monkeypatch.context() as patch:
        patch.setattr(compiled_model, "load_model", lambda *args: pytest.fail(f"the model is loaded:\n{caplog.text}"))
        second = started(folder)
    assert second.compile_report.stored and tokens(second) == tokens(first)
    rounds_inputs = name == "slim-w8a8-static"  # to 8 bits, which the logits of the model are not computed with
    assert (second.compile_report.verdict.tolerance < 1e-2) is not rounds_inputs
    # And where the model's code is loaded, by the module's description.
    monkeypatch.setattr(record, "loaded_of_models", lambda names, loaded: "a model")
    third = started(folder)
    assert third.compile_report.stored and tokens(third) == tokens(first)


def flip(leaf: str, bit: int) -> Callable[[dict[str, torch.Tensor]], object]:
    """Changes one bit of the first number of a tensor, which holds whole ones, or floats that stay near."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.{leaf}"].view(torch.uint8).view(-1)[0] ^= 1 << bit

    return change


def swap_groups(tensors: dict[str, torch.Tensor]) -> None:
    group = tensors[f"{LAYER}.g_idx"]
    other = int((group != group[0]).nonzero()[0])
    group[0], group[other] = group[other].clone(), group[0].clone()


MUTANTS = {
    "one code": ("gptq-4-order", flip("qweight", 2)),
    "one scale": ("gptq-4-order", flip("scales", 0)),
    "one zero": ("gptq-4-order", flip("qzeros", 0)),
    "two inputs of other groups": ("gptq-4-order", swap_groups),
    "one code of compressed-tensors": ("ct-w4a16-asym", flip("weight_packed", 2)),
    "one scale of compressed-tensors": ("ct-w4a16-asym", flip("weight_scale", 0)),
    "one zero of compressed-tensors": ("ct-w4a16-asym", flip("weight_zero_point", 0)),
    "one scale of msModelSlim": ("slim-w8a8-static", flip("deq_scale", 0)),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function of a format: a folder with a checkpoint, beside a cache that knows it."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = folder = tmp_path_factory.mktemp(name)
            with pytest.MonkeyPatch.context() as patch:
                patch.delenv(DISABLE, raising=False)
                patch.setenv("TORCH_PAGODA_CACHE", str(folder / "cache"))
                started(written(folder / "checkpoint", name))
        return made[name]

    return make


@pytest.fixture
def copied(kept: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A function of a format: a copy of that folder's checkpoint, whose cache is used."""

    def copy(name: str) -> Path:
        monkeypatch.setenv("TORCH_PAGODA_CACHE", str(kept(name) / "cache"))
        return Path(shutil.copytree(kept(name) / "checkpoint", tmp_path / "checkpoint"))

    return copy


@pytest.mark.parametrize("case", MUTANTS)
def test_a_changed_checkpoint_is_another(case: str, copied: Callable[[str], Path]) -> None:
    name, change = MUTANTS[case]
    folder = copied(name)
    assert started(folder).compile_report.stored
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    assert not started(folder).compile_report.stored


@pytest.mark.parametrize(
    ("name", "file"), [("slim-w8a8-static", "quant_model_description.json"), ("ct-w4a16-asym", "config.json")]
)
def test_what_is_said_of_the_weights_counts(name: str, file: str, copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    digests = []
    for version in ("1", "2"):
        said = json.loads((folder / file).read_text())
        (said if "slim" in name else said["quantization_config"])["version"] = version
        (folder / file).write_text(json.dumps(said))
        files = checkpoint_files(folder, "float32")
        assert files is not None
        digests.append(record.warm_key(files, CompileOptions(target="cpu")))
    assert digests[0] != digests[1]


def test_codes_in_the_middle_of_a_large_tensor_count(tmp_path: Path) -> None:
    folder = written(tmp_path / "checkpoint", "ct-w4a16-asym")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    wide = torch.zeros(512, 1024, dtype=torch.int32)
    digests = set()
    for number in (0, 1):
        wide[300, 77] = number
        save_file({**tensors, "wide": wide}, file, metadata={"format": "pt"})
        files = checkpoint_files(folder, "float32")
        assert files is not None
        digests.add(files.contents()["tensors"])
    assert len(digests) == 2


def test_what_is_stored_otherwise_is_not_what_was_recorded(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader that finds another format in the same files makes the record void."""
    folder = copied("gptq-4-order")
    read = quantized_tensors.QuantizedFiles.whole

    def otherwise(self: Any, owner: str, key: str) -> torch.Tensor:
        weight = read(self, owner, key)
        assert isinstance(weight, StoredWeight)
        return weight.replaced(form=replace(weight.form, ordered=False), order=None)

    with monkeypatch.context() as patch:
        patch.setattr(quantized_tensors.QuantizedFiles, "whole", otherwise)
        assert not started(folder).compile_report.stored or "does not hold" in caplog.text
    assert "the checkpoint does not hold " in caplog.text and "as int4/g32/f16+z+order)" in caplog.text
