"""pagoda::quantized_linear over weights in e4m3, as checkpoints store them."""

from __future__ import annotations

import pytest
import torch
from stored_weights import packed_weight, product_error, stored_weight

from torch_pagoda.runtime.ops.linear.quantized_linear import quantized_linear_cpu, quantized_linear_reference
from torch_pagoda.runtime.ops.linear.quantized_weight import (
    Quantization,
    pack_stored,
    packed_bytes,
    restored_weight,
    scheme_of,
    unpack_weight,
    unpackable,
)
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight
from torch_pagoda.runtime.ops.linear.weight_format import WeightFormat

FORMS = ["e4m3/g128/f32", "e4m3/row/bf16", "e4m3/g64/f16+order", "e4m3/g32/f32", "e4m3/g16/f32"]
# Of the largest result: sums are taken in float32, and rounded once.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(64, 64), (130, 100), (70, 576)])
def test_products_are_those_of_the_dense_weight(form: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, stored, given = packed_weight(form, *shape)
    for rows in (1, 3, 8, 33, 100):
        x, bias = torch.randn(rows, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
        found = quantized_linear_cpu(x, stored, None, *given)
        assert (found.dtype, found.shape) == (dtype, (rows, shape[0]))
        assert product_error(found, x, weight.dense()) < TOLERANCES[dtype]
        assert (
            product_error(quantized_linear_reference(x, stored, None, *given), x, weight.dense()) < TOLERANCES[dtype]
        )
        with_bias = quantized_linear_cpu(x, stored, bias, *given).float() - bias.float()
        assert product_error(with_bias, x, weight.dense()) < 2 * TOLERANCES[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["e4m3/g128/f32", "e4m3/row/bf16"])
@pytest.mark.parametrize("shape", [(5632, 2048), (2048, 5632), (4100, 14336), (1000, 7000)])
def test_products_of_real_sizes(form: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, stored, given = packed_weight(form, *shape)
    for rows in (1, 3, 8, 33, 512):
        x = torch.randn(rows, shape[1]).to(dtype)
        found = quantized_linear_cpu(x, stored, None, *given)
        assert product_error(found, x, weight.dense()) < TOLERANCES[dtype]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_row_does_not_depend_on_its_batch_mates(form: str, dtype: torch.dtype) -> None:
    _, stored, given = packed_weight(form, 100, 576)
    x = torch.randn(120, 576).to(dtype)
    together = quantized_linear_cpu(x, stored, None, *given)
    for rows in (1, 3, 6, 7, 20, 49):
        apart = [quantized_linear_cpu(part, stored, None, *given) for part in x.split(rows)]
        assert torch.equal(torch.cat(apart), together)


def every_code(scale: float = 1.0) -> StoredWeight:
    """``[64, 256]``: output n has the code k + n at input k; no NaN."""
    codes = (torch.arange(256) + torch.arange(64)[:, None]).to(torch.uint8)
    codes[codes & 127 == 127] = 0
    return StoredWeight(WeightFormat.parse("e4m3/g64/f32"), codes, torch.full((64, 4), scale), dtype=torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_code_is_its_number(dtype: torch.dtype) -> None:
    """Exactly, denormals too: a wrong entry of a table or a wrong sign shows."""
    weight = every_code()
    stored, given = pack_stored(weight), (64, *scheme_of(weight.form).arguments())
    for rows in (torch.eye(256), 0.5 * torch.eye(256)[:3], -torch.eye(256)[100:101]):
        found = quantized_linear_cpu(rows.to(dtype), stored, None, *given)
        assert torch.equal(found.float(), rows @ weight.dense().T)
    assert weight.dense().unique().numel() == 253  # 256, without two NaN and -0
    assert torch.equal(
        restored_weight(*unpack_weight(stored, 64, 256, scheme_of(weight.form)), scheme_of(weight.form)),
        weight.dense(),
    )


@pytest.mark.parametrize("change", [1, 128])
def test_another_code_shows(change: int) -> None:
    """A mutant of ``test_every_code_is_its_number``: one code is the next one, or its negative."""
    weight = every_code()
    for at in range(0, 126, 9):  # 8, 9, … of the first output, which are among the denormals too
        codes = weight.codes.clone()
        codes[0, at] ^= change
        stored, given = pack_stored(weight.replaced(codes=codes)), (64, *scheme_of(weight.form).arguments())
        found = quantized_linear_cpu(torch.eye(256)[at : at + 1], stored, None, *given)
        assert torch.equal(found[0, 1:], weight.dense()[1:, at])
        assert found[0, 0] != weight.dense()[0, at] or weight.dense()[0, at] == 0


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_weight_that_is_nan_spoils_its_output_only(code: int, dtype: torch.dtype) -> None:
    weight = stored_weight("e4m3/g64/f32", 70, 200).to(torch.float32)
    codes = weight.codes.clone()
    codes[3, 199] = codes[69, 0] = code
    bad = weight.replaced(codes=codes)
    x, given = torch.randn(9, 200).to(dtype), (70, *scheme_of(weight.form).arguments())
    found = quantized_linear_cpu(x, pack_stored(bad), None, *given)
    expected = quantized_linear_cpu(x, pack_stored(weight), None, *given)
    kept = [n for n in range(70) if n not in (3, 69)]
    assert found[:, [3, 69]].isnan().all() and torch.equal(found[:, kept], expected[:, kept])
    assert bad.dense()[[3, 69]].isnan().any(1).all()


def test_inputs_that_are_bad_spoil_their_row_only() -> None:
    _, stored, given = packed_weight("e4m3/g128/f32", 64, 256)
    x = torch.randn(60, 256)
    expected = quantized_linear_cpu(x, stored, None, *given)
    x[3, 5], x[50, 0] = torch.nan, torch.inf
    found = quantized_linear_cpu(x, stored, None, *given)
    assert found[3].isnan().all() and not found[50].isfinite().any()
    kept = [row for row in range(60) if row not in (3, 50)]
    assert torch.equal(found[kept], expected[kept])


def test_scales_of_other_blocks_show() -> None:
    """Mutants: the scale of the neighbor block of inputs, of outputs, and that of the last, short group."""
    weight = stored_weight("e4m3/g128/f32", 130, 300).to(torch.float32)
    x, given = torch.randn(5, 300), (130, *scheme_of(weight.form).arguments())
    for scales in (weight.scales.roll(1, 1), weight.scales.roll(1, 0), weight.scales * torch.tensor([1, 1, 1.01])):
        found = quantized_linear_cpu(x, pack_stored(weight.replaced(scales=scales)), None, *given)
        assert product_error(found, x, weight.dense()) > 1e-4


def test_rows_may_be_strided_and_batched() -> None:
    _, stored, given = packed_weight("e4m3/g64/f32", 48, 128)
    wide = torch.randn(2, 9, 300).bfloat16()
    for x in (wide[..., :128], wide[..., 1:257:2], wide[:, :, 100:228].transpose(0, 1), torch.randn(128)):
        found = quantized_linear_cpu(x, stored, None, *given)
        assert torch.equal(found, quantized_linear_cpu(x.contiguous(), stored, None, *given))
        assert found.shape == (*x.shape[:-1], 48)
    assert quantized_linear_cpu(torch.randn(0, 128), stored, None, *given).shape == (0, 48)


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_weight_has_its_bytes(form: str) -> None:
    weight, stored, _ = packed_weight(form, 70, 576)
    assert stored.shape == (packed_bytes(70, 576, scheme_of(weight.form)),)
    assert Quantization.of_numbers(scheme_of(weight.form).numbers) == scheme_of(weight.form)


@pytest.mark.parametrize("form", ["e4m3/g24/f32", "e4m3/g8/f32", "e4m3/g48/f32"])
def test_other_groups_are_not_read(form: str) -> None:
    assert "no kernel for groups of" in unpackable(WeightFormat.parse(form))


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ((8, 0, 16, False, "e4m3"), "input_bits=16"),
        ((4, 0, 0, False, "e4m3"), "bits=4"),
        ((8, 0, 0, True, "e4m3"), "zeros=True"),
        ((8, 8, 0, False, "e4m3"), "group_size=8"),
        ((8, 0, 0), "input_bits=0"),
        ((8, 0, 8, False, "e5m2"), "code='e5m2'"),
    ],
)
def test_bad_schemes_are_refused(scheme: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantization(*scheme)  # type: ignore[arg-type]


def test_without_kernels_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stored, given = packed_weight("e4m3/g32/f32", 70, 200)
    monkeypatch.setattr("torch_pagoda.runtime.ops.linear.quantized_linear.kernel_function", lambda name: None)
    x = torch.randn(3, 200)
    assert product_error(quantized_linear_cpu(x, stored, None, *given), x, weight.dense()) < 1e-6
