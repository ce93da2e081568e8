"""Stored programs that are not as they were written: none is loaded."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from torch_pagoda.compiler import CompileOptions, compile_program
from torch_pagoda.compiler.warm_start.file import DISABLE, ProgramStore
from torch_pagoda.compiler.warm_start.restore import Outdated, StoredProgram, restore
from torch_pagoda.compiler.weights.tensor_contents import module_tensors
from torch_pagoda.runtime.ops.native import load_kernels

from tiny_models import build_tiny_model


def model():
    return build_tiny_model("gpt2", num_hidden_layers=1)


def model_with_state():
    return build_tiny_model("falcon_h1", num_hidden_layers=1)


def stored(folder, model, **options):
    """The content of the file of a model's program, and its key."""
    load_kernels()  # those of all runs: the empty folder has none
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(DISABLE)
        patch.setenv("TORCH_PAGODA_CACHE", str(folder))
        compile_program(model, CompileOptions(codegen="none", verify="off", **options))
    (file,) = (folder / "programs").iterdir()
    return file.read_bytes(), file.stem


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("cache"), model(), quantization="int8")


@pytest.fixture(scope="module")
def written_with_state(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("cache"), model_with_state())


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a content under a key; how often something was parsed is in ``parsed``."""
    store = ProgramStore(tmp_path / "programs")
    store.folder.mkdir(mode=0o700)
    parse = torch.load

    def counted(*args, **kwargs):
        parsed.append(1)
        return parse(*args, **kwargs)

    def load(content, key):
        (store.folder / f"{key}.program").write_bytes(content)
        return store.load(key, StoredProgram)

    parsed = load.parsed = []
    monkeypatch.setattr(torch, "load", counted)
    return load


def test_no_flipped_bit_is_parsed(written, load):
    content, key = written
    draw = random.Random(0)
    bits = [*range(8 * 64), *(draw.randrange(8 * len(content)) for _ in range(1000))]
    for bit in bits:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        assert load(flipped, key) is None, bit
    assert not load.parsed
    assert load(content, key) is not None and load.parsed


def test_other_lengths_and_keys_are_not_parsed(written, load):
    content, key = written
    for size in (0, 1, 16, 17, 48, 49, 50, len(content) // 2, len(content) - 1):
        assert load(content[:size], key) is None
    assert load(content + b"\0", key) is None
    assert load(content + content, key) is None
    assert load(content, f"{key[:-1]}g") is None
    assert not load.parsed


def parsed(folder, content, key):
    store = ProgramStore(folder / "programs")
    store.folder.mkdir(mode=0o700)
    (store.folder / f"{key}.program").write_bytes(content)
    return store.load(key, StoredProgram)


@pytest.fixture
def data(written, tmp_path):
    return parsed(tmp_path, *written)


@pytest.fixture
def data_with_state(written_with_state, tmp_path):
    return parsed(tmp_path, *written_with_state)


def test_what_was_written_with_states_is_taken(data_with_state):
    program = restore(data_with_state, module_tensors(model_with_state()))
    assert {type(spec).__name__ for spec in program.caches} == {"CacheSpec", "StateSpec"}


def test_what_was_written_is_taken(data):
    program = restore(data, module_tensors(model()))
    assert program.report.stored is False and program.report.passes[0].name
    with pytest.raises(Outdated, match="no tensor"):
        restore(replace(data, weights=dict.fromkeys(data.weights, "no.such.tensor")), module_tensors(model()))
