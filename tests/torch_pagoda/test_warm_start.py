"""A second start from a folder, in a process of its own: neither transformers' models nor Dynamo are imported, and no
garbage is looked for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_pagoda as pagoda
from torch_pagoda.compiler.warm_start import record
from torch_pagoda.compiler.warm_start.file import DISABLE
from torch_pagoda.runtime.ops.native import load_kernels

from tiny_models import build_tiny_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/tiny-pydoc"
OPTIONS = {"codegen": "none", "max_num_seqs": 4, "max_model_len": 64}
PROMPT = [5, 6, 7, 8]
SCRIPT = f"""
import gc, json, sys
import torch
exec(sys.argv[2])
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
from torch_pagoda import LLM, SamplingParams
llm = LLM(sys.argv[1], **{OPTIONS})
gc.callbacks.clear()
out = llm.generate([{PROMPT}], SamplingParams(max_tokens=8, temperature=0.0))
code = [name for name in sys.modules if name.startswith("transformers.models.") and "modeling_llama" in name]
slow = {{"torch._dynamo", "sympy", "torch.distributed.tensor", "transformers.modeling_utils"}}
code += sorted(slow.intersection(sys.modules)) + collections
assert llm.tokenizer is not None
params = llm.get_default_sampling_params()
print(json.dumps([llm.compile_report.stored, code, out[0].outputs[0].token_ids, params.temperature, params.top_p]))
"""


@pytest.fixture(autouse=True)
def compile_once():
    """Takes the place of the fixture that compiles without the store."""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A store of the test's own beside the kernels of this process, which is as if it had not loaded the model's
    code."""
    library = load_kernels()
    assert library is not None
    built = Path(library._name).resolve()
    (tmp_path / "cache/kernels").mkdir(mode=0o700, parents=True)
    for file in built.parent.glob(f"{built.stem}*"):
        shutil.copy(file, tmp_path / "cache/kernels")
    monkeypatch.delenv(DISABLE)
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(record, "loaded_of_models", lambda names, loaded: None)
    return tmp_path / "cache"


def started(folder):
    """What a start in this process says: whether the program was stored, tokens, two default parameters."""
    llm = pagoda.LLM(folder, **OPTIONS)
    (output,) = llm.generate([PROMPT], pagoda.SamplingParams(max_tokens=8, temperature=0.0))
    params = llm.get_default_sampling_params()
    return [llm.compile_report.stored, output.outputs[0].token_ids, params.temperature, params.top_p]


def started_anew(folder, before=""):
    """What a start in a process of its own says that runs some code before, and what was slow: modules that it
    imported, and collections."""
    command = [sys.executable, "-c", SCRIPT, str(folder), before]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    stored, code, *rest = json.loads(result.stdout.splitlines()[-1])
    return [stored, *rest], code


@pytest.fixture(scope="module")
def model():
    model = build_tiny_model("llama", num_hidden_layers=1)
    model.generation_config.update(temperature=0.25, do_sample=True, eos_token_id=[255], pad_token_id=0)
    return model


def save_with_tokenizer(model, folder):
    model.save_pretrained(folder)
    for file in (EXAMPLE / "tokenizer.json", EXAMPLE / "tokenizer_config.json"):
        shutil.copy(file, folder)


def answer(model):
    return model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[0, 4:].tolist()


@pytest.mark.usefixtures("cache")
def test_second_start_imports_no_model(model, tmp_path):
    save_with_tokenizer(model, tmp_path / "model")
    # Not in this process: what other tests left in it may be no concern of the second start's.
    first, _ = started_anew(tmp_path / "model")
    second, code = started_anew(tmp_path / "model")
    assert (first[0], second[0], code) == (False, True, [])
    assert first[1:] == second[1:] and second[1] == answer(model) and second[2] == 0.25

    # The same folder with another weight: its own class says what is right.
    with torch.no_grad():
        model.model.norm.weight.neg_()
    model.save_pretrained(tmp_path / "model")
    third = started(tmp_path / "model")
    assert not third[0] and third[1] == answer(model) != second[1]


@pytest.mark.usefixtures("cache")
def test_a_start_is_not_served_what_another_process_patched(model, tmp_path):
    save_with_tokenizer(model, tmp_path / "model")
    patched, _ = started_anew(
        tmp_path / "model", "from transformers.activations import ACT2FN; ACT2FN['silu'] = torch.nn.Hardtanh"
    )
    first, _ = started_anew(tmp_path / "model")
    assert not first[0] and first[1] == answer(model) != patched[1]
    # Names that a script imports bring no model.
    second, code = started_anew(tmp_path / "model", "from transformers import AutoModelForCausalLM, AutoTokenizer")
    assert second == [True, *first[1:]] and code == []


def test_nothing_is_recorded_where_models_were_loaded_before(model, cache, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.delenv(DISABLE)
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(cache))
    model.save_pretrained(tmp_path / "model")
    assert started(tmp_path / "model")[1] == answer(model)
    assert list((cache / "programs").iterdir()) and not list((cache / "programs").glob("checkpoint-*"))
