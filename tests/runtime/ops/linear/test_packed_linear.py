"""Products with packed weights, oneDNN's and ours, whatever the sizes and the layout."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from torch_pagoda.runtime.ops.linear import onednn_weight
from torch_pagoda.runtime.ops.linear import packed_linear as module
from torch_pagoda.runtime.ops.linear.packed_linear import (
    MOST_ROWS,
    can_pack,
    own_panel,
    pack_weight,
    packed_linear,
    packed_linear_cpu,
    packed_linear_reference,
    unpack_weight,
)
from torch_pagoda.runtime.ops.linear.weight_panels import lay_out
from torch_pagoda.runtime.ops.native import kernel_function

pytestmark = pytest.mark.skipif(not can_pack(torch.bfloat16), reason="neither we nor oneDNN have bf16 here")
ours = pytest.mark.skipif(not own_panel(), reason="oneDNN packs on this processor")
of_onednn = pytest.mark.skipif(bool(own_panel()), reason="this processor's weights are packed by us")

ROWS = (1, 2, 3, 4, 5, 7, 15, 16, 17, 31, 32, 33, 40, MOST_ROWS)


def blocked(weight: torch.Tensor, panel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in panels, as if oneDNN had made them: what the kernel is given, and the memory, which has to live."""
    memory = lay_out(weight, panel)
    laid = weight.clone()
    laid.blocked = (memory.data_ptr(), panel)
    return laid, memory


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Within a rounding to bf16 of the exact sum, and what fp32 sums lose of their terms."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    terms = F.linear(x.double().abs(), weight.double().abs()) + 1
    bound = exact.abs() * 2**-8 + terms * (weight.shape[1] + 2) * 2**-23
    assert found.dtype is torch.bfloat16
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("panel", [16, 32, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (130, 96), (7, 40), (200, 33), (96, 1), (256, 512)])
def test_every_layout_and_size(outputs, inputs, panel):
    weight = numbers(outputs, inputs)
    laid, _memory = blocked(weight, panel)
    for rows in ROWS:
        x = numbers(rows, inputs, seed=rows)
        close(packed_linear_cpu(x, laid), x, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bias(dtype):
    weight, bias = numbers(70, 64), numbers(70, seed=1).to(dtype)
    laid, _memory = blocked(weight, 32)
    for rows in (1, 9):
        x = numbers(rows, 64, seed=2)
        close(packed_linear_cpu(x, laid, bias), x, weight, bias)


def test_inputs_of_any_strides():
    weight = numbers(48, 64)
    laid, _memory = blocked(weight, 32)
    wide = numbers(2, 6, 130)
    for x in (wide[..., :64], wide[..., 1:129:2], wide[:, ::2, :64], wide[0, 0, :64]):
        found = packed_linear_cpu(x, laid)
        assert found.shape == (*x.shape[:-1], 48)
        close(found.reshape(-1, 48), x.reshape(-1, 64), weight)


def test_no_rows():
    laid, _memory = blocked(numbers(48, 64), 32)
    assert packed_linear_cpu(numbers(0, 64), laid).shape == (0, 48)


def test_what_is_no_number_stays_in_its_row():
    weight = numbers(64, 64)
    laid, _memory = blocked(weight, 32)
    for rows in (3, 20):
        for value in (torch.nan, torch.inf):
            x = numbers(rows, 64, seed=3)
            x[1, 5] = value
            found = packed_linear_cpu(x, laid)
            assert not found[1].isfinite().any()
            others = [r for r in range(rows) if r != 1]
            close(found[others], x[others], weight)


@pytest.mark.parametrize(("outputs", "inputs"), [(2560, 2048), (96, 64), (1000, 72), (33, 40)])
def test_weights_that_were_packed(outputs, inputs):
    weight = numbers(outputs, inputs)
    packed = pack_weight(weight)
    for rows in (1, 4, 8, 32, MOST_ROWS, MOST_ROWS + 1):
        x = numbers(rows, inputs, seed=rows)
        close(packed_linear(x, packed, None), x, weight)


def test_rows_of_several_weights_are_those_of_one():
    weight, x = numbers(192, 64), numbers(3, 64, seed=1)
    close(packed_linear(x, pack_weight(*weight.split((128, 30, 34))), None), x, weight)


@of_onednn
def test_without_the_layout_onednn_multiplies(monkeypatch):
    monkeypatch.setattr(onednn_weight, "_function", lambda name: None)
    weight = numbers(64, 64)
    packed = pack_weight(weight)
    assert not hasattr(packed, "blocked")
    x = numbers(2, 64, seed=1)
    assert torch.equal(packed_linear_cpu(x, packed), packed_linear_reference(x, packed))
    close(packed_linear_cpu(x, packed), x, weight)


@of_onednn
def test_the_operator_reaches_our_kernel_with_an_opaque_weight(monkeypatch):
    """The dispatcher has a key of its own for tensors in oneDNN's layouts; without it they go to the reference."""
    weight, asked = numbers(2560, 2048), []
    packed = pack_weight(weight)
    if not hasattr(packed, "blocked"):
        pytest.skip("oneDNN's layout is not one of panels here")

    def function(name):
        asked.append(name)
        return kernel_function(name)

    monkeypatch.setattr(module, "kernel_function", function)
    x = numbers(4, 2048, seed=1)
    close(packed_linear(x, packed, None), x, weight)
    compiled = torch.compile(lambda x, w: packed_linear(x, w, None), fullgraph=True)
    with torch.inference_mode():
        close(compiled(x, packed), x, weight)
    assert asked == ["pagoda_blocked_linear"] * 2


@of_onednn
def test_many_rows_go_to_onednn(monkeypatch):
    weight = numbers(64, 64)
    packed = pack_weight(weight)
    monkeypatch.setattr(module, "kernel_function", lambda name: pytest.fail("our kernel was asked"))
    x = numbers(MOST_ROWS + 1, 64)
    close(packed_linear_cpu(x, packed), x, weight)


def test_processors_without_the_kernel(monkeypatch):
    weight = numbers(64, 64)
    packed = pack_weight(weight)
    monkeypatch.setattr(module, "kernel_function", lambda name: lambda arguments: 1)
    x = numbers(2, 64)
    close(packed_linear_cpu(x, packed), x, weight)


@ours
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (130, 97), (7, 40), (1, 1)])
def test_panels_of_ours_hold_the_weight(outputs, inputs):
    weight = numbers(outputs, inputs)
    packed = pack_weight(weight)
    assert packed.shape == (outputs, -(-inputs // 2), 2)
    assert torch.equal(unpack_weight(packed, inputs), weight)
    x = numbers(3, inputs, seed=1)
    assert torch.equal(packed_linear_reference(x, packed), packed_linear_reference(x, weight))


@ours
def test_a_copy_of_what_was_packed_is_refused():
    """Memory behind its head is read, which a copy does not have."""
    x = numbers(3, 97)
    with pytest.raises(ValueError, match="not a copy"):
        packed_linear_cpu(x, pack_weight(numbers(130, 97)).clone())
    with pytest.raises(ValueError, match="holds no panels of 64 inputs"):
        packed_linear_cpu(numbers(3, 64), pack_weight(numbers(130, 97)))


@ours
@pytest.mark.parametrize("rows", [MOST_ROWS + 1, 200])
def test_many_rows_are_ours(rows):
    weight, bias = numbers(130, 96), numbers(130, seed=1)
    x = numbers(rows, 96, seed=2)
    close(packed_linear_cpu(x, pack_weight(weight), bias), x, weight, bias)


@ours
def test_a_plain_weight_is_multiplied_in_float32():
    weight = numbers(70, 1000)
    x = numbers(9, 1000, seed=1)
    close(packed_linear_cpu(x, weight), x, weight)


@ours
def test_packed_weight_without_its_kernel(monkeypatch):
    weight = numbers(64, 64)
    packed = pack_weight(weight)
    monkeypatch.setattr(module, "kernel_function", lambda name: None)
    x = numbers(2, 64)
    close(packed_linear_cpu(x, packed), x, weight)


def test_threads_share_the_panels():
    weight = numbers(1000, 64)
    laid, _memory = blocked(weight, 32)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 40):
            torch.set_num_threads(threads)
            results.append([packed_linear_cpu(numbers(rows, 64), laid) for rows in (1, 20)])
    finally:
        torch.set_num_threads(before)
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
