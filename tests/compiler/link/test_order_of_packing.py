"""Weights that oneDNN lays out, which takes their memory twice, come before there are panels of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import quantize_folder

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.link import packed_rows
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.runtime.ops.linear.packed_linear import can_pack

from tiny_models import build_tiny_model


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="needs a processor with bf16 products")
def test_the_head_of_a_quantized_checkpoint_is_packed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_tiny_model("llama", num_hidden_layers=1).bfloat16().save_pretrained(tmp_path)
    quantize_folder(tmp_path, "ct-w4a16-row")
    model = load_model(tmp_path, "auto", False, torch.device("cpu"))
    order: list[str] = []

    def noted(name: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any) -> torch.Tensor:
            order.append(name)
            return function(*args)

        return call

    for name in ("pack_weight", "pack_matrices"):
        monkeypatch.setattr(packed_rows, name, noted(name, getattr(packed_rows, name)))
    program = build_program(model, CompileOptions(codegen="none", pack_weights=True), owns_weights=True)
    assert program.report.verdict is not None and program.report.verdict.ok
    assert order == ["pack_weight", *["pack_matrices"] * 4]
