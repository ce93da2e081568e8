"""Quantized checkpoints of every format that is read, written here from a float one, number by number.

``quantize_folder`` rewrites a folder of ``save_pretrained`` in place. It returns the dense weights that the stored
numbers mean, computed from the numbers before they are packed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from stored_matrices import (
    Range,
    Tensors,
    awq,
    bytes_of_one_scale,
    e4m3,
    gptq,
    mxfp4,
    mxfp4_blocks,
    mxfp8,
    nvfp4,
    of_bytes,
    packed,
    slim,
    slim_static,
    slim_w4a8,
    static_bytes,
)
from torch import nn
from transformers import AutoModelForCausalLM

from tiny_models import build_tiny_model

_STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}
_ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def _ct(kind: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


@dataclass(frozen=True)
class Format:
    """A way to store a matrix.

    Attributes:
        store: its tensors by the last part of their names, and what they mean.
        config: the config's ``quantization_config``.
        of_experts: the matrices are parameters of experts, not weights of linear layers.
        description: kind of a weight in msModelSlim's file; "" without such a file.
        kernel: the CPU's kernel reads it as it is.
        experts: name of the format of the matrices of experts, where that is another one.
        calibrated: it has scales of inputs, for which ``store`` is given the smallest and the largest of them.
        group_size: that msModelSlim's file states; 0 for none.
        version: likewise; "" for none.
    """

    store: Callable[..., tuple[Tensors, torch.Tensor]]
    config: dict[str, Any] = field(default_factory=dict)
    of_experts: bool = False
    description: str = ""
    kernel: bool = True
    experts: str = ""
    calibrated: bool = False
    group_size: int = 0
    version: str = "1.0.0"


def _slim_in_groups(size: int) -> Format:
    return Format(lambda w: slim_w4a8(w, size), description="W4A8_DYNAMIC", group_size=size)


_GPTQ = {"quant_method": "gptq", "sym": False, "checkpoint_format": "gptq", "desc_act": False}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}

QUICK = ("ct-w4a16-row", "gptq-4-order", "fp8-blocks", "mxfp4-experts", "slim-w8a8-static")
"""Formats that differ in how they are served, not in how they are read alone."""

FORMATS: dict[str, Format] = {
    "gptq-4-g32": Format(lambda w: gptq(w, 4, 32, "gptq", symmetric=False), {**_GPTQ, "bits": 4, "group_size": 32}),
    "gptq-4-row-sym": Format(lambda w: gptq(w, 4, 0, "gptq"), {**_GPTQ, "bits": 4, "group_size": -1, "sym": True}),
    "gptq-4-order": Format(
        lambda w: gptq(w, 4, 32, "gptq", symmetric=False, shuffled=True),
        {**_GPTQ, "bits": 4, "group_size": 32, "desc_act": True},
    ),
    "gptq-v2-8": Format(
        lambda w: gptq(w, 8, 32, "gptq_v2", symmetric=False),
        {**_GPTQ, "bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-3": Format(
        lambda w: gptq(w, 3, 32, "gptq", symmetric=False),
        {**_GPTQ, "bits": 3, "group_size": 32, "meta": {"quantizer": ["gptqmodel:7.0.0"]}},
    ),
    "gptq-2": Format(lambda w: gptq(w, 2, 32, "gptq", symmetric=False), {**_GPTQ, "bits": 2, "group_size": 32}),
    "awq": Format(
        lambda w: awq(w, 32, symmetric=False),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    ),
    "autoround-gptq": Format(
        lambda w: gptq(w, 4, 32, "gptq"),
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"},
    ),
    "autoround-awq": Format(
        lambda w: awq(w, 32, symmetric=False),
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_awq"},
    ),
    "ct-w4a16": Format(
        lambda w: packed(w, 4, 32), _ct("pack-quantized", num_bits=4, type="int", symmetric=True, group_size=32)
    ),
    "ct-w4a16-row": Format(
        lambda w: packed(w, 4, 0), _ct("pack-quantized", num_bits=4, type="int", strategy="channel")
    ),
    "ct-w4a16-order": Format(
        lambda w: packed(w, 4, 32, shuffled=True),
        _ct("pack-quantized", num_bits=4, type="int", symmetric=True, group_size=32, actorder="group"),
    ),
    "ct-w4a16-asym": Format(
        lambda w: packed(w, 4, 32, symmetric=False),
        _ct("pack-quantized", num_bits=4, type="int", symmetric=False, group_size=32),
    ),
    "ct-w8a16-asym": Format(
        lambda w: packed(w, 8, 32, symmetric=False),
        _ct("pack-quantized", num_bits=8, type="int", symmetric=False, group_size=32),
    ),
    "ct-w8a8": Format(lambda w: of_bytes(w), _ct("int-quantized", num_bits=8, type="int", strategy="channel")),
    "ct-w8a8-naive": Format(
        lambda w: of_bytes(w), _ct("naive-quantized", num_bits=8, type="int", strategy="channel")
    ),
    "ct-w8a8-tensor": Format(bytes_of_one_scale, _ct("int-quantized", num_bits=8, type="int", strategy="tensor")),
    "ct-w8a8-g32": Format(
        lambda w: of_bytes(w, 32),
        _ct("int-quantized", _ROWS, num_bits=8, type="int", strategy="group", group_size=32),
    ),
    "ct-w8a8-dynamic": Format(
        lambda w: of_bytes(w), _ct("int-quantized", _ROWS, num_bits=8, type="int", strategy="channel")
    ),
    "ct-w8a8-dynamic-asym": Format(
        lambda w: of_bytes(w, symmetric=False),
        _ct("int-quantized", _ROWS, num_bits=8, type="int", strategy="channel", symmetric=False),
    ),
    "ct-w8a8-static": Format(
        lambda w, x: static_bytes(w, x, True),
        _ct("int-quantized", _STATIC, num_bits=8, type="int", strategy="channel"),
        calibrated=True,
    ),
    "ct-w8a8-static-asym": Format(
        lambda w, x: static_bytes(w, x, False),
        _ct("int-quantized", {**_STATIC, "symmetric": False}, num_bits=8, type="int", strategy="channel"),
        calibrated=True,
    ),
    "ct-fp8": Format(
        lambda w: e4m3(w, 1, 0, torch.bfloat16, "weight_scale"),
        _ct("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "ct-fp8-tensor": Format(
        lambda w: e4m3(w, 0, 0, torch.bfloat16, "weight_scale"),
        _ct("float-quantized", num_bits=8, type="float", strategy="tensor"),
    ),
    "ct-fp8-blocks": Format(
        lambda w: e4m3(w, 32, 32, torch.bfloat16, "weight_scale"),
        _ct("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[32, 32]),
    ),
    "ct-mxfp8": Format(mxfp8, _ct("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32)),
    "ct-nvfp4": Format(nvfp4, _ct("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16)),
    "ct-mxfp4": Format(mxfp4, _ct("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32)),
    "fp8-blocks": Format(lambda w: e4m3(w, 32, 32, torch.float32, "weight_scale_inv"), _FP8),
    "fp8-uneven": Format(
        lambda w: e4m3(w, 40, 24, torch.float32, "weight_scale_inv"),
        {**_FP8, "weight_block_size": [40, 24]},
        kernel=False,
    ),
    "mxfp4-experts": Format(mxfp4_blocks, {"quant_method": "mxfp4"}, of_experts=True),
    "slim-w8a8-dynamic": Format(slim, description="W8A8_DYNAMIC"),
    "slim-w8a16": Format(slim, description="W8A16"),
    "slim-w8a8-static": Format(slim_static, description="W8A8", calibrated=True, experts="slim-w8a8-dynamic"),
    "slim-w8a8-static-bits": Format(lambda w, x: slim_static(w, x, True), description="W8A8", calibrated=True),
    "slim-w4a8": Format(slim_w4a8, description="W4A8_DYNAMIC"),
    "slim-w4a8-experts": Format(slim, description="W8A8_DYNAMIC", experts="slim-w4a8"),
    "slim-w4a8-g32": _slim_in_groups(32),
    "slim-w4a8-g32-plain": replace(_slim_in_groups(32), store=lambda w: slim_w4a8(w, 32, plain=True), version=""),
}

LARGE: dict[str, Format] = {
    **{f"slim-w4a8-g{size}": _slim_in_groups(size) for size in (128, 256)},
    "ct-w8a8-groups": Format(
        lambda w: of_bytes(w, 64),
        _ct("int-quantized", _ROWS, num_bits=8, type="int", strategy="group", group_size=64),
    ),
}
"""Formats of models whose layers have as many inputs as a group, or a multiple."""


def write_beside_dense(folder: Path, name: str, model_type: str) -> Path:
    """A tiny checkpoint in the format of that name, with ``dense`` in it, a float one of what its weights mean."""
    build_tiny_model(model_type).save_pretrained(folder)
    shutil.copytree(folder, folder / "dense")
    write_means(folder / "dense", quantize_folder(folder, name))
    return folder


def write_means(folder: Path, means: Tensors) -> None:
    """Let a float checkpoint hold, in float32, what the quantized one means that was made from it."""
    state = load_file(folder / "model.safetensors")
    assert means.keys() <= state.keys()
    state = {key: means.get(key, tensor).float().contiguous() for key, tensor in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def quantize_folder(folder: Path, name: str, tokens: torch.Tensor | None = None) -> Tensors:
    """Rewrite a float checkpoint in the format of that name.

    Args:
        folder: the checkpoint's.
        name: of ``FORMATS`` or ``LARGE``.
        tokens: int64 ``[N, L]``, of which formats with scales of inputs see these; None: random ones.

    Returns:
        the weights that it means, float32, by the names of the float checkpoint.
    """
    form = (FORMATS | LARGE)[name]
    tensors = load_file(folder / "model.safetensors")
    ranges = _ranges_of_inputs(folder, tokens) if form.calibrated else {}
    stored: Tensors = {}
    dense: Tensors = {}
    kinds = {}
    for key, tensor in tensors.items():
        owner, _, leaf = key.rpartition(".")
        if not _is_quantized(form, owner, leaf, tensor):
            stored[key] = tensor
            kinds[key] = "FLOAT"
            continue
        own = FORMATS[form.experts] if form.experts and ".experts." in key else form
        more = (ranges[owner],) if own.calibrated else ()
        parts, dense[key] = own.store(tensor.float(), *more)
        prefix = key if form.of_experts else f"{owner}."
        stored |= {f"{prefix}{part}": value.contiguous() for part, value in parts.items()}
        kinds |= {f"{prefix}{part}": own.description for part in parts}
    assert dense
    if form.description:
        (folder / "model.safetensors").unlink()
        save_file(stored, folder / "quant_model_weights.safetensors", metadata={"format": "pt"})
        description = {"model_quant_type": form.description, **kinds}
        if form.version:
            description["version"] = form.version
        if form.group_size:
            description["group_size"] = form.group_size
        (folder / "quant_model_description.json").write_text(json.dumps(description))
    else:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    return dense


def _ranges_of_inputs(folder: Path, tokens: torch.Tensor | None) -> dict[str, Range]:
    """The smallest and the largest input of each linear layer of a float model over tokens, and 0."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ranges: dict[str, Range] = {}

    def watch(name: str) -> Callable[..., None]:
        def note(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            low, high = ranges.get(name, (0.0, 0.0))
            ranges[name] = min(low, float(given[0].min())), max(high, float(given[0].max()))

        return note

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(watch(name))
    if tokens is None:
        tokens = torch.randint(model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(tokens)
    return ranges


def _is_quantized(form: Format, owner: str, leaf: str, tensor: torch.Tensor) -> bool:
    if form.of_experts:
        return tensor.dim() == 3
    skipped = ("embed", "lm_head", "wte", "mlp.gate", "router")
    return (
        leaf == "weight"
        and tensor.dim() == 2
        and not any(owner.endswith(part) or part in owner[-12:] for part in skipped)
    )
