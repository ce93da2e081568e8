"""Stored programs that are not as they were written: none is loaded, and none that contradicts itself is run."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from torch_pagoda.compiler import CompileOptions, compile_program
from torch_pagoda.compiler.fingerprint.tensor_contents import module_tensors
from torch_pagoda.compiler.store.program_store import DISABLE, ProgramStore
from torch_pagoda.compiler.store.stored_program import Outdated, restore
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
        return store.load(key)

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
    return store.load(key)


@pytest.fixture
def data(written, tmp_path):
    return parsed(tmp_path, *written)


@pytest.fixture
def data_with_state(written_with_state, tmp_path):
    return parsed(tmp_path, *written_with_state)


def put(*path):
    """Replaces what lies at the end of ``path`` by its last item, in a copy."""

    def change(data):
        data = copy.deepcopy(data)
        *keys, last, new = path
        place = data
        for step in keys:
            place[step] = list(place[step]) if isinstance(place[step], tuple) else place[step]
            place = place[step]
        place[last] = new(place[last]) if callable(new) else new
        return data

    return change


def of_weight(new):
    """Replaces the view, or name, that the first packed input receives."""

    def change(data):
        (name, (weight, view)) = next((n, w) for n, w in data["weights"].items() if not isinstance(w, str))
        return put("weights", name, new(weight, *view))(data)

    return change


def cache(**changes):
    return put("linkage", "caches", 0, lambda spec: {**spec, **changes})


INT8 = {
    "bits": 8,
    "group_size": 0,
    "input_bits": 8,
    "whole_rows": False,
    "zeros": False,
    "code": "int",
    "input_scale": None,
}
REFUSED = {
    "a view that reaches too far": (
        of_weight(lambda w, sizes, strides: (w, (sizes, (strides[0] + 1, strides[1])))),
        "not a view",
    ),
    "a view of fewer elements": (of_weight(lambda w, sizes, strides: (w, ((1, *sizes[1:]), strides))), "not a view"),
    "a view backwards": (of_weight(lambda w, sizes, strides: (w, (sizes, (-1, 1)))), "not a view"),
    "a view of other dimensions": (of_weight(lambda w, sizes, strides: (w, (sizes, strides[:1]))), "not a view"),
    "a view of words": (of_weight(lambda w, sizes, strides: (w, ("ab", strides))), "weights"),
    "a weight that is a number": (of_weight(lambda w, sizes, strides: 3), "weights"),
    "a missing part": (lambda data: {k: v for k, v in data.items() if k != "report"}, "report"),
    "a missing field": (put("linkage", lambda d: {k: v for k, v in d.items() if k != "read"}), "no Linkage"),
    "another field": (lambda d: {**d, "linkage": {**d["linkage"], "more": 1}}, "no Linkage"),
    "inputs in another order": (put("linkage", "inputs", lambda x: x[::-1]), "not the graph's"),
    "an input without a tensor": (
        lambda d: {**d, "weights": dict(list(d["weights"].items())[1:])},
        "nothing, or two",
    ),
    "an input with two": (put("linkage", "token_counts", lambda x: (*x, "input_ids")), "nothing, or two|two things"),
    "what no step has": (put("linkage", "step_inputs", lambda x: (*x, "__class__")), "a step has no"),
    "no heads": (cache(num_kv_heads=0), "heads and sizes"),
    "more heads than there are bytes": (cache(num_kv_heads=1 << 60), "heads and sizes"),
    "half a head": (cache(num_kv_heads=1.5), "num_kv_heads is 1.5, no int"),
    "a head that is true": (cache(num_kv_heads=True), "num_kv_heads is True, no int"),
    "a window backwards": (cache(sliding_window=-1), "window of -1"),
    "a group that there is not": (cache(group=7), "of group 7"),
    "caches of words": (cache(dtype="torch.float32"), "no dtype"),
    "caches of truths": (cache(dtype=torch.bool), "holds torch.bool"),
    "one cache too many": (put("linkage", "caches", lambda x: [*x, x[0]]), "not the graph's"),
    "another device": (put("linkage", "device", "cuda"), "'cuda'; programs are kept for the CPU"),
    "no logits": (put("linkage", "vocab_size", 0), "0 columns"),
    "no positions": (put("linkage", "max_model_len", 0), "0 positions"),
    "blocks of a size": (put("linkage", "block_size", 16), "blocks of any size"),
    "what is read and no input": (put("linkage", "read", lambda x: [*x, "no_input"]), "not an input"),
    "rows of what there is not": (put("linkage", "merged", {"input_ids": ("nothing",)}), "."),
    "what is packed and no weight": (put("linkage", "packed", 0, lambda p: {**p, "name": "input_ids"}), "no weight"),
    "three bits": (
        put(
            "linkage",
            "packed",
            0,
            lambda p: {
                **p,
                "quantization": {**INT8, "bits": 3},
            },
        ),
        "bits=3",
    ),
    "inputs of half an offset": (
        put(
            *("linkage", "packed", 0),
            lambda p: {**p, "quantization": {**INT8, "input_scale": {"scale": 0.5, "offset": 0.5}}},
        ),
        "input_scale.offset is 0.5, no int",
    ),
    "inputs of no scale": (
        put(
            *("linkage", "packed", 0),
            lambda p: {**p, "quantization": {**INT8, "input_scale": {"scale": float("nan"), "offset": 0}}},
        ),
        "input_scale=nan",
    ),
    "what is folded of nothing": (put("linkage", "folded", ("nothing",)), "not a constant"),
    "digests of nothing": (lambda d: {**d, "digests": {"x": "0"}}, "the digests are not"),
    "a tensor elsewhere": (lambda d: {**d, "tensors": {"x": torch.ones(1, device="meta")}}, "tensors"),
    "a sparse tensor": (lambda d: {**d, "tensors": {"x": torch.ones(1).to_sparse()}}, "tensors"),
    "a length in words": (put("linkage", "restart_length", "64"), "restart_length is '64', no"),
    "a switch of keys at no length": (put("linkage", "rope_switch", 0), "beyond 0 tokens"),
    "a report of something else": (put("report", "verdict", 3), "verdict"),
    "a report of the wrong types": (
        put("report", "passes", 0, lambda p: {**p, "matches": "many"}),
        "matches is 'many', no int",
    ),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_programs_that_contradict_themselves_are_refused(data, change, words):
    with pytest.raises(ValueError, match=words):
        restore(change(data), module_tensors(model()))


def state(**changes):
    return put("linkage", "caches", lambda specs: [{**s, **changes} if "shape" in s else s for s in specs])


REFUSED_STATES = {
    "a group among the keys and values": (
        state(group=0),
        r"states are of groups \[0\], those of keys and values are 1",
    ),
    "a group beyond": (state(group=2), r"states are of groups \[2\]"),
    "another name": (state(name="key_cache"), "is called 'key_cache'"),
    "no size": (state(shape=(0, 4)), r"has a state of \(0, 4\)"),
    "half a size": (state(shape=(1.5, 4)), "no int"),
    "more than there are bytes": (state(shape=(1 << 60, 4)), "has a state of"),
    "no shape": (state(shape=()), r"has a state of \(\)"),
    "too many dims": (state(shape=(1,) * 9), "has a state of"),
    "another dtype": (state(dtype=torch.bool), "holds torch.bool"),
    "other names of inputs": (put("linkage", "caches", lambda specs: specs[::-1]), "not the graph's"),
}


@pytest.mark.parametrize(("change", "words"), REFUSED_STATES.values(), ids=REFUSED_STATES)
def test_states_that_contradict_themselves_are_refused(data_with_state, change, words):
    with pytest.raises(ValueError, match=words):
        restore(change(data_with_state), module_tensors(model_with_state()))


def test_what_was_written_with_states_is_taken(data_with_state):
    program = restore(data_with_state, module_tensors(model_with_state()))
    assert {type(spec).__name__ for spec in program.caches} == {"CacheSpec", "StateSpec"}


def test_what_was_written_is_taken(data):
    program = restore(data, module_tensors(model()))
    assert program.report.stored is False and program.report.passes[0].name
    with pytest.raises(Outdated, match="no tensor"):
        restore(put("weights", next(iter(data["weights"])), "no.such.tensor")(data), module_tensors(model()))
