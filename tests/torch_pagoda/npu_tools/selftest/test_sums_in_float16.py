"""Products of int8 by 4 bits whose groups a device adds in float16: a right one passes, mistakes show."""

from __future__ import annotations

import pytest
import torch

from torch_pagoda.npu_tools.selftest.operator_check import OperatorCall, difference_of, sums_in_float16
from torch_pagoda.runtime.ops import npu  # noqa: F401  registers the operators
from torch_pagoda.runtime.ops.npu.int4 import pack_int4
from torch_pagoda.runtime.ops.npu.numerics import bits_of_float

TARGET = torch.ops.npu.npu_grouped_matmul.default
ROWS, OUTPUTS = 32, 64


def on_a_device(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, of_rows: torch.Tensor) -> torch.Tensor:
    """As the vendor's golden has it (op-plugin, test_npu_grouped_matmul.py): halves of 4 bits of each row, the groups
    of each added in float16."""
    groups = len(scale)
    halves = torch.stack([rows.int() // 16, (rows.int() & 15) - 8], 1).unflatten(2, (groups, -1))
    added = torch.zeros(ROWS, 2, OUTPUTS, dtype=torch.float16)
    for group, matrix in enumerate(weight.int().unflatten(0, (groups, -1))):
        products = (halves[:, :, group].double() @ matrix.double()).float() * scale[group]
        added = (added + products.half()).half()
    sums = 8 * (weight.float() * scale.repeat_interleave(len(weight) // groups, 0)).sum(0)
    return ((added[:, 0].float() * 16 + added[:, 1].float() + sums) * of_rows[:, None]).half()


@pytest.mark.parametrize(("inputs", "groups"), [(7168, 28), (1024, 4), (7168, 1)])
def test_a_right_device_passes(inputs: int, groups: int) -> None:
    draw = torch.Generator().manual_seed(0)
    rows, weight = (
        torch.randint(low, high, shape, generator=draw, dtype=torch.int8)
        for low, high, shape in ((-128, 128, (ROWS, inputs)), (-8, 8, (inputs, OUTPUTS)))
    )
    scale, of_rows = torch.rand(groups, OUTPUTS, generator=draw) / 500, torch.rand(ROWS, generator=draw) / 200
    sums = 8 * (weight.float() * scale.repeat_interleave(inputs // groups, 0)).sum(0)
    given = {
        "scale": [bits_of_float(scale)[None]],
        "bias": [sums[None]],
        "per_token_scale": [of_rows],
        "output_dtype": 5,
        "group_list": torch.tensor([ROWS]),
        **{"split_item": 3, "group_type": 0, "group_list_type": 1},
    }
    arguments = ([rows], [pack_int4(weight)[None]])
    (right,) = TARGET(*arguments, **given)
    call = OperatorCall(TARGET, arguments, given, {0: right}, {}, "")
    assert sums_in_float16(call) == groups
    found = on_a_device(rows, weight, scale, of_rows)
    assert 0.05 < difference_of(found, right, groups).of_limit < 0.7
    if groups == 28:
        assert difference_of(found, right).of_limit > 2, "the mutant: limits of one rounding"
    if groups > 1:
        other = on_a_device(rows, weight, scale.roll(1, 0), of_rows)
        assert difference_of(other, right, groups).beyond > 0.5, "scales of other groups"
    assert difference_of(right.roll(1, 0), right, groups).beyond > 0.5
    assert sums_in_float16(OperatorCall(TARGET, arguments, given, {0: right.bfloat16()}, {}, "")) == 0
