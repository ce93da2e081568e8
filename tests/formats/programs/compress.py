"""Compresses the linear layers of a float checkpoint with compressed-tensors' own functions, and decompresses them.

    python compress.py FLOAT_FOLDER OUT_FOLDER FORMAT

``OUT_FOLDER`` gets ``model.safetensors`` and ``config.json`` as the library says them, and ``dense.safetensors``,
what its decompression makes of the former. Weights are rounded to nearest with the scales that the library computes.
``FORMAT`` ``read``: decompress the checkpoint in ``FLOAT_FOLDER`` instead, by its config.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

INT = {"type": "int", "symmetric": True}
FLOAT = {"type": "float", "symmetric": True}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "w4a16-g32": ("pack-quantized", {**INT, "num_bits": 4, "strategy": "group", "group_size": 32}),
    "w4a16-channel": ("pack-quantized", {**INT, "num_bits": 4, "strategy": "channel"}),
    "w4a16-asym": (
        "pack-quantized",
        {**INT, "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "w8a16-g32": ("pack-quantized", {**INT, "num_bits": 8, "strategy": "group", "group_size": 32}),
    "w8a16-asym": (
        "pack-quantized",
        {**INT, "num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int8-channel": ("int-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
    "int8-tensor": ("int-quantized", {**INT, "num_bits": 8, "strategy": "tensor"}),
    "naive-int8": ("naive-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
    "fp8-channel": ("float-quantized", {**FLOAT, "num_bits": 8, "strategy": "channel"}),
    "fp8-tensor": ("float-quantized", {**FLOAT, "num_bits": 8, "strategy": "tensor"}),
    "fp8-block": ("float-quantized", {**FLOAT, "num_bits": 8, "strategy": "block", "block_structure": [32, 32]}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            **FLOAT,
            "num_bits": 4,
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": "torch.float8_e4m3fn",
            "zp_dtype": "torch.float8_e4m3fn",
        },
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {
            **FLOAT,
            "num_bits": 4,
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": "torch.uint8",
            "zp_dtype": "torch.uint8",
        },
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {
            **FLOAT,
            "num_bits": 8,
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": "torch.uint8",
            "zp_dtype": "torch.uint8",
        },
    ),
    "w3a16": ("pack-quantized", {**INT, "num_bits": 3, "strategy": "group", "group_size": 32}),
}


def extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and largest number of each set that shares a scale, in the shape of the scales."""
    if args.strategy == "tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    if args.strategy == "block":
        high, wide = args.block_structure
        blocks = weight.unflatten(0, (-1, high)).unflatten(2, (-1, wide))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
    return groups.amin(-1), groups.amax(-1)


def compressed(weight: torch.Tensor, scheme: QuantizationScheme, form: str) -> dict[str, torch.Tensor]:
    args = scheme.weights
    low, high = extremes(weight, args)
    whole = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1)) if form.startswith("nvfp4") else None
    scale, zero = calculate_qparams(low, high, args, global_scale=whole)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    if whole is not None:
        state["weight_global_scale"] = whole
    return BaseCompressor.get_value_from_registry(form).compress(state, scheme)


def is_linear(key: str, tensor: torch.Tensor) -> bool:
    return key.endswith("_proj.weight") and tensor.dim() == 2


def write(source: Path, out: Path, name: str) -> None:
    form, given = FORMATS[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=given, format=form)
    stored: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        if not is_linear(key, tensor):
            stored[key] = tensor
            continue
        owner = key.removesuffix(".weight")
        stored |= {f"{owner}.{leaf}": part for leaf, part in compressed(tensor, scheme, form).items()}
    out.mkdir(parents=True)
    save_file(
        {key: tensor.contiguous() for key, tensor in stored.items()}, out / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
    }
    (out / "config.json").write_text(json.dumps(config))
    read(out, out)


def read(folder: Path, out: Path) -> None:
    """Write what the library decompresses, by the folder's own config."""
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**said["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(said["format"])
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        for key, tensor in load_file(file).items():
            owner, _, leaf = key.rpartition(".")
            modules.setdefault(owner, {})[leaf] = tensor
    dense = {
        f"{owner}.weight": compressor.decompress(parts, scheme)["weight"].contiguous()
        for owner, parts in modules.items()
        if "weight_scale" in parts
    }
    save_file(dense, out / "dense.safetensors")


if __name__ == "__main__":
    source, out, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if name == "read":
        out.mkdir(parents=True, exist_ok=True)
        read(source, out)
    else:
        shutil.rmtree(out, ignore_errors=True)
        write(source, out, name)
