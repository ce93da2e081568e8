"""Layers that were loaded from other layers' tensors are refused before the first token."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import quantize_folder
from safetensors.torch import load_file, save_file
from torch import nn

from torch_pagoda.checkpoint.loading import checkpoint_files, load_model
from torch_pagoda.compiler import CheckpointFiles, CompileOptions, UnsupportedModel, compile_program
from torch_pagoda.compiler import compile as compile_module
from torch_pagoda.compiler.warm_start.layer_sources import layers_as_numbered
from torch_pagoda.compiler.warm_start.record import Sources, known_tensors
from torch_pagoda.compiler.weights.tensor_contents import module_tensors
from torch_pagoda.passes import NotFinite
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight

from tiny_models import build_tiny_model

OPTIONS = CompileOptions(codegen="none", target="cpu")
DEPTH = 9
Loaded = tuple[nn.Module, CheckpointFiles]


def saved(folder: Path, kind: str = "llama", form: str = "", depth: int = DEPTH) -> Path:
    shard = "60KB" if not form else "5GB"
    build_tiny_model(kind, num_hidden_layers=depth).save_pretrained(folder, max_shard_size=shard)
    if form:
        quantize_folder(folder, form)
    return folder


def loaded(folder: Path) -> Loaded:
    files = checkpoint_files(folder, "float32")
    assert files is not None
    return load_model(folder, "float32", False, torch.device("cpu")), files


def as_numbered(model: nn.Module, files: CheckpointFiles) -> bool:
    known = known_tensors(model, files)
    return layers_as_numbered(model, known, known.sources(module_tensors(model)))


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    if isinstance(one, StoredWeight) and isinstance(other, StoredWeight):
        one.codes, other.codes = other.codes, one.codes
        one.scales, other.scales = other.scales, one.scales
        one.zeros, other.zeros = other.zeros, one.zeros
    else:
        one.data, other.data = other.data, one.data


def exchanged_layers(layers: Any) -> None:
    for one, other in zip(layers[5].parameters(), layers[6].parameters(), strict=True):
        exchange(one, other)


def exchanged_matrices(layers: Any) -> None:
    exchange(layers[5].mlp.down_proj.weight, layers[2].mlp.down_proj.weight)


def shard_read_twice(layers: Any) -> None:
    for one, other in zip(layers[7].parameters(), layers[4].parameters(), strict=True):
        if isinstance(one, StoredWeight) and isinstance(other, StoredWeight):
            one.codes, one.scales, one.zeros = other.codes, other.scales, other.zeros
        else:
            one.data = other.data


@pytest.mark.parametrize("form", ["", "ct-w4a16"])
@pytest.mark.parametrize("fault", [exchanged_layers, exchanged_matrices, shard_read_twice])
def test_other_layers_weights_are_seen(form: str, fault: Callable[[Any], None], tmp_path: Path) -> None:
    model, files = loaded(saved(tmp_path, form=form))
    assert as_numbered(model, files)
    fault(model.model.layers)  # type: ignore[union-attr]
    with pytest.raises(UnsupportedModel, match=r"'model\.layers\.\d\..*' holds the file's 'model\.layers\.\d"):
        as_numbered(model, files)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3_moe", "mixtral", "bloom", "mamba"])
def test_names_that_are_converted_are_known(kind: str, tmp_path: Path) -> None:
    """Stacks of experts, matrices that lie in other lists, biases that are all zero."""
    assert as_numbered(*loaded(saved(tmp_path, kind)))


def test_what_a_dtype_does_not_tell_apart_is_alike(tmp_path: Path) -> None:
    """Norms that differ in float32, and are ones in bfloat16."""
    model = build_tiny_model("llama", num_hidden_layers=DEPTH)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 1e-4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
        model.model.layers[3].input_layernorm.weight += 2e-4
    model.save_pretrained(tmp_path)
    files = checkpoint_files(tmp_path, "bfloat16")
    assert files is not None
    assert as_numbered(load_model(tmp_path, "bfloat16", False, torch.device("cpu")), files)


def test_files_that_number_layers_otherwise_tell_nothing(tmp_path: Path) -> None:
    model, files = loaded(saved(tmp_path))
    known = known_tensors(model, files)
    sources = known.sources(module_tensors(model))
    later = {
        name: (source.replace(f".{number}.", f".{int(number) + 20}.") if number else source, dtype)
        for name, (source, dtype) in sources.weights.items()
        for number in [next((part for part in name.split(".") if part.isdecimal()), "")]
    }

    assert not layers_as_numbered(model, known, Sources(later, {}, {}))


def test_a_module_of_other_layers_is_refused(tmp_path: Path) -> None:
    model, files = loaded(saved(tmp_path))
    exchanged_matrices(model.model.layers)  # type: ignore[union-attr]
    with pytest.raises(UnsupportedModel, match=r"'model\.layers\.2\.mlp\.down_proj\.weight' holds the file's"):
        compile_program(model, OPTIONS, owns_weights=True, files=files)


@pytest.mark.parametrize("change", [os.utime, os.unlink])
def test_a_file_that_is_changed_meanwhile_is_refused(
    change: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, files = loaded(saved(tmp_path, depth=1))
    checked = compile_module._checked_sources

    def written(*given: Any) -> Any:
        found = checked(*given)
        change(files.weights[-1])
        return found

    monkeypatch.setattr(compile_module, "_checked_sources", written)
    with pytest.raises(ValueError, match="was written or removed while it was loaded; start again"):
        compile_program(model, OPTIONS, owns_weights=True, files=files)


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    """Of a layer that is not compiled itself."""
    folder = saved(tmp_path)
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        if "model.layers.6.mlp.up_proj.weight" in tensors:
            tensors["model.layers.6.mlp.up_proj.weight"][30, 3] = torch.nan
            save_file(tensors, shard, metadata={"format": "pt"})
    model, files = loaded(folder)
    with pytest.raises(NotFinite, match=r"'model\.layers\.6\.mlp\.up_proj\.weight' of LlamaForCausalLM holds NaN"):
        compile_program(model, OPTIONS, owns_weights=True, files=files)
