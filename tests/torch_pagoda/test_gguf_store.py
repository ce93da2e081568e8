"""Programs over GGUF files are kept, found by the files alone, and not taken once these have changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_files import all_of, file_of

import torch_pagoda as pagoda
from torch_pagoda import compiled_model
from torch_pagoda.compiler.warm_start import record
from torch_pagoda.compiler.warm_start.file import DISABLE
from torch_pagoda.runtime.ops.native import kernel_function

from tiny_models import build_tiny_model


@pytest.fixture(autouse=True)
def compile_once() -> None:
    """Takes the place of the fixture that compiles without the store."""


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    """Those of the process, before each test has a cache of its own."""
    assert kernel_function("pagoda_quantize_weight") is not None


def started(path: Path) -> pagoda.LLM:
    return pagoda.LLM(path, dtype="float32", block_size=4, num_blocks=64)


def tokens(llm: pagoda.LLM) -> list[int]:
    params = pagoda.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    return llm.generate([list(range(5, 22))], params)[0].outputs[0].token_ids


@pytest.mark.parametrize("model_type", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_a_second_start_loads_no_model_and_a_changed_file_is_another(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DISABLE)
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(record, "loaded_of_models", lambda names, loaded: None)
    file = file_of(build_tiny_model(model_type, num_hidden_layers=1), all_of("Q4_0"))
    path = file.write(tmp_path / "model.gguf")
    first = started(path)
    assert not first.compile_report.stored
    with monkeypatch.context() as patch:
        patch.setattr(compiled_model, "load_model", None)
        second = started(path)
    assert second.compile_report.stored and tokens(second) == tokens(first)
    mutant = file.tensor("blk.0.attn_q.weight")
    mutant.data = mutant.data[:-1] + bytes([mutant.data[-1] ^ 1])
    assert not started(file.write(path)).compile_report.stored
    mutant.data = mutant.data[:-1] + bytes([mutant.data[-1] ^ 1])
    file.metadata["llama.rope.freq_base" if model_type == "llama" else "qwen3moe.rope.freq_base"] = 9999.0
    assert not started(file.write(path)).compile_report.stored
