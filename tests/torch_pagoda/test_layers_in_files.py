"""Layers that stay in the files: a model that is run layer by layer has its own logits, bit for bit; what cannot be
loaded so is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import quantize_folder
from safetensors.torch import load_file, save_file
from streamed_models import DEEP, left, loaded_in_part

from torch_pagoda.checkpoint import layers_in_files
from torch_pagoda.checkpoint.configs import load_config
from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler import UnsupportedModel
from torch_pagoda.compiler.capture import layer_repeat
from torch_pagoda.compiler.verify.self_check import SHORT_SCHEDULE, reference_of_model
from torch_pagoda.compiler.verify.streamed_reference import streamed_reference
from torch_pagoda.compiler.warm_start import streamed
from torch_pagoda.compiler.warm_start.graph_data import CannotStore
from torch_pagoda.compiler.warm_start.restore import Outdated
from torch_pagoda.compiler.warm_start.streamed import StreamedModel, check_streamed, place_forms, stream
from torch_pagoda.compiler.weights.tensor_contents import module_tensors
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight, as_dense

from tiny_models import build_tiny_model

UP = "model.layers.4.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fits that is not mapped, and one layer is worth to be spared."""
    monkeypatch.setattr(layers_in_files, "available_memory", lambda: 0)
    monkeypatch.setattr(layer_repeat, "LEAST_SAVED", 1)


def save(kind: str, folder: Path, **settings: Any) -> Path:
    build_tiny_model(kind, **(DEEP[kind] | settings)).save_pretrained(folder)
    return folder


def change(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """Replace tensors of a checkpoint, or leave them out."""
    state = load_file(folder / "model.safetensors") | tensors
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def whole(folder: Path, dtype: str) -> Any:
    return load_model(folder, dtype, False, torch.device("cpu"), load_config(folder, False)[1])


def check_same(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "_MOST_BYTES", 64)
    layers, files = loaded_in_part(folder, dtype)
    model, repeat = layers.repeat.model, layers.repeat
    inside = tuple(f"{repeat.path}.{index}." for index in range(repeat.kept, repeat.total))
    at_first = {name for name, tensor in module_tensors(model).items() if tensor.is_meta}
    assert at_first and all(name.startswith(inside) for name in at_first)
    found: list[int] = []
    reference = streamed_reference(layers, found.append)
    assert found == list(range(repeat.kept, repeat.total))
    own = whole(folder, dtype)
    (logits,) = reference_of_model(own, SHORT_SCHEDULE).logits
    assert torch.equal(reference.logits[0], logits)
    assert {name for name, tensor in module_tensors(model).items() if tensor.is_meta} == at_first, "all were freed"
    kept = stream(layers, files)
    check_streamed(kept, model)
    place_forms(layers, kept.sources, files)
    for name, tensor in module_tensors(own).items():
        placed = module_tensors(model)[name]
        assert (placed.shape, placed.dtype, type(placed)) == (tensor.shape, tensor.dtype, type(tensor)), name
        assert placed.is_meta or torch.equal(as_dense(placed), as_dense(tensor)), name
    assert any(tensor.is_meta for tensor in model.parameters()), "what was made is not held"


@pytest.mark.parametrize("kind", DEEP)
def test_logits_are_those_of_the_model(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_same(save(kind, tmp_path), "bfloat16", monkeypatch)


def test_merged_experts_without_another_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_same(save("qwen3_moe", tmp_path), "auto", monkeypatch)


@pytest.mark.parametrize(
    ("kind", "form"),
    [("llama", "gptq-4-order"), ("qwen3_moe", "fp8-blocks"), ("qwen3_moe", "awq"), ("gpt_oss", "mxfp4-experts")],
)
def test_quantized_weights(kind: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_folder(save(kind, tmp_path), form)
    check_same(tmp_path, "float32", monkeypatch)
    assert any(isinstance(tensor, StoredWeight) for tensor in whole(tmp_path, "float32").parameters())


def test_the_weights_of_another_layer_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, files = loaded_in_part(save("llama", tmp_path, num_hidden_layers=6), "bfloat16")
    keys = layers._keys
    monkeypatch.setattr(layers, "_keys", {**keys, 4: keys[5], 5: keys[4]})
    with pytest.raises(ValueError, match=r"lacks .* weights of LlamaForCausalLM, for example 'model.layers.4"):
        stream(layers, files)


def test_a_layer_without_its_weight_is_named(tmp_path: Path) -> None:
    layers, files = loaded_in_part(change(save("llama", tmp_path), **{UP: None}), "bfloat16")
    with pytest.raises(ValueError, match=rf"lacks 1 weights .*'{UP}'"):
        stream(layers, files)


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    layers, files = loaded_in_part(change(save("llama", tmp_path), **{UP: torch.zeros(3, 5)}), "bfloat16")
    with pytest.raises(ValueError, match=rf"'{UP}' of shape \[3, 5\]"):
        stream(layers, files)


def test_code_that_reads_another_layer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, files = loaded_in_part(save("llama", tmp_path), "bfloat16")
    kind: Any = type(layers.repeat.model.model)
    forward = kind.forward

    def crosses(self: Any, *given: Any, **named: Any) -> Any:
        found = forward(self, *given, **named)
        found.last_hidden_state = found.last_hidden_state * self.layers[4].input_layernorm.weight
        return found

    monkeypatch.setattr(kind, "forward", crosses)
    with pytest.raises(UnsupportedModel, match="with its layers loaded one by one, LlamaForCausalLM does not run"):
        stream(layers, files)


def test_weights_that_the_files_do_not_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, files = loaded_in_part(save("llama", tmp_path), "bfloat16")
    load = layers.load

    def changed(index: int) -> None:
        load(index)
        layers.repeat.model.get_parameter(UP).data.add_(1)

    monkeypatch.setattr(layers, "load", changed)
    with pytest.raises(CannotStore, match=rf"no tensor that is '{UP}'"):
        stream(layers, files)


def test_what_fits_is_loaded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path)
    assert left(tmp_path, "float32") is None, "mapped files take no memory"
    size = sum(parameter.numel() * 2 for parameter in build_tiny_model("llama", **DEEP["llama"]).parameters())
    monkeypatch.setattr(layers_in_files, "available_memory", lambda: 2 * size)
    assert left(tmp_path, "bfloat16") is None, "itself, and what the ranks hold"
    monkeypatch.setattr(layers_in_files, "available_memory", lambda: 2 * size - 1)
    assert left(tmp_path, "bfloat16") is not None
    assert left(tmp_path, "bfloat16", "it is asked for") is None, "it may not fit beside the ranks: tried"


def test_what_cannot_stay_in_the_files_is_refused(tmp_path: Path) -> None:
    save("llama", tmp_path / "few", num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"do not fit into 0.0 GiB; .*: they are few, not alike"):
        left(tmp_path / "few", "bfloat16")
    folder = save("llama", tmp_path / "deep")
    with pytest.raises(ValueError, match="one by one: it is asked for"):
        left(folder, "bfloat16", "it is asked for")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="its files are not safetensors"):
        left(folder, "bfloat16")


def test_layers_that_share_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path)
    made = layers_in_files._without_data

    def shared(*given: Any) -> Any:
        model = made(*given)
        model.model.layers[3].mlp.up_proj.weight = model.model.layers[4].mlp.up_proj.weight
        return model

    monkeypatch.setattr(layers_in_files, "_without_data", shared)
    with pytest.raises(ValueError, match=f"'{UP}' is shared by several"):
        left(tmp_path, "bfloat16")


@pytest.mark.parametrize("damage", ["ids", "dtype", "rows", "nan", "none"])
def test_logits_in_a_file_are_checked(damage: str, tmp_path: Path) -> None:
    layers, files = loaded_in_part(save("llama", tmp_path), "bfloat16")
    kept = stream(layers, files)
    reference = kept.reference
    changes: dict[str, Any] = {
        "ids": ([reference.tokens[0] + 10**6], reference.logits),
        "dtype": (reference.tokens, [rows.float() for rows in reference.logits]),
        "rows": (reference.tokens, [rows[1:] for rows in reference.logits]),
        "nan": (reference.tokens, [rows * torch.nan for rows in reference.logits]),
        "none": ([], []),
    }
    damaged = type(reference)(*changes[damage], reference.tolerance, reference.share)
    with pytest.raises(Outdated):
        check_streamed(StreamedModel(damaged, kept.sources), layers.repeat.model)


def test_sources_in_a_file_are_checked(tmp_path: Path) -> None:
    layers, files = loaded_in_part(save("llama", tmp_path), "bfloat16")
    sources = stream(layers, files).sources
    sources.weights[UP] = sources.weights["model.layers.4.self_attn.q_proj.weight"]
    with pytest.raises(Outdated, match=UP):
        place_forms(layers, sources, files)
