"""pagoda::gated_rms_norm: the reference against transformers' modules, the kernel against the reference."""

from __future__ import annotations

import itertools
from importlib import import_module

import pytest
import torch

from torch_pagoda.runtime.ops.norm import gated_rms_norm as module
from torch_pagoda.runtime.ops.norm.gated_rms_norm import gated_rms_norm, gated_rms_norm_cpu, gated_rms_norm_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DIM, GROUP, EPS = 256, 64, 1e-5
# Class, its arguments, and what it is: round_before_scale in half precision, activation, gate_first, group_size.
MODULES = {
    "qwen3_5": ("Qwen3_5RMSNormGated", (DIM, EPS), (True, "silu", False, DIM)),
    "kimi_linear": ("KimiLinearRMSNormGated", (DIM, EPS), (False, "sigmoid", False, DIM)),
    "zamba2": ("Zamba2RMSNormGated", (DIM, GROUP, EPS), (True, "silu", True, GROUP)),
    "falcon_h1": ("FalconH1RMSNormGated", (DIM, EPS, DIM // GROUP, True), (False, "silu", False, GROUP)),
    "falcon_h1, gate first": ("FalconH1RMSNormGated", (DIM, EPS, DIM // GROUP, False), (False, "silu", True, GROUP)),
}
FORMS = [*itertools.product((True, False), ("silu", "sigmoid"), (True, False), (1, 3))]
"""round_before_scale, activation, gate_first, number of groups."""


def module_of_model(name: str, weight: torch.Tensor) -> torch.nn.Module:
    """Imported late: an emulated processor takes long to read transformers."""
    model = name.partition(",")[0]
    kind, arguments, _ = MODULES[name]
    found = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), kind)(*arguments)
    found.weight.data = weight
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_reference_is_what_models_write(name, dtype):
    weight, form = (1 + 0.3 * torch.randn(DIM)).to(dtype), MODULES[name][2]
    theirs = module_of_model(name, weight)
    x, gate = torch.randn(2, 5, DIM).to(dtype), 3 * torch.randn(2, 5, DIM).to(dtype)
    with torch.no_grad():
        assert torch.equal(gated_rms_norm_reference(x, gate, weight, EPS, 0.0, *form), theirs(x, gate))


def test_scans_in_float32_beside_gates_in_half_precision():
    """Mamba-2's scan yields float32, whatever the model's dtype, and the mixer rounds behind the norm."""
    weight, form = torch.randn(DIM).bfloat16(), MODULES["zamba2"][2][1:]
    theirs = module_of_model("zamba2", weight)
    x, gate = torch.randn(2, 5, DIM), torch.randn(2, 5, DIM).bfloat16()
    with torch.no_grad():
        expected = theirs(x, gate).to(torch.bfloat16)
    assert torch.equal(gated_rms_norm_reference(x, gate, weight, EPS, 0.0, False, *form), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 100, 128, 1000])
def test_kernel_is_the_reference(dtype, width, assert_rounded_alike):
    for rows, (rounds, activation, gate_first, groups) in itertools.product((1, 15), FORMS):
        dim = groups * width
        gate = 3 * torch.randn(rows, dim).to(dtype)
        narrow, wide = torch.randn(dim).to(dtype), torch.randn(dim)
        weights = [(narrow, 0.0), (narrow, 1.0), (None, 0.0), *([] if rounds else [(wide, 0.0)])]
        for x, (weight, offset) in itertools.product(
            (torch.randn(rows, dim).to(dtype), torch.randn(rows, dim)), weights
        ):
            given = (x, gate, weight, EPS, offset, rounds, activation, gate_first, width)
            assert_rounded_alike(gated_rms_norm(*given), gated_rms_norm_reference(*given))


def test_heads_and_widths_of_real_models(assert_rounded_alike):
    """Qwen3.5-0.8B's heads, Granite 4's row as one group, Nemotron-H's groups."""
    for shape, form in (
        ((1, 70, 16, 128), (True, "silu", False, 128)),
        ((1, 33, 4096), (False, "silu", True, 4096)),
        ((1, 33, 8192), (False, "silu", True, 1024)),
    ):
        gate, weight = torch.randn(shape).bfloat16(), torch.randn(shape[-1]).bfloat16()
        x = torch.randn(shape).to(torch.float32 if form[2] else torch.bfloat16)
        given = (x, gate, weight, EPS, 0.0, *form)
        assert_rounded_alike(gated_rms_norm(*given), gated_rms_norm_reference(*given))


STRIDED = {
    "part of a merged product": lambda: torch.randn(2, 5, 300)[..., 50:210],
    "heads of a merged product": lambda: torch.randn(2, 5, 900)[..., 100:740].view(2, 5, 4, 160),
    "heads before tokens": lambda: torch.randn(2, 5, 640).view(2, 5, 4, 160).transpose(1, 2),
    "every other element": lambda: torch.randn(2, 5, 320)[..., ::2],
    "columns": lambda: torch.randn(160, 6).T,
    "one row for all": lambda: torch.randn(1, 1, 160).expand(2, 3, 160),
    "five dims": lambda: torch.randn(2, 2, 3, 2, 320)[..., :160].transpose(0, 3),
    "one dim": lambda: torch.randn(160),
    "no rows": lambda: torch.randn(2, 0, 160),
}


@pytest.mark.parametrize("name", STRIDED)
def test_any_strides(name, assert_rounded_alike):
    for dtype, gate_first in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        strided, weight = STRIDED[name]().to(dtype), torch.randn(320).to(dtype)[::2]
        dense = torch.randn_like(strided, memory_format=torch.contiguous_format)
        for x, gate in ((strided, dense), (dense, strided), (strided.float(), dense)):
            given = (x, gate, weight, EPS, 0.0, True, "silu", gate_first, 80)
            assert_rounded_alike(gated_rms_norm(*given), gated_rms_norm_reference(*given))


def test_threads_and_batch_mates_change_nothing():
    x, gate, weight = torch.randn(70, 1000), torch.randn(70, 1000), torch.randn(1000)
    form = (weight, EPS, 0.0, True, "silu", True, 250)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(gated_rms_norm_cpu(x, gate, *form))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    assert torch.equal(results[0][3:4], gated_rms_norm_cpu(x[3:4], gate[3:4], *form))


def test_gates_over_the_whole_range():
    gate = torch.cat((torch.linspace(-120, 120, 4001), torch.linspace(-6, 6, 4001)))[:, None]
    x = torch.ones(len(gate), 1)
    for activation in ("silu", "sigmoid"):
        form = (None, 0.0, 0.0, False, activation, False, 1)
        exact = gated_rms_norm_reference(x.double(), gate.double(), *form)
        assert ((gated_rms_norm_cpu(x, gate, *form) - exact).abs() / exact.abs().clamp(min=1.0)).max() < 1e-6
        half = gated_rms_norm_cpu(x.bfloat16(), gate.bfloat16(), *form)
        rounded = gated_rms_norm_reference(x.double(), gate.bfloat16().double(), *form)
        assert ((half - rounded).abs() / rounded.abs().clamp(min=1e-3)).max() < 2**-8


def test_nan_and_infinity_reach_the_result():
    x, gate = torch.randn(4, 40), torch.randn(4, 40)
    x[1, 39], x[2, 3], gate[3, 5] = torch.nan, torch.inf, torch.nan
    behind, in_front = (
        gated_rms_norm_cpu(x, gate, None, EPS, 0.0, True, "silu", first, 20) for first in (False, True)
    )
    for result in (behind, in_front):
        assert result[0].isfinite().all()
        assert result[1, 20:].isnan().all() and result[1, :20].isfinite().all()
        assert result[2, 3].isnan() and (result[2, :3] == 0).all()
    assert behind[3].isnan().sum() == 1 and in_front[3, :20].isnan().all()


def test_the_reference_runs_where_the_kernel_does_not(monkeypatch):
    x, gate, weight = torch.randn(3, 3, 8, dtype=torch.float64).unbind()
    form = (EPS, 0.0, True, "sigmoid", False, 8)
    result = gated_rms_norm_cpu(x, gate, weight[0], *form)
    assert result.dtype == torch.float64
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    assert torch.equal(result, normed * weight[0] * gate.sigmoid())
    monkeypatch.setattr(module, "kernel_function", lambda name: None)
    x, gate, weight = x.float(), gate.float(), weight[0].float()
    assert torch.equal(gated_rms_norm_cpu(x, gate, weight, *form), gated_rms_norm_reference(x, gate, weight, *form))


@pytest.mark.parametrize("function", [gated_rms_norm, gated_rms_norm_cpu, gated_rms_norm_reference])
def test_what_does_not_fit_is_refused(function):
    x = torch.randn(2, 3, 8).bfloat16()
    for gate in (x[:1], x.half()):
        with pytest.raises(ValueError, match=r"input has shape .* gate .* expand or convert one of them"):
            function(x, gate, None, EPS, 0.0, True, "silu", False, 8)
    with pytest.raises(
        ValueError, match=r"weight has shape \(7,\); it must have one entry for each of the 8 .* gate"
    ):
        function(x, x, torch.randn(7).bfloat16(), EPS, 0.0, True, "silu", False, 8)
    with pytest.raises(ValueError, match=r"weight has dtype torch.float32 and gate torch.bfloat16; convert it"):
        function(x, x, torch.randn(8), EPS, 0.0, True, "silu", False, 8)
    with pytest.raises(ValueError, match="activation is 'relu'; it must be one of silu, sigmoid"):
        function(x, x, None, EPS, 0.0, True, "relu", False, 8)
    for size in (3, 0, 16):
        with pytest.raises(ValueError, match=rf"group_size is {size}; it must divide the 8 elements"):
            function(x, x, None, EPS, 0.0, True, "silu", False, size)
