"""Calls of a form that the documents lack, which also run as GE graphs of their own."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import quantize_folder

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler.verify.self_check import Schedule
from torch_pagoda.npu_tools.selftest import graph_calls, operators
from torch_pagoda.npu_tools.selftest.device import Device
from torch_pagoda.npu_tools.selftest.model import Asked
from torch_pagoda.npu_tools.selftest.worker import Items

from legal_models import build_legal_model

CPU = Device(torch.device("cpu"), "Ascend910B3", running=nullcontext)


def silent(found: dict[str, Any]) -> None:
    """Takes what an item says under way."""


@pytest.fixture
def items(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Items:
    """Of a layer in bfloat16 whose inputs are rounded by stored scales, those that run as GE graphs."""
    build_legal_model("llama", dtype=torch.bfloat16, num_hidden_layers=1).save_pretrained(tmp_path)
    quantize_folder(tmp_path, request.param)
    model = load_model(str(tmp_path), "auto", False, CPU.torch_device)
    monkeypatch.setattr(operators, "SCHEDULE", Schedule((5, 5, 5), (1, 1, 1), 16, decoded=1))
    made = operators.operator_items(model, CPU, Asked("nowhere", block_size=16))
    assert any(name.startswith("npu_add_rms_norm_quant(") for name in made)
    return {name: item for name, item in made.items() if name.endswith("GE graph")}


@pytest.mark.parametrize("items", ["ct-w8a8-static"], indirect=True)
def test_what_a_graph_yields_is_compared(items: Items, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[int] = []

    def compiled(module: torch.fx.GraphModule, *_: Any) -> Any:
        return lambda *args: [x.roll(1) if i in wrong else x for i, x in zip((0, 2), module(*args), strict=True)]

    monkeypatch.setattr(graph_calls, "compile_module", compiled)
    assert items and all(", float32[" in name for name in items)
    for changed, said in (([], ""), ([0], "result 0 differs"), ([2], "result 2 differs")):
        wrong[:] = changed
        assert all(item(silent)["wrong"][:16] == said for item in items.values())


@pytest.mark.slow
@pytest.mark.parametrize("items", ["slim-w8a8-static"], indirect=True)
def test_documented_forms_run_by_themselves_alone(items: Items) -> None:
    assert not items


@pytest.mark.torchair
@pytest.mark.parametrize("items", ["ct-w8a8-static"], indirect=True)
def test_the_real_torchair_converts_them(items: Items) -> None:
    assert items and all(item(silent)["wrong"] == "" for item in items.values())
