"""pagoda::quantized_moe: against pagoda::moe over the weights that the packed ones stand for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from stored_weights import stored_weight

from torch_pagoda.runtime.ops.linear.quantized_linear import quantized_linear_cpu, quantized_linears_cpu
from torch_pagoda.runtime.ops.linear.quantized_weight import (
    Quantization,
    pack_stored,
    quantize_weight,
    restored_weight,
    scheme_of,
    unpack_weight,
)
from torch_pagoda.runtime.ops.moe.moe import moe_cpu, moe_reference
from torch_pagoda.runtime.ops.moe.quantized_moe import (
    quantized_moe,
    quantized_moe_cpu,
    quantized_moe_reference,
    scheme_numbers,
)

EXPERTS, HIDDEN, INNER = 5, 128, 96


def routing(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(tokens)).softmax(-1)
    found = scores.topk(2)
    return found.values, found.indices


def case(form: str, layout: str, *, biases: bool, transposed: bool = False) -> tuple[list[Any], list[Any]]:
    """Arguments behind ``topk_ids`` of the packed experts and of the dense ones."""
    wide = INNER if layout == "plain" else 2 * INNER
    matrices = []
    for outputs, inputs in ((wide, HIDDEN), (HIDDEN, INNER)):
        stored = [stored_weight(form, outputs, inputs, seed=e).to(torch.float32) for e in range(EXPERTS)]
        for weight in stored:
            weight.scales *= 0.01
        matrices.append(stored)
    packed = [torch.stack([pack_stored(weight) for weight in stored]) for stored in matrices]
    dense = [torch.stack([weight.dense() for weight in stored]) for stored in matrices]
    if transposed:
        dense = [weight.transpose(1, 2).contiguous() for weight in dense]
    given = [torch.randn(EXPERTS, wide), torch.randn(EXPERTS, HIDDEN)] if biases else [None, None]
    formula = ["relu" if layout == "plain" else "silu", 1.0, 0.0, layout, transposed, False]
    schemes = [scheme_numbers(scheme_of(matrices[0][0].form))] * 2
    return [*packed, *given, *formula, wide, HIDDEN, *schemes], [*dense, *given, *formula]


@pytest.mark.parametrize(
    "form", ["int4/g32/f16+z", "int8/row/f32", "e2m1/g32/bf16", "e4m3/g32/f32", "e2m1/g16/f32", "affine4/g32/f32"]
)
@pytest.mark.parametrize("layout", ["halves", "interleaved", "plain"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_packed_experts_are_those_that_they_stand_for(form: str, layout: str, biases: bool, tokens: int) -> None:
    packed, dense = case(form, layout, biases=biases, transposed=form == "e2m1/g32/bf16")
    x, (weights, ids) = torch.randn(tokens, HIDDEN), routing(tokens)
    expected = moe_reference(x.double(), weights.double(), ids, *(_wide(value) for value in dense))
    for operator in (quantized_moe_cpu, quantized_moe_reference, quantized_moe):
        found = operator(x, weights, ids, *packed)
        assert found.shape == (tokens, HIDDEN) and found.dtype is torch.float32
        assert (found - expected).abs().max() < 3e-4 * expected.abs().max()


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) else value


def test_experts_that_are_exchanged_show() -> None:
    packed, _ = case("int4/g32/f16+z", "halves", biases=False)
    x, (weights, ids) = torch.randn(7, HIDDEN), routing(7)
    before = quantized_moe_cpu(x, weights, ids, *packed)
    packed[0] = packed[0].flip(0)
    assert not torch.allclose(before, quantized_moe_cpu(x, weights, ids, *packed), rtol=0.1)


def test_weights_that_are_not_rounded_yet() -> None:
    _, dense = case("int8/row/f32", "halves", biases=True)
    x, (weights, ids) = torch.randn(7, HIDDEN), routing(7)
    more = (2 * INNER, HIDDEN, [4, 64, 8, 0], [4, 64, 8, 0])
    found = quantized_moe(x, weights, ids, *dense, *more)
    assert torch.equal(found, moe_reference(x, weights, ids, *dense))


def test_schemes_as_numbers() -> None:
    for scheme in (Quantization(4, 128, 8, whole_rows=True), Quantization(4, 32, 16, True), Quantization(8, 0, 8)):
        assert Quantization.of_numbers(scheme_numbers(scheme)) == scheme
    assert Quantization.of_numbers([4, 64, 8, 0]) == Quantization(4, 64, 8)


SCHEMES = [Quantization(8, 0, 8), Quantization(4, 64, 16), Quantization(4, 64, 8, whole_rows=True)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rounded_weights(scheme: Quantization) -> None:
    """What ``quantization=`` makes of float experts."""
    up, down = torch.randn(EXPERTS, 2 * INNER, HIDDEN) * 0.1, torch.randn(EXPERTS, HIDDEN, INNER) * 0.1
    packed = [torch.stack([quantize_weight(matrix, scheme) for matrix in weight]) for weight in (up, down)]
    restored = [
        torch.stack(
            [restored_weight(*unpack_weight(p, *w.shape, scheme), scheme) for p, w in zip(each, weight, strict=True)]
        )
        for each, weight in zip(packed, (up, down), strict=True)
    ]
    x, (weights, ids) = torch.randn(9, HIDDEN), routing(9)
    formula = (None, None, "silu", 1.0, 0.0, "halves", False, False)
    more = (2 * INNER, HIDDEN, scheme_numbers(scheme), scheme_numbers(scheme))
    found = quantized_moe_cpu(x, weights, ids, *packed, *formula, *more)
    expected = moe_reference(x, weights, ids, *restored, *formula)
    assert (found - expected).abs().max() < (0.02 if scheme.input_bits == 8 else 1e-3) * expected.abs().max()


def test_a_token_does_not_depend_on_its_batch_mates_where_asked() -> None:
    packed, _ = case("int4/g32/f16+z", "halves", biases=False)
    x, (weights, ids) = torch.randn(33, HIDDEN).bfloat16(), routing(33)
    together = quantized_moe_cpu(x, weights, ids, *packed, True)
    for part in (1, 4, 20):
        apart = [
            quantized_moe_cpu(x[i : i + part], weights[i : i + part], ids[i : i + part], *packed, True)
            for i in range(0, 33, part)
        ]
        assert torch.equal(torch.cat(apart), together)


@pytest.mark.parametrize("form", ["int4/g32/f16+z", "int8/row/f32", "e4m3/g128/f32"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [(0, 1, 0, 7, 0), (3, 0, 0, 0, 0), (1, 1, 1, 1, 1), (700, 2, 0, 33, 6)], ids=str)
def test_products_of_several_weights_are_those_of_each(
    form: str, bias: bool, dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    outputs, inputs = 70, 200
    stored = [stored_weight(form, outputs, inputs, seed=e) for e in range(EXPERTS)]
    scheme, weights = scheme_of(stored[0].form), torch.stack([pack_stored(weight) for weight in stored])
    biases = torch.randn(EXPERTS, outputs).to(dtype) if bias else None
    starts = torch.tensor([0, *counts]).cumsum(0)
    rows = torch.randn(sum(counts), inputs).to(dtype)
    found = quantized_linears_cpu(rows, weights, biases, starts, outputs, scheme)
    for e, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        own = None if biases is None else biases[e]
        expected = quantized_linear_cpu(rows[start:end], weights[e], own, outputs, *scheme.arguments())
        assert torch.equal(found[start:end], expected)


@pytest.mark.parametrize(
    "starts", [[0, 1, 2, 3, 4], [0, 1, 1, 1, 1, 9], [1, 1, 2, 3, 4, 5], [0, 3, 2, 4, 4, 5]], ids=str
)
def test_starts_that_do_not_fit(starts: list[int]) -> None:
    stored = stored_weight("int8/row/f32", 6, 64)
    weights = torch.stack([pack_stored(stored)] * EXPERTS)
    with pytest.raises(ValueError, match="give 6 numbers that rise from 0 to 5"):
        quantized_linears_cpu(torch.randn(5, 64), weights, None, torch.tensor(starts), 6, scheme_of(stored.form))


@pytest.mark.parametrize("wrong", [-2, EXPERTS])
def test_an_id_that_no_expert_has(wrong: int) -> None:
    packed, dense = case("int8/row/f32", "halves", biases=False)
    x, (weights, ids) = torch.randn(7, HIDDEN), routing(7)
    ids[3, 1] = wrong
    for operator, given in ((quantized_moe_cpu, packed), (moe_cpu, dense)):
        with pytest.raises(IndexError, match=f"there are {EXPERTS} experts"):
            operator(x, weights, ids, *given)
