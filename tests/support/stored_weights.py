"""Random weights in any format that checkpoints store."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from torch_pagoda.runtime.ops.linear.quantized_weight import pack_stored, scheme_of, unpackable
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight
from torch_pagoda.runtime.ops.linear.weight_format import WeightFormat


def stored_weight(text: str, outputs: int = 6, inputs: int = 64, *, seed: int = 0) -> StoredWeight:
    """Random codes in a format, ``[outputs, inputs]`` bfloat16."""
    form = WeightFormat.parse(text)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs // form.per_byte), generator=generator, dtype=torch.uint8)
    if form.code == "e4m3":
        codes[codes & 127 == 127] = 0
    groups = form.num_groups(inputs)
    scales = torch.rand(outputs, groups, generator=generator).add(0.5)
    zeros = torch.randint(0, 1 << form.bits, (outputs, groups), generator=generator, dtype=torch.uint8)
    if form.code == "affine":
        zeros = torch.randn(outputs, groups, generator=generator)
    order = torch.randperm(inputs, generator=generator).to(torch.int32)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[form.scale]
    return StoredWeight(
        form,
        codes,
        scales.to(dtype),
        None if form.zero_dtype is None else zeros,
        order if form.ordered else None,
        dtype=torch.bfloat16,
    )


def packed_weight(text: str, outputs: int, inputs: int) -> tuple[StoredWeight, torch.Tensor, tuple[object, ...]]:
    """One in float32, packed, and what ``quantized_linear`` takes behind the bias to multiply with it."""
    weight = stored_weight(text, outputs, inputs).to(torch.float32)
    assert isinstance(weight, StoredWeight) and not unpackable(weight.form)
    return weight, pack_stored(weight), (outputs, *scheme_of(weight.form).arguments(weight.order))


def product_error(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """The largest error of ``x @ weight.T``, relative to its largest number."""
    expected = F.linear(x.double(), weight.double())
    return float((found.double() - expected).abs().max() / expected.abs().max())
