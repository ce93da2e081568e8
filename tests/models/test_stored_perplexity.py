"""The shipped model in every format of quantized checkpoints: as perplexing as transformers over what it means.

Inputs keep 16 bits or more: rounded to 8, many lie so near to the middle of two steps that float32's own
rounding moves the perplexity of these texts by as much as 0.05 %. ``test_inputs_of_8_bits`` compares those numbers
token by token. In float32 the two are to be alike. In bfloat16 rounding moves the loss of each window, so that the
mean over these windows has a standard error of 0.0007 to 0.0009, transformers' as well as the program's: there the
program may be three of them away from transformers in float32. Run with ``-s`` it prints a row for each.
"""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import FORMATS, quantize_folder, write_means
from trained_model import TINY_PYDOC
from transformers import AutoTokenizer

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program

from perplexity import loss_of_transformers, loss_per_token

sys.path.append(str(TINY_PYDOC.parent))

from pydoc_text import gather_documents

LIMIT = {torch.float32: 5e-4, torch.bfloat16: 2.5e-3}
WINDOWS, WINDOW = 24, 256
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    """Of documents that the model was not trained on."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_PYDOC)
    ids: list[int] = []
    for document in gather_documents():
        if document.held_out and len(ids) < WINDOWS * WINDOW:
            ids += tokenizer(document.text, verbose=False)["input_ids"]
    return torch.tensor(ids[: WINDOWS * WINDOW]).view(-1, WINDOW)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if not form.of_experts])
def test_perplexity(name: str, dtype: torch.dtype, windows: torch.Tensor, tmp_path: Path) -> None:
    quantized, dense = tmp_path / "quantized", tmp_path / "dense"
    for folder in (quantized, dense):
        shutil.copytree(TINY_PYDOC, folder)
    write_means(dense, quantize_folder(quantized, name))
    model = load_model(quantized, dtype, False, CPU)
    exact, expected = (loss_of_transformers(dense, kind, windows, None) for kind in (torch.float32, dtype))
    options = CompileOptions(verify="off", codegen="none", input_bits=16)
    program = build_program(model, options, owns_weights=True)
    found = loss_per_token(program, windows)
    perplexities = " ".join(f"{math.exp(loss):9.4f}" for loss in (exact, expected, found))
    print(f"{name:>20} {dtype!s:>15} {perplexities} {math.expm1(found - expected):+.4%}")
    assert abs(found - exact) <= LIMIT[dtype]
