"""Weights that oneDNN multiplies with: its layout is looked at, and where it is ours the memory is, too."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from torch_pagoda.runtime.ops.linear import onednn_weight
from torch_pagoda.runtime.ops.linear.onednn_weight import address_of, pack_for_onednn, panels_in
from torch_pagoda.runtime.ops.linear.packed_linear import can_pack, own_panel, packed_linear_reference
from torch_pagoda.runtime.ops.linear.weight_panels import lay_out

pytestmark = pytest.mark.skipif(
    bool(own_panel()) or not can_pack(torch.bfloat16), reason="oneDNN packs no weights on this processor"
)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(autouse=True)
def no_known_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_weight, "_layouts", {})


def reordered(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def test_layout_is_found_where_there_are_tiles():
    if "amx_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("other processors have other layouts")
    assert pack_for_onednn(numbers(2560, 2048)).blocked[1] == 32


@pytest.mark.parametrize("panel", [16, 32, 64])
def test_layout_is_looked_at(panel):
    weight = numbers(192, 96)
    memory = lay_out(weight, panel)
    size = memory.numel() * 2
    laid = panels_in(weight, memory.data_ptr(), size)
    assert laid is not None and laid.shape[2] == panel
    memory[-1, 3, 2, 1] += 1
    assert panels_in(weight, memory.data_ptr(), size) is None


def test_layout_that_cannot_be_told_is_not_taken():
    weight = torch.ones(192, 96, dtype=torch.bfloat16)
    memory = lay_out(weight, 32)
    assert panels_in(weight, memory.data_ptr(), memory.numel() * 2) is None


@pytest.mark.parametrize(("outputs", "inputs"), [(2560, 2048), (96, 64), (1000, 72), (33, 40)])
def test_products_are_those_of_onednns_own_weight(outputs: int, inputs: int) -> None:
    """The first of a shape, whose layout is found by it, and the next one."""
    for seed in (0, 1):
        weight = numbers(outputs, inputs, seed=seed)
        packed = pack_for_onednn(weight)
        assert packed.is_mkldnn and packed.shape == weight.shape
        for rows in (1, 16, 100):
            x = numbers(rows, inputs, seed=2)
            expected = packed_linear_reference(x, reordered(weight))
            assert torch.equal(packed_linear_reference(x, packed), expected)


@pytest.mark.parametrize("counts", [(2048, 256, 256), (1000, 24)])
def test_rows_of_several_weights_are_those_of_one(counts: tuple[int, ...]) -> None:
    for seed in (0, 1):
        weight, x = numbers(sum(counts), 96, seed=seed), numbers(100, 96, seed=2)
        expected = packed_linear_reference(x, reordered(weight))
        assert torch.equal(packed_linear_reference(x, pack_for_onednn(*weight.split(counts))), expected)


def test_memory_is_ours_and_lives_as_long_as_the_tensor() -> None:
    weight = numbers(2560, 2048)
    packed = [pack_for_onednn(weight), pack_for_onednn(weight.neg())]
    if not hasattr(packed[0], "blocked"):
        pytest.skip("oneDNN's layout is not one of panels here")
    assert len(onednn_weight._layouts) == 1
    for each in packed:
        address, panel = each.blocked  # type: ignore[attr-defined]
        assert address_of(each) == address == each.memory.data_ptr()  # type: ignore[attr-defined]
        assert each.memory.shape[2] == panel  # type: ignore[attr-defined]
    held = [packed.pop()]
    gc.collect()
    others = [numbers(2560, 2048, seed=seed) for seed in range(4)]  # would take memory that was freed
    x = numbers(100, 2048, seed=9)
    assert torch.equal(packed_linear_reference(x, held[0]), packed_linear_reference(x, reordered(weight.neg())))
    assert others
    memory = weakref.ref(held[0].memory)  # type: ignore[attr-defined]
    held.clear()
    del each
    gc.collect()
    assert memory() is None, "and no longer"


def test_looking_for_the_elements_keeps_no_tensor() -> None:
    packed = reordered(numbers(96, 64))
    assert address_of(packed) and packed._use_count() == 1  # type: ignore[attr-defined]


def test_a_layout_that_differs_in_one_entry_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the panels that are looked at do not show."""
    weight = numbers(2560, 2048)
    if not hasattr(pack_for_onednn(weight), "memory"):
        pytest.skip("oneDNN's layout is not one of panels here")

    def spoiled(weight: torch.Tensor, panel: int) -> torch.Tensor:
        laid = lay_out(weight, panel)
        laid[1:2, 5, 3, 1] += 1
        return laid

    onednn_weight._layouts.clear()
    monkeypatch.setattr(onednn_weight, "lay_out", spoiled)
    packed = pack_for_onednn(weight)
    assert not hasattr(packed, "memory") and not onednn_weight._layouts
    x = numbers(100, 2048, seed=1)
    assert torch.equal(packed_linear_reference(x, packed), packed_linear_reference(x, reordered(weight)))


@pytest.mark.parametrize(
    "missing",
    ["aoti_torch_create_tensor_from_blob_v2", "aoti_torch_get_data_ptr", "aoti_torch_delete_tensor_object"],
)
def test_a_torch_without_the_functions(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    function = onednn_weight._function
    monkeypatch.setattr(onednn_weight, "_function", lambda name: None if name == missing else function(name))
    weight = numbers(2560, 2048)
    packed, x = pack_for_onednn(weight), numbers(100, 2048, seed=1)
    assert not hasattr(packed, "memory")
    assert torch.equal(packed_linear_reference(x, packed), packed_linear_reference(x, reordered(weight)))
