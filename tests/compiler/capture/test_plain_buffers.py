"""A model whose forward assigns an ``nn.Buffer`` anew is traced, and is afterwards what it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.capture.plain_buffers import plain_buffers
from torch_pagoda.compiler.verify.self_check import check, reference_of_model

from tiny_models import build_tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_ctrl_is_served(dtype: torch.dtype) -> None:
    """It moves its table of positions to the dtype of the embeddings, and keeps it there: in bfloat16 another one,
    when it runs; to trace it changes nothing."""
    model = build_tiny_model("ctrl", dtype=dtype)
    table = model.transformer.pos_encoding
    program = build_program(model, CompileOptions(codegen="none", target="cpu", verify="off"))
    assert program.report.attention_recognized == program.report.attention_total == 2
    assert model.transformer.pos_encoding is table and isinstance(table, nn.Buffer)
    assert check(program, reference_of_model(model)).ok


def test_buffers_are_what_they_were_after_an_error() -> None:
    module = nn.Module()
    module.made, module.table = nn.Buffer(torch.zeros(2), persistent=False), nn.Buffer(torch.ones(2))
    module.register_buffer("plain", torch.ones(3))
    with pytest.raises(RuntimeError), plain_buffers(module):
        assert not any(isinstance(buffer, nn.Buffer) for buffer in module.buffers())
        raise RuntimeError
    assert [isinstance(buffer, nn.Buffer) for buffer in module.buffers()] == [True, True, False]
    assert list(module.state_dict()) == ["table", "plain"]
