"""Writes a model calibrated for 4 bits as a compressed-tensors checkpoint (``pack-quantized``, W4A16).

The layout is the one that ``readers/compressed_tensors.py`` and vLLM read: for each linear layer ``weight_packed``
int32 ``[out, in / 8]``, eight numbers from -8 to 7 in a word, each increased by 8, the first in the lowest four bits;
``weight_scale`` ``[out, groups]`` in the model's dtype; ``weight_shape`` int64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ..compiler.calibrate.decoder_layers import decoder_layers
from ..compiler.calibrate.grid import GridWeight
from .readers.parts import pack_pairs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT = "compressed-tensors"
_BITS = 4
_PER_WORD = 32 // _BITS


def check_writable(model: PreTrainedModel, group_size: int) -> None:
    """Check that the format can store a model, before calibration starts.

    Raises:
        ValueError: a decoder layer has a weight matrix outside ``nn.Linear``, or a number of inputs that is not a
            multiple of the group size or of a word's entries.
    """
    for index, layer in enumerate(decoder_layers(model)):
        for name, module in layer.named_modules():
            stacked = [key for key, parameter in module.named_parameters(recurse=False) if parameter.dim() > 2]
            if stacked or type(module).__name__ == "Conv1D":
                raise ValueError(
                    f"--format {FORMAT} stores only Linear weights, but {name or 'it'!r} in layer {index} of "
                    f"{type(model).__name__} is a {type(module).__name__}; leave --format out"
                )
            if isinstance(module, nn.Linear) and module.in_features % (group_size or _PER_WORD):
                raise ValueError(
                    f"--format {FORMAT}: {name!r} in layer {index} has {module.in_features} inputs, which are not a "
                    f"multiple of --group-size {group_size}; use another group size, or 0 for one scale per output"
                )


def write_compressed(model: PreTrainedModel, out: Path, weights: Mapping[str, GridWeight]) -> None:
    """Write a model whose weight matrices are on a grid.

    Args:
        model: model with the same matrices as ``weights``.
        out: folder to write.
        weights: weights by qualified module name; the model's dtype represents their scales exactly.

    Raises:
        ValueError: transformers saves one of the weights under another name.
    """
    model.save_pretrained(out)
    index_file = out / "model.safetensors.index.json"
    files = sorted(out.glob("*.safetensors"))
    left, floats, places, total = set(weights), set[str](), dict[str, str](), 0
    for file in files:
        stored: dict[str, torch.Tensor] = {}
        for key, tensor in load_file(file).items():
            module = key.removesuffix(".weight")
            if module in weights:
                left.discard(module)
                stored |= {f"{module}.{leaf}": part for leaf, part in packed(weights[module], tensor.dtype).items()}
                continue
            stored[key] = tensor
            if tensor.dim() == 2 and module != key:
                floats.add(module)
        save_file(stored, file, metadata={"format": "pt"})
        places |= dict.fromkeys(stored, file.name)
        total += sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    if left:
        raise ValueError(
            f"--format {FORMAT}: transformers saves {min(left) + '.weight'!r} under another name; leave --format out"
        )
    if index_file.exists():
        index_file.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n")
    size = next(iter(weights.values())).group_size
    per_row = all(weight.scales.shape[1] == 1 for weight in weights.values())
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config(0 if per_row else size, sorted(floats | {"lm_head"}))
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def packed(weight: GridWeight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of a matrix by the last part of their names.

    Args:
        weight: the matrix.
        dtype: dtype of its scales.
    """
    codes = pack_pairs((weight.whole + 8).to(torch.uint8)).contiguous()
    return {
        "weight_packed": codes.view(torch.int32),
        "weight_scale": weight.scales.to(dtype).contiguous(),
        "weight_shape": torch.tensor(weight.whole.shape, dtype=torch.int64),
    }


def quantization_config(group_size: int, ignore: list[str]) -> dict[str, Any]:
    """Return the entry for config.json; a ``group_size`` of 0 means one scale per output."""
    weights = {
        "num_bits": _BITS,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if group_size else "channel",
        "group_size": group_size or None,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": FORMAT,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }
