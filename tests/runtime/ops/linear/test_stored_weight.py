"""Weights as they are stored look like the dense ones that they mean, whatever is done with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from stored_weights import stored_weight
from torch.nn import functional as F

from torch_pagoda.runtime.ops.linear import stored_weight as module
from torch_pagoda.runtime.ops.linear.quantized_linear import quantized_linear_cpu
from torch_pagoda.runtime.ops.linear.quantized_weight import (
    Quantization,
    pack_matrices,
    pack_stored,
    pack_stored_reference,
    quantize_weight,
    scheme_of,
    unpackable,
)
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight, as_dense
from torch_pagoda.runtime.ops.linear.weight_format import WeightFormat

FORMATS = (
    "int4/g32/f16+z",
    "int4/row/bf16",
    "int8/g16/f32+z+order",
    "e2m1/g32/bf16",
    "e4m3/g24/f32",
    "affine4/g16/f32",
)


def meant(weight: StoredWeight) -> torch.Tensor:
    """float32 ``[out, in]``, entry by entry from the definition."""
    form, table = weight.form, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    outputs, inputs = weight.shape
    found = torch.zeros(outputs, inputs)
    for n in range(outputs):
        for k in range(inputs):
            byte = int(weight.codes[n, k // form.per_byte])
            code = byte if form.bits == 8 else (byte >> 4 if k % 2 else byte & 15)
            group = k // (form.group_size or inputs)
            if form.code == "int":
                zero = 1 << (form.bits - 1) if weight.zeros is None else int(weight.zeros[n, group])
                number = float(code - zero)
            elif form.code == "e2m1":
                number = table[code & 7] * (-1 if code & 8 else 1)
            elif form.code == "e4m3":
                number = float(torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn))
            if form.code == "affine":  # the product and the difference are rounded
                number = float(code * weight.scales[n, group] - weight.zeros[n, group])
            else:
                number *= float(weight.scales[n, group])
            at = k if weight.order is None else int(weight.order[k])
            found[n, at] = number
    return found


@pytest.mark.parametrize("text", FORMATS)
def test_dense_is_the_definition(text: str) -> None:
    weight = stored_weight(text)
    assert torch.equal(weight.dense(), meant(weight).to(torch.bfloat16))
    assert torch.equal(weight.to(torch.float32).dense(), meant(weight))


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("at_once", [1, 100])
def test_dense_is_the_same_some_rows_at_a_time(text: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = stored_weight(text)
    stacked = torch.stack([weight, weight.each(lambda part: part.flip(0))]).transpose(1, 2)
    assert isinstance(stacked, StoredWeight)
    whole = [weight.dense(), stacked.dense()]  # by the kernel
    monkeypatch.setattr(module, "kernel_function", lambda name: None)
    monkeypatch.setattr(module, "_MOST_AT_ONCE", at_once)
    assert torch.equal(weight.dense(), whole[0]) and torch.equal(stacked.dense(), whole[1])
    assert stacked.dense().is_contiguous() and torch.equal(whole[1][1], weight.dense().flip(0).T)


ALL_FORMATS = (
    *FORMATS,
    *("int4/g128/bf16", "int8/row/f32/x8", "int8/g48/f16", "int4/g16/f32+z", "int8/g32/f32", "affine8/g32/f16"),
    *("e2m1/g16/f32", "e2m1/g64/f16", "e2m1/row/f32", "e4m3/row/bf16", "e4m3/g128/f32"),
)
SHAPES = [(1, 16), (70, 576), (130, 1090), (64, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("text", ALL_FORMATS)
def test_the_kernel_unpacks_as_torch_does(text: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = stored_weight(text, *shape).replaced(dtype=dtype)
    for given in (weight, weight.replaced(transposed=True), weight.each(lambda part: part[::2])):
        found = given.dense()
        expected = torch.empty_like(found)
        out = expected.mT if given.transposed else expected
        module._unpack(out, given.form, given.codes, given.scales, given.zeros, given.order)
        assert torch.equal(found, expected)


def test_small_and_bad_numbers_are_unpacked_as_torch_does() -> None:
    weight = stored_weight("e4m3/g24/f32", 40, 600)
    weight.codes[3, 5], weight.codes[39, 599] = 127, 255
    weight.scales[:9] *= 1e-38
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = weight.replaced(dtype=dtype).dense()
        expected = torch.empty_like(found)
        module._unpack(expected, weight.form, weight.codes, weight.scales, None, None)
        assert found.isnan().sum() == 2
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("text", [text for text in ALL_FORMATS if not unpackable(WeightFormat.parse(text))])
def test_the_kernel_packs_as_torch_does(text: str, shape: tuple[int, int]) -> None:
    weight = stored_weight(text, *shape)
    for given in (weight, weight.each(lambda part: part[::2])):
        assert torch.equal(pack_stored(given), pack_stored_reference(given))


@pytest.mark.parametrize("text", [text for text in ALL_FORMATS if not unpackable(WeightFormat.parse(text))])
def test_rows_are_packed_as_the_matrix_that_they_make_up(text: str) -> None:
    weight = stored_weight(text, 200, 256)
    rows = [weight[first:last] for first, last in ((0, 64), (64, 192), (192, 200))]
    assert all(isinstance(part, StoredWeight) for part in rows)
    assert torch.equal(pack_matrices(rows, scheme_of(weight.form)), pack_stored(weight))


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_rounded_as_the_matrix_that_they_make_up(bits: int) -> None:
    scheme = Quantization(bits, 128, 16)
    weight = torch.randn(200, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(pack_matrices(weight.split((64, 128, 8)), scheme), quantize_weight(weight, scheme))


def test_groups_with_a_nan_are_packed_as_torch_does() -> None:
    weight = stored_weight("e4m3/g128/f32", 70, 600)
    weight.codes[3, 5], weight.codes[69, 599] = 127, 255
    found, expected = pack_stored(weight).view(torch.float32), pack_stored_reference(weight).view(torch.float32)
    assert found.isnan().any() and torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": torch.Tensor.detach,
    "clone": torch.Tensor.clone,
    "to float32": lambda w: w.to(torch.float32),
    "transpose": lambda w: w.transpose(-1, -2),
    "twice": lambda w: w.transpose(0, 1).transpose(-1, -2),
    "some rows": lambda w: w[1:5],
    "every other row": lambda w: w[::2],
    "columns of the transposed": lambda w: w.transpose(0, 1)[:, 2:4],
    "cat": lambda w: torch.cat([w, w[2:]]),
    "stack": lambda w: torch.stack([w, w]),
    "one of a stack": lambda w: torch.stack([w, w[:]])[1],
    "chunk": lambda w: w.chunk(2)[1],
    "split": lambda w: w.split([1, 5])[1],
    "cat of transposed experts": lambda w: torch.cat([torch.stack([w, w]).transpose(1, 2)] * 2, 2),
    "unsqueeze": lambda w: w.unsqueeze(0),
}


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("move", MOVES)
def test_what_moves_rows_about_stays_stored(text: str, move: str) -> None:
    weight = stored_weight(text)
    moved, expected = MOVES[move](weight), MOVES[move](weight.dense())
    assert isinstance(moved, StoredWeight) and moved.form == weight.form
    assert moved.shape == expected.shape and moved.dtype == expected.dtype
    if move == "to float32":  # without the rounding to bfloat16 before
        expected = meant(weight)
    assert torch.equal(moved.dense(), expected)


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "some inputs": lambda w: w[:, 3:40],
    "an input": lambda w: w[:, 5],
    "a row": lambda w: w[5],
    "cat along inputs": lambda w: torch.cat([w, w], 1),
    "cat of two formats": lambda w: torch.cat([w, as_dense(w)]),
    "sum": lambda w: w.sum(),
    "view": lambda w: w.reshape(2, -1),
    "index": lambda w: w[torch.tensor([4, 0, 0])],
}


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("other", OTHERS)
def test_anything_else_is_done_with_the_dense_weight(text: str, other: str) -> None:
    weight = stored_weight(text)
    found, expected = OTHERS[other](weight), OTHERS[other](weight.dense())
    assert torch.equal(as_dense(found), expected)


def test_orders_that_differ_are_not_joined() -> None:
    one, other = stored_weight("int8/g16/f32+z+order"), stored_weight("int8/g16/f32+z+order", seed=1)
    joined = torch.cat([one, other])
    assert not isinstance(joined, StoredWeight)
    assert torch.equal(joined, torch.cat([one.dense(), other.dense()]))


def test_a_product_is_that_of_the_dense_weight() -> None:
    weight, x = (
        torch.nn.Parameter(stored_weight("int4/g32/f16+z"), requires_grad=False),
        torch.randn(3, 64).bfloat16(),
    )
    with torch.no_grad():
        assert torch.equal(F.linear(x, weight), F.linear(x, weight.dense()))  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_product_unpacks_some_rows_at_a_time(
    with_bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = stored_weight("int4/g32/f16+z", 96, 64).replaced(dtype=dtype)
    x, bias = torch.randn(2, 3, 64).to(dtype), torch.nn.Parameter(torch.randn(96).to(dtype)) if with_bias else None
    whole, made = weight.dense(), []
    dense = StoredWeight.dense
    monkeypatch.setattr(StoredWeight, "dense", lambda self: made.append(tuple(self.shape)) or dense(self))
    monkeypatch.setattr("torch_pagoda.runtime.ops.linear.stored_weight._BYTES_AT_ONCE", 40 * 64 * dtype.itemsize)
    with torch.no_grad():
        found = F.linear(x, torch.nn.Parameter(weight, requires_grad=False), bias)
    assert made == [(40, 64), (40, 64), (16, 64)]
    torch.testing.assert_close(found, F.linear(x, whole, bias))


def test_it_is_not_written_to() -> None:
    with pytest.raises(RuntimeError, match="writes into a weight stored as int4/row/bf16"):
        stored_weight("int4/row/bf16").mul_(2)


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"codes": torch.zeros(6, 32, dtype=torch.int8)}, "codes are torch.int8"),
        ({"scales": torch.ones(6, 3, dtype=torch.float16)}, "scales are"),
        ({"scales": torch.ones(6, 2)}, "scales are torch.float32"),
        ({"zeros": None}, "do not fit"),
        ({"zeros": torch.zeros(5, 2, dtype=torch.uint8)}, "zeros are"),
        ({"order": torch.arange(64, dtype=torch.int32)}, "do not fit"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit(part: dict[str, torch.Tensor | None], word: str) -> None:
    weight = stored_weight("int4/g32/f16+z")
    with pytest.raises(ValueError, match=word):
        weight.replaced(**part)


@pytest.mark.parametrize(
    "text",
    [
        "int5/g32/f16",
        "affine5/g32/f32",
        "affine/g32/f32",
        "int4/g32",
        "int4/g-1/f16",
        "e2m1/row/f64",
        "",
    ],
)
def test_formats_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a weight format"):
        WeightFormat.parse(text)


@pytest.mark.parametrize(("outputs", "inputs"), [(6, 64), (130, 200), (64, 1024)])
@pytest.mark.parametrize("text", ["int4/row/bf16", "int8/row/f32", "int4/g64/f16", "int4/g32/f16+z+order"])
def test_the_kernel_reads_the_codes_as_they_are(text: str, outputs: int, inputs: int) -> None:
    weight = stored_weight(text, outputs, inputs).to(torch.float32)
    assert isinstance(weight, StoredWeight) and not unpackable(weight.form)
    x = torch.randn(5, inputs)
    form = weight.form
    given = (outputs, form.bits, form.group_size, 16, form.zeros, weight.order)
    found = quantized_linear_cpu(x, pack_stored(weight), None, *given)
    expected = F.linear(x.double(), weight.dense().double())
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
