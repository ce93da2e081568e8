"""Rows of one weight that are packed without being merged are each compared with what they were."""

from __future__ import annotations

import pytest
import torch

from torch_pagoda.compiler.link.packed_rows import check_rows, pack_rows
from torch_pagoda.passes import UnsupportedModel
from torch_pagoda.passes.graph.notes import PackedWeight
from torch_pagoda.runtime.ops.linear.quantized_weight import Quantization


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_wrong_rows_are_refused_wherever_they_are(wrong: int) -> None:
    noted = PackedWeight("qkv", ("q", "k", "v"), Quantization(4, 64, 16))
    rows = list(torch.randn(200, 128, generator=torch.Generator().manual_seed(0)).split((128, 64, 8)))
    check_rows(rows, pack_rows(rows, noted), noted)
    others = [rows.flip(0) if i == wrong else rows for i, rows in enumerate(rows)]
    with pytest.raises(UnsupportedModel, match="entries of the weight 'qkv' are wrong after quantization to 4 bits"):
        check_rows(rows, pack_rows(others, noted), noted)
