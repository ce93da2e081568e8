"""A second start from a folder, in a process of its own: neither transformers' models nor Dynamo are imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_pagoda.compiler.store.program_store import DISABLE

from tiny_models import build_tiny_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/tiny-pydoc"
SCRIPT = """
import json, sys
from torch_pagoda import LLM, SamplingParams
llm = LLM(sys.argv[1], codegen="none", max_num_seqs=4, max_model_len=64)
out = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=8, temperature=0.0))
code = [name for name in sys.modules if name.startswith("transformers.models.") and "modeling_llama" in name]
slow = {"torch._dynamo", "sympy", "torch.distributed.tensor", "transformers.modeling_utils"}
code += sorted(slow.intersection(sys.modules))
assert llm.tokenizer is not None
params = llm.get_default_sampling_params()
print(json.dumps([llm.compile_report.stored, code, out[0].outputs[0].token_ids, params.temperature, params.top_p]))
"""


def started(folder, cache):
    environment = {k: v for k, v in os.environ.items() if k != DISABLE} | {"TORCH_PAGODA_CACHE": str(cache)}
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def model():
    model = build_tiny_model("llama", num_hidden_layers=1)
    model.generation_config.update(temperature=0.25, do_sample=True, eos_token_id=[255], pad_token_id=0)
    return model


def test_second_start_imports_no_model(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    for file in (EXAMPLE / "tokenizer.json", EXAMPLE / "tokenizer_config.json"):
        shutil.copy(file, tmp_path / "model")
    first = started(tmp_path / "model", tmp_path / "cache")
    second = started(tmp_path / "model", tmp_path / "cache")
    assert (first[0], bool(first[1])) == (False, True)
    assert (second[0], second[1]) == (True, [])
    expected = model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8, do_sample=False)[0, 4:].tolist()
    assert first[2] == second[2] == expected
    assert first[3:] == second[3:] and second[3] == 0.25

    # The same folder with another weight: its own class says what is right.
    with torch.no_grad():
        model.model.norm.weight.neg_()
    model.save_pretrained(tmp_path / "model")
    third = started(tmp_path / "model", tmp_path / "cache")
    expected = model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=8, do_sample=False)[0, 4:].tolist()
    assert bool(third[1]) and third[2] == expected != second[2]
