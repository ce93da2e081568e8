"""The rules that limits are made of, and how a reference kernel refuses by them."""

from __future__ import annotations

import pytest
import torch

from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.npu.limits import LIMITS, violations
from torch_pagoda.runtime.ops.npu.limits.call import REFERENCE, Call
from torch_pagoda.runtime.ops.npu.limits.rules import shaped

npu = torch.ops.npu


def fits(shapes: str, **tensors: tuple[int, ...] | None) -> bool:
    given = {name: None if shape is None else torch.empty(shape) for name, shape in tensors.items()}
    return not shaped(shapes)(Call("toy", given))


@pytest.mark.parametrize(
    ("shapes", "right", "wrong"),
    [
        ("x [M, K], w [N, K]", {"x": (2, 3), "w": (4, 3)}, {"x": (2, 3), "w": (3, 4)}),
        ("x [M, K], w [N, K]", {"x": (2, 3), "w": None}, {"x": (2, 3, 1), "w": None}),
        ("x [*B, N], y [*B, N]", {"x": (2, 5, 3), "y": (2, 5, 3)}, {"x": (2, 5, 3), "y": (5, 3)}),
        ("g [*G, N], x [*B, *G, N]", {"g": (5, 3), "x": (2, 5, 3)}, {"g": (5, 3), "x": (5, 2, 3)}),
        ("g [*G, N], x [*B, *G, N]", {"g": (3,), "x": (3,)}, {"g": (), "x": (3,)}),
        ("x [*B, D], t [*B?, D]", {"x": (2, 5, 8), "t": (1, 5, 8)}, {"x": (2, 5, 8), "t": (1, 5, 1)}),
        ("p [T, K], x [T*K, H]", {"p": (2, 3), "x": (6, 9)}, {"p": (2, 3), "x": (5, 9)}),
        ("x [T*K, H], i [T*K]", {"x": (6, 9), "i": (6,)}, {"x": (6, 9), "i": (5,)}),
        ("c [C], r [R], kv [1, C+R]", {"c": (5,), "r": (2,), "kv": (1, 7)}, {"c": (5,), "r": (2,), "kv": (2, 7)}),
        ("c [C], r [R], w [C*R+R]", {"c": (5,), "r": (2,), "w": (12,)}, {"c": (5,), "r": (2,), "w": (11,)}),
        ("x [*B, M, N]", {"x": (3, 4)}, {"x": (4,)}),
    ],
)
def test_shapes_that_fit_each_other(shapes, right, wrong):
    assert fits(shapes, **right) and not fits(shapes, **wrong)


def test_what_does_not_fit_is_shown_beside_what_does():
    call = Call("toy", {"x": torch.empty(2, 3), "w": torch.empty(3, 4), "bias": None})
    assert shaped("x [M, K], w [N, K], bias [N]")(call) == "x (2, 3), w (3, 4) do not fit x [M, K], w [N, K]"


def test_operators_that_lowering_does_not_emit_have_limits_of_their_references():
    x, half = torch.ones(2, 8), torch.ones(2, 8).half()
    assert "npu_add_rms_norm_cast" not in LIMITS
    call = Call.make(npu.npu_add_rms_norm_cast.default, NpuTarget(), half, half, half[0])
    assert violations(call) == ["npu_add_rms_norm_cast is not in the table of limits"]
    with pytest.raises(ValueError, match="npu::npu_add_rms_norm_cast: dtypes differ: x1 "):
        npu.npu_add_rms_norm_cast(x, half, x[0])


def test_references_take_what_compares_and_know_no_chip():
    arguments = {"input": torch.ones(2, 8).double(), "gamma": torch.ones(8).double()}
    assert violations(Call("npu_rms_norm", arguments, is_reference=True)) == []
    assert violations(Call("npu_rms_norm", arguments, REFERENCE)) == [
        f"{name} is torch.float64; it must be torch.bfloat16 or torch.float16 or torch.float32" for name in arguments
    ]
