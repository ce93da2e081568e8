"""Quantised checkpoints of every format that is read, written here from a float one, number by number.

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
from torch import nn
from transformers import AutoModelForCausalLM

from tiny_models import build_tiny_model

Tensors = dict[str, torch.Tensor]
Range = tuple[float, float]
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of the eight outputs of a word, the one in each of its places."""


@dataclass(frozen=True)
class Numbers:
    """A matrix in whole numbers: ``(codes - zeros) * scales`` of each group.

    Attributes:
        codes: int64 ``[out, in]``, unsigned.
        scales: ``[out, groups]``.
        zeros: int64 ``[out, groups]``.
        group: int64 ``[in]``, of each input.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group: torch.Tensor

    @property
    def dense(self) -> torch.Tensor:
        """float32 ``[out, in]``."""
        return (self.codes - self.zeros[:, self.group]).float() * self.scales.float()[:, self.group]


def numbers_of(
    weight: torch.Tensor,
    bits: int,
    size: int,
    *,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float16,
    shuffled: bool = False,
) -> Numbers:
    """A matrix rounded to nearest; with ``shuffled`` the groups hold inputs from all over."""
    outputs, inputs = weight.shape
    size = size or inputs
    group = torch.arange(inputs) // size
    if shuffled:
        group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    groups, top = int(group.max()) + 1, (1 << bits) - 1
    codes = torch.zeros(outputs, inputs, dtype=torch.int64)
    scales = torch.zeros(outputs, groups, dtype=dtype)
    zeros = torch.full((outputs, groups), 1 << (bits - 1))
    for g in range(groups):
        part = weight[:, group == g].float()
        if symmetric:
            scales[:, g] = (part.abs().amax(1) / (top / 2)).to(dtype)
        else:
            low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scales[:, g] = ((high - low) / top).to(dtype)
            zeros[:, g] = (-low / scales[:, g].float()).round().clamp(1, top).long()
        rounded = (part / scales[:, g : g + 1].float()).round().long() + zeros[:, g : g + 1]
        codes[:, group == g] = rounded.clamp(0, top)
    return Numbers(codes, scales, zeros, group)


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers along the last dim as one stream of bits in int32, padded at its end."""
    *lead, count = numbers.shape
    flat = numbers.reshape(-1, count).tolist()
    width = -(-count * bits // 32)
    rows = []
    for row in flat:
        stream = sum(number << (bits * i) for i, number in enumerate(row))
        rows.append([(stream >> (32 * i)) & 0xFFFFFFFF for i in range(width)])
    unsigned = torch.tensor(rows, dtype=torch.int64)
    return torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).to(torch.int32).view(*lead, width)


def _gptq(weight: torch.Tensor, bits: int, size: int, version: str, **how: Any) -> tuple[Tensors, torch.Tensor]:
    found = numbers_of(weight, bits, size, **how)
    stored = found.zeros - int(version == "gptq")
    return {
        "qweight": words(found.codes, bits).T.contiguous(),
        "qzeros": words(stored.T, bits),
        "scales": found.scales.T.contiguous(),
        "g_idx": found.group.to(torch.int32),
    }, found.dense


def _awq(weight: torch.Tensor, size: int, **how: Any) -> tuple[Tensors, torch.Tensor]:
    found = numbers_of(weight, 4, size, **how)

    def packed(numbers: torch.Tensor) -> torch.Tensor:
        return words(numbers.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2), 4)

    return {
        "qweight": packed(found.codes.T),
        "qzeros": packed(found.zeros.T),
        "scales": found.scales.T.contiguous(),
    }, found.dense


def _packed(weight: torch.Tensor, bits: int, size: int, **how: Any) -> tuple[Tensors, torch.Tensor]:
    found = numbers_of(weight, bits, size, dtype=torch.bfloat16, **how)
    tensors = {
        "weight_packed": words(found.codes, bits),
        "weight_scale": found.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not how.get("symmetric", True):
        tensors["weight_zero_point"] = words(found.zeros.T, bits).T.contiguous()
    return tensors, found.dense


def _bytes(weight: torch.Tensor, size: int = 0) -> tuple[Tensors, torch.Tensor]:
    found = numbers_of(weight, 8, size, dtype=torch.float32)
    return {"weight": (found.codes - 128).to(torch.int8), "weight_scale": found.scales}, found.dense


def _slim(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, dense = _bytes(weight)
    return {**tensors, "weight_offset": torch.zeros(len(weight), 1)}, dense


def _slim_w4a8(weight: torch.Tensor, size: int = 0, plain: bool = False) -> tuple[Tensors, torch.Tensor]:
    """Two outputs in a byte; the sums of the weights, of what has more inputs than outputs in 16 parts of them; in
    groups of ``size`` a factor of the output's scale for each. With ``plain`` a byte for a number, and no sums."""
    found = numbers_of(weight, 4, size, dtype=torch.bfloat16 if size else torch.float32)
    tensors = {"weight_scale": found.scales, "weight_offset": torch.zeros(len(weight), 1)}
    if size:  # exact products: a chip takes 19 bits of them
        of_output = found.scales.float().amax(1, keepdim=True).log2().floor().exp2() / 16
        second = found.scales.float() / of_output
        found = replace(found, scales=of_output * second)
        tensors |= {"weight_scale": of_output, "weight_scale_second": second}
        tensors["weight_offset_second"] = torch.zeros_like(second)
    numbers = (found.codes - 8).to(torch.int8)
    if plain:
        return {"weight": numbers, **tensors}, found.dense
    parts = 16 if weight.shape[1] > weight.shape[0] else 1
    tensors["scale_bias"] = 8 * found.dense.unflatten(1, (parts, -1)).sum(-1)
    return {"weight": (numbers[::2] & 15) + 16 * numbers[1::2], **tensors}, found.dense


def _static(weight: torch.Tensor, inputs: Range, bits_of_scale: bool = False) -> tuple[Tensors, torch.Tensor]:
    """Inputs between the numbers that they were seen to be, their scale a bfloat16, as of models in it:
    ``quant_bias`` is there for their offset."""
    tensors, _ = _bytes(weight)
    codes, (low, high) = tensors["weight"], inputs
    step = torch.tensor([(high - low) / 255]).bfloat16().float()
    offset = (-128 - low / step).round()
    unit = (tensors["weight_scale"][:, 0] * step).float()
    whole = -offset.long() * codes.long().sum(1)
    return {
        "weight": codes,
        "weight_scale": tensors["weight_scale"],
        "weight_offset": torch.zeros_like(tensors["weight_scale"]),
        "input_scale": step,
        "input_offset": offset,
        "deq_scale": unit.view(torch.int32).long() if bits_of_scale else unit,
        "quant_bias": whole.to(torch.int32),
    }, codes.float() * (unit / step)[:, None]


def _static_bytes(weight: torch.Tensor, inputs: Range, symmetric: bool) -> tuple[Tensors, torch.Tensor]:
    """Of compressed-tensors, whose offset is the number that stands for zero."""
    tensors, dense = _bytes(weight)
    low, high = inputs
    step = torch.tensor([max(-low, high) / 127.5 if symmetric else (high - low) / 255])
    found = {"input_scale": step}
    if not symmetric:
        found["input_zero_point"] = (-128 - low / step).round().to(torch.int8)
    return tensors | found, dense


def _e4m3(weight: torch.Tensor, high: int, wide: int, dtype: torch.dtype, leaf: str) -> tuple[Tensors, torch.Tensor]:
    """With a scale for each block; 0 outputs or inputs mean all, 1 output each."""
    outputs, inputs = weight.shape
    high, wide = high or outputs, wide or inputs
    rows, columns = torch.arange(outputs) // high, torch.arange(inputs) // wide
    grid = torch.zeros(int(rows.max()) + 1, int(columns.max()) + 1)
    for r in range(grid.shape[0]):
        for c in range(grid.shape[1]):
            grid[r, c] = weight[rows == r][:, columns == c].abs().max() / 448
    grid = grid.to(dtype)
    spread = grid.float()[rows][:, columns]
    codes = (weight.float() / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, leaf: grid}, codes.float() * spread


def _e2m1(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes int64 ``[*, in]``, scales float32 ``[*, groups]`` that are powers of two, and what they mean."""
    parts = weight.float().unflatten(-1, (-1, size))
    exponents = (parts.abs().amax(-1) / 6).clamp_min(2.0**-40).log2().ceil()
    scales = torch.exp2(exponents)
    codes = (parts / scales[..., None])[..., None].sub(E2M1).abs().argmin(-1)
    return codes.flatten(-2), scales, (E2M1[codes] * scales[..., None]).flatten(-2)


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def _nvfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    size = 16
    whole = torch.tensor([64.0])
    parts = weight.float().unflatten(-1, (-1, size))
    scales = (parts.abs().amax(-1) / 6 * whole).clamp(2**-6, 448).to(torch.float8_e4m3fn)
    unit = scales.float() / whole
    codes = (parts / unit[..., None])[..., None].sub(E2M1).abs().argmin(-1)
    tensors = {"weight_packed": _pairs(codes.flatten(-2)), "weight_scale": scales, "weight_global_scale": whole}
    return tensors, (E2M1[codes] * unit[..., None]).flatten(-2)


def _mx(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, dense = _e2m1(weight, 32)
    return {"weight_packed": _pairs(codes), "weight_scale": (scales.log2() + 127).to(torch.uint8)}, dense


def _blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Of experts ``[experts, in, out]``, whose blocks lie along the inputs."""
    codes, scales, dense = _e2m1(weight.mT, 32)
    blocks = _pairs(codes).unflatten(-1, (-1, 16))
    return {"_blocks": blocks, "_scales": (scales.log2() + 127).to(torch.uint8)}, dense.mT


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
    return Format(lambda w: _slim_w4a8(w, size), description="W4A8_DYNAMIC", group_size=size)


_GPTQ = {"quant_method": "gptq", "sym": False, "checkpoint_format": "gptq", "desc_act": False}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}

QUICK = ("ct-w4a16-row", "gptq-4-order", "fp8-blocks", "mxfp4-experts", "slim-w8a8-static")
"""Formats that differ in how they are served, not in how they are read alone."""

FORMATS: dict[str, Format] = {
    "gptq-4-g32": Format(lambda w: _gptq(w, 4, 32, "gptq", symmetric=False), {**_GPTQ, "bits": 4, "group_size": 32}),
    "gptq-4-row-sym": Format(lambda w: _gptq(w, 4, 0, "gptq"), {**_GPTQ, "bits": 4, "group_size": -1, "sym": True}),
    "gptq-4-order": Format(
        lambda w: _gptq(w, 4, 32, "gptq", symmetric=False, shuffled=True),
        {**_GPTQ, "bits": 4, "group_size": 32, "desc_act": True},
    ),
    "gptq-v2-8": Format(
        lambda w: _gptq(w, 8, 32, "gptq_v2", symmetric=False),
        {**_GPTQ, "bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-3": Format(lambda w: _gptq(w, 3, 32, "gptq", symmetric=False), {**_GPTQ, "bits": 3, "group_size": 32}),
    "gptq-2": Format(lambda w: _gptq(w, 2, 32, "gptq", symmetric=False), {**_GPTQ, "bits": 2, "group_size": 32}),
    "awq": Format(
        lambda w: _awq(w, 32, symmetric=False),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    ),
    "autoround-gptq": Format(
        lambda w: _gptq(w, 4, 32, "gptq"),
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"},
    ),
    "autoround-awq": Format(
        lambda w: _awq(w, 32, symmetric=False),
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_awq"},
    ),
    "ct-w4a16": Format(
        lambda w: _packed(w, 4, 32), _ct("pack-quantized", num_bits=4, type="int", symmetric=True, group_size=32)
    ),
    "ct-w4a16-row": Format(
        lambda w: _packed(w, 4, 0), _ct("pack-quantized", num_bits=4, type="int", strategy="channel")
    ),
    "ct-w4a16-asym": Format(
        lambda w: _packed(w, 4, 32, symmetric=False),
        _ct("pack-quantized", num_bits=4, type="int", symmetric=False, group_size=32),
    ),
    "ct-w8a16-asym": Format(
        lambda w: _packed(w, 8, 32, symmetric=False),
        _ct("pack-quantized", num_bits=8, type="int", symmetric=False, group_size=32),
    ),
    "ct-w8a8": Format(lambda w: _bytes(w), _ct("int-quantized", num_bits=8, type="int", strategy="channel")),
    "ct-w8a8-dynamic": Format(
        lambda w: _bytes(w), _ct("int-quantized", _ROWS, num_bits=8, type="int", strategy="channel")
    ),
    "ct-w8a8-static": Format(
        lambda w, x: _static_bytes(w, x, True),
        _ct("int-quantized", _STATIC, num_bits=8, type="int", strategy="channel"),
        calibrated=True,
    ),
    "ct-w8a8-static-asym": Format(
        lambda w, x: _static_bytes(w, x, False),
        _ct("int-quantized", {**_STATIC, "symmetric": False}, num_bits=8, type="int", strategy="channel"),
        calibrated=True,
    ),
    "ct-fp8": Format(
        lambda w: _e4m3(w, 1, 0, torch.bfloat16, "weight_scale"),
        _ct("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "ct-nvfp4": Format(_nvfp4, _ct("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16)),
    "ct-mxfp4": Format(_mx, _ct("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32)),
    "fp8-blocks": Format(lambda w: _e4m3(w, 32, 32, torch.float32, "weight_scale_inv"), _FP8),
    "fp8-uneven": Format(
        lambda w: _e4m3(w, 40, 24, torch.float32, "weight_scale_inv"),
        {**_FP8, "weight_block_size": [40, 24]},
        kernel=False,
    ),
    "mxfp4-experts": Format(_blocks, {"quant_method": "mxfp4"}, of_experts=True),
    "slim-w8a8-dynamic": Format(_slim, description="W8A8_DYNAMIC"),
    "slim-w8a16": Format(_slim, description="W8A16"),
    "slim-w8a8-static": Format(_static, description="W8A8", calibrated=True, experts="slim-w8a8-dynamic"),
    "slim-w8a8-static-bits": Format(lambda w, x: _static(w, x, True), description="W8A8", calibrated=True),
    "slim-w4a8": Format(_slim_w4a8, description="W4A8_DYNAMIC"),
    "slim-w4a8-experts": Format(_slim, description="W8A8_DYNAMIC", experts="slim-w4a8"),
    "slim-w4a8-g32": _slim_in_groups(32),
    "slim-w4a8-g32-plain": replace(_slim_in_groups(32), store=lambda w: _slim_w4a8(w, 32, plain=True), version=""),
}

LARGE: dict[str, Format] = {
    **{f"slim-w4a8-g{size}": _slim_in_groups(size) for size in (128, 256)},
    "ct-w8a8-groups": Format(
        lambda w: _bytes(w, 64),
        _ct("int-quantized", _ROWS, num_bits=8, type="int", strategy="group", group_size=64),
    ),
}
"""Formats of models whose layers have as many inputs as a group, or a multiple."""


def write_beside_dense(folder: Path, name: str, model_type: str) -> Path:
    """A tiny checkpoint in the format of that name, with ``dense`` in it, a float one of what its weights mean."""
    build_tiny_model(model_type).save_pretrained(folder)
    shutil.copytree(folder, folder / "dense")
    means = quantize_folder(folder, name)
    state = load_file(folder / "dense" / "model.safetensors")
    state = {key: means.get(key, tensor).float().contiguous() for key, tensor in state.items()}
    save_file(state, folder / "dense" / "model.safetensors", metadata={"format": "pt"})
    return folder


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
