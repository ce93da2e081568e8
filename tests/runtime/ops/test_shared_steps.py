"""pagoda::quantized_linear over groups of 32 and 16 inputs, which share the steps of the layout."""

from __future__ import annotations

import pytest
import torch
from stored_weights import packed_weight, product_error, stored_weight
from torch.nn import functional as F

from torch_pagoda.runtime.ops.linear.quantized_linear import quantized_linear_cpu, quantized_linear_reference
from torch_pagoda.runtime.ops.linear.quantized_weight import Quantization, pack_stored, packed_bytes, scheme_of
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight
from torch_pagoda.runtime.ops.linear.weight_format import E2M1, WeightFormat

FORMS = [
    "int4/g32/f32",
    "affine4/g32/f32",
    "affine8/g32/f32+order",
    "int4/g32/f16+z+order",
    "int4/g16/bf16+z",
    "int8/g32/f32+z",
    "int8/g16/f32",
    "e2m1/g32/bf16",
    "e2m1/g16/f32+order",
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(64, 64), (130, 100), (70, 576)])
def test_products_are_those_of_the_dense_weight(form: str, shape: tuple[int, int]) -> None:
    weight, stored, given = packed_weight(form, *shape)
    assert stored.shape == (packed_bytes(*shape, scheme_of(weight.form)),)
    for rows in (1, 2, 3, 4, 8, 33, 100):
        x = torch.randn(rows, shape[1])
        found = quantized_linear_cpu(x, stored, None, *given)
        assert product_error(found, x, weight.dense()) < 1e-4
        reference = quantized_linear_reference(x, stored, None, *given)
        torch.testing.assert_close(found, reference, rtol=2e-6, atol=2e-6 * float(reference.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int4/g32/f16+z", "affine4/g32/f32", "e2m1/g32/bf16", "e2m1/g16/f32"])
@pytest.mark.parametrize("shape", [(5632, 2048), (2048, 5632), (4100, 14336), (1000, 7000)])
def test_products_of_real_sizes(form: str, shape: tuple[int, int]) -> None:
    weight, stored, given = packed_weight(form, *shape)
    for rows in (1, 3, 8, 33, 512):
        x = torch.randn(rows, shape[1])
        assert product_error(quantized_linear_cpu(x, stored, None, *given), x, weight.dense()) < 1e-4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("input_bits", [8, 16])
def test_a_row_does_not_depend_on_its_batch_mates(form: str, input_bits: int) -> None:
    weight, stored, given = packed_weight(form, 100, 576)
    given = (*given[:3], input_bits, *given[4:])
    x = torch.randn(70, 576)
    together = quantized_linear_cpu(x, stored, None, *given)
    assert product_error(together, x, weight.dense()) < (0.02 if input_bits == 8 else 1e-4)
    for rows in (1, 2, 3, 4, 6, 7, 20):
        apart = [quantized_linear_cpu(part, stored, None, *given) for part in x.split(rows)]
        assert torch.equal(torch.cat(apart), together)


def test_the_largest_sums_do_not_overflow() -> None:
    """All codes are 255 and all zeros 0, or the other way round, and all inputs as large as their scale allows."""
    form = WeightFormat.parse("int8/g32/f32+z")
    for code, zero in ((255, 0), (0, 255)):
        codes, zeros = (torch.full((64, width), n, dtype=torch.uint8) for width, n in ((256, code), (8, zero)))
        weight = StoredWeight(form, codes, torch.ones(64, 8), zeros, dtype=torch.float32)
        given = (64, *scheme_of(form).arguments())
        for x in (torch.ones(9, 256), -torch.ones(9, 256)):
            found = quantized_linear_cpu(x, pack_stored(weight), None, *given)
            torch.testing.assert_close(found, F.linear(x, weight.dense()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [16, 32])
def test_every_code_is_its_number(size: int) -> None:
    """Of floats of 4 bits, exactly; a code that is another one shows."""
    codes = (torch.arange(128) + torch.arange(64)[:, None]).to(torch.uint8) & 15
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    form = WeightFormat.parse(f"e2m1/g{size}/f32")
    weight = StoredWeight(form, pairs, torch.ones(64, 128 // size), dtype=torch.float32)
    stored, given = pack_stored(weight), (64, *scheme_of(form).arguments())
    scale = 32512 / 32768  # that ones are integers of
    for rows in (torch.eye(128), torch.eye(128)[:2], -torch.eye(128)[77:78]):
        found = quantized_linear_cpu(rows * scale, stored, None, *given)
        torch.testing.assert_close(found, rows @ weight.dense().T * scale, rtol=1e-6, atol=0)
    assert weight.dense()[0, :16].tolist() == [*E2M1, *(-x for x in E2M1)]
    wrong = pairs.clone()
    wrong[5, 3] ^= 1
    other = quantized_linear_cpu(torch.eye(128), pack_stored(weight.replaced(codes=wrong)), None, *given)
    assert [tuple(at) for at in (other - weight.dense().T).abs().gt(0.1).nonzero().tolist()] == [(6, 5)]


@pytest.mark.parametrize("form", ["int4/g32/f32", "e2m1/g16/f32", "int8/g16/f32+z", "affine8/g32/f32"])
def test_scales_and_zeros_of_other_groups_show(form: str) -> None:
    """Mutants: the neighbor group's scale, the neighbor output's, and that of the last, short group."""
    weight = stored_weight(form, 70, 200).to(torch.float32)
    x, given = torch.randn(5, 200), (70, *scheme_of(weight.form).arguments())
    last = torch.ones(weight.scales.shape[1])
    last[-1] = 1.05
    changed = [
        weight.replaced(scales=s) for s in (weight.scales.roll(1, 1), weight.scales.roll(1, 0), weight.scales * last)
    ]
    if weight.zeros is not None:
        changed.append(weight.replaced(zeros=weight.zeros.roll(1, 1)))
    for other in changed:
        assert product_error(quantized_linear_cpu(x, pack_stored(other), None, *given), x, weight.dense()) > 5e-4


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ((4, 0, 16, False, "e2m1"), "group_size=0"),
        ((4, 64, 16, False, "e2m1"), "group_size=64"),
        ((8, 32, 16, False, "e2m1"), "bits=8"),
        ((4, 32, 16, True, "e2m1"), "zeros=True"),
        ((4, 32, 0, False, "e2m1"), "input_bits=0"),
    ],
)
def test_bad_schemes_are_refused(scheme: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantization(*scheme)  # type: ignore[arg-type]


def test_without_kernels_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stored, given = packed_weight("e2m1/g16/f32", 70, 200)
    monkeypatch.setattr("torch_pagoda.runtime.ops.linear.quantized_linear.kernel_function", lambda name: None)
    x = torch.randn(3, 200)
    assert product_error(quantized_linear_cpu(x, stored, None, *given), x, weight.dense()) < 1e-4
