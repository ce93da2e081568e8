"""Stored weights are laid out some panels at a time, as if all at once."""

from __future__ import annotations

import pytest
import torch
from stored_weights import stored_weight

from torch_pagoda.compiler.link import linker
from torch_pagoda.runtime.ops.linear.quantized_weight import pack_stored

FORMATS = ("int4/g32/f16+z", "int4/row/bf16", "int8/g64/f32+z+order", "e2m1/g32/bf16", "e4m3/g64/f32")


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("outputs", [5, 64, 200])
def test_panels_are_the_same_some_at_a_time(text: str, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = stored_weight(text, outputs=outputs, inputs=192)
    monkeypatch.setattr(linker, "_PACKED_AT_ONCE", 64 * 192)
    assert torch.equal(linker._packed_by_rows(weight), pack_stored(weight))
