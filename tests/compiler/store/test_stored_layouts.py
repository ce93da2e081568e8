"""oneDNN's layouts in a file: told where it is set as it was, refused where they are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_pagoda.compiler.store.stored_layouts import layouts_data, tell_stored_layouts
from torch_pagoda.runtime.ops import onednn_weight
from torch_pagoda.runtime.ops.onednn_weight import Layout

LAYOUTS = {(64, 32, 2): Layout(32, torch.arange(8, dtype=torch.uint8))}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_weight, "_layouts", dict(LAYOUTS))
    monkeypatch.setattr(onednn_weight, "_told", {})


def test_another_process_is_told() -> None:
    data = layouts_data()
    onednn_weight._layouts.clear()
    tell_stored_layouts(data)
    assert onednn_weight._told == LAYOUTS


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE"])
def test_settings_of_onednn_count(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    data = layouts_data()
    monkeypatch.setenv(variable, "AVX2")
    tell_stored_layouts(data)
    assert not onednn_weight._told
    tell_stored_layouts(layouts_data())
    assert onednn_weight._told == LAYOUTS


@pytest.mark.parametrize(
    "changes",
    [
        {"layouts": None},
        {"layouts": {(64, 32): {"panel": 32, "description": torch.zeros(8, dtype=torch.uint8)}}},
        {"layouts": {(64, 32, 2): {"panel": "32", "description": torch.zeros(8, dtype=torch.uint8)}}},
        {"layouts": {(64, 32, 2): {"panel": 32, "description": [0] * 8}}},
        {"layouts": {(64, 32, 2): {"panel": 32, "description": torch.zeros(8)}}},
        {"settings": None},
    ],
)
def test_data_that_is_none(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        tell_stored_layouts({**layouts_data(), **changes})
    assert not onednn_weight._told
