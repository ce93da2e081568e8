"""Items of gated delta rules, on stand-ins for a device that rounds states or overflows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowered_models import lowered

from torch_pagoda.npu_tools.selftest import delta_rule_items as own
from torch_pagoda.npu_tools.selftest.delta_rule_items import by_formula, by_operator, delta_rule_items
from torch_pagoda.npu_tools.selftest.device import Device

CPU = Device(torch.device("cpu"), "Ascend910B3")


def silent(found: dict[str, Any]) -> None:
    """Takes what an item says under way."""


def test_a_model_without_a_delta_rule_has_none() -> None:
    assert delta_rule_items(lowered("llama")[1], CPU) == {}


def test_right_ones_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "STEPS", 64)
    items = delta_rule_items(lowered("qwen3_5_text", graph_mode="aclgraph")[1], CPU)
    assert list(items) == [
        "npu_chunk_gated_delta_rule with decays of exp(-8)",
        "npu_recurrent_gated_delta_rule with decays of exp(-8)",
        "64 decode steps by the formula",
        "64 decode steps by npu_recurrent_gated_delta_rule",
    ]
    assert {name: item(silent)["wrong"] for name, item in items.items()} == dict.fromkeys(items, "")


@pytest.mark.parametrize("form", [by_formula, by_operator])
def test_states_in_bfloat16_drift(form: Any) -> None:
    """Over 2048 steps; a few hundred do not show it."""

    def rounding(*given: torch.Tensor) -> torch.Tensor:
        return form(*given).bfloat16().float()

    assert own._drift(form, CPU, silent)["wrong"] == ""
    assert "states are off by 0.2" in own._drift(rounding, CPU, silent)["wrong"]
