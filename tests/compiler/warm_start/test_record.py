"""Starts by the record of a checkpoint: what they take, and everything that makes them load the model's class."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto import auto_mappings, modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from torch_pagoda.compiler import CheckpointFiles, CompileOptions, compile_program, program_of_checkpoint
from torch_pagoda.compiler.link import linker, packed_rows
from torch_pagoda.compiler.live_module.describer import CannotIdentify
from torch_pagoda.compiler.verify.self_check import check, reference_of_model
from torch_pagoda.compiler.warm_start import record
from torch_pagoda.compiler.warm_start.file import DISABLE, open_store
from torch_pagoda.compiler.warm_start.framework_state import changed_module, framework_states, loaded_of_models
from torch_pagoda.compiler.warm_start.graph_data import CannotStore
from torch_pagoda.compiler.warm_start.identity import Identity

from tiny_models import build_tiny_model

FACTS = {"config": {"eos_token_id": [3, 4]}, "generation_config": {"temperature": 0.5}}
OPTIONS = CompileOptions(codegen="none", pack_weights=True)


def files(folder, dtype=None, weights=None):
    texts = {name: (folder / name).read_text() for name in ("config.json", "generation_config.json")}
    return CheckpointFiles([str(folder / "model.safetensors")] if weights is None else weights, texts, dtype)


def saved(folder, name="llama", **sizes):
    """A checkpoint, its program and record in the store of the environment."""
    build_tiny_model(name, num_hidden_layers=1, **sizes).save_pretrained(folder)
    return folder


def compiled(folder, options=OPTIONS, dtype=None):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto").eval().requires_grad_(False)
    given = files(folder, dtype)
    compile_program(model, options, owns_weights=True, files=given, loaded=frozenset())


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with a checkpoint, beside a cache that knows it."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(DISABLE)
        patch.setenv("TORCH_PAGODA_CACHE", str(folder / "cache"))
        compiled(saved(folder / "checkpoint"))
    return folder


@pytest.fixture
def start(kept, monkeypatch):
    """Starts from the kept checkpoint, as in a process that has not loaded the model's code."""
    monkeypatch.delenv(DISABLE)
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(kept / "cache"))
    monkeypatch.setattr(record, "loaded_of_models", lambda names, loaded: None)
    # What is discarded is kept for the next test.
    monkeypatch.setattr("torch_pagoda.compiler.warm_start.file.ProgramStore.discard", lambda *_: None)

    def start(options=OPTIONS, **changes):
        return program_of_checkpoint(replace(files(kept / "checkpoint"), **changes), options)

    return start


def record_name(kept):
    (path,) = (kept / "cache" / "programs").glob("checkpoint-*.program")
    return path.stem


@pytest.fixture
def edit(kept, start, monkeypatch):
    """Changes what is kept under a key, for one test."""
    load = type(open_store()).load

    def edit(change, of_record=True):
        def changed(store, key, kind):
            data = load(store, key, kind)
            return change(data) if (key == record_name(kept)) is of_record else data

        monkeypatch.setattr("torch_pagoda.compiler.warm_start.file.ProgramStore.load", changed)

    return edit


def test_a_program_is_found_by_its_checkpoint(kept, start):
    program, configs = start()
    model = AutoModelForCausalLM.from_pretrained(kept / "checkpoint").eval()
    assert program.report.stored and record.facts_of(configs) == record.facts_of(model)
    assert check(program, reference_of_model(model)).ok


def test_rows_of_merged_matrices_are_packed_where_they_lie(tmp_path, monkeypatch):
    monkeypatch.delenv(DISABLE)
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(record, "loaded_of_models", lambda names, loaded: None)
    folder = saved(tmp_path / "checkpoint")
    compiled(folder, dtype=torch.bfloat16)
    packed, pack = [], packed_rows.pack_weight
    monkeypatch.setattr(linker, "merge_rows", lambda *_: pytest.fail("rows were copied"))
    monkeypatch.setattr(packed_rows, "pack_weight", lambda *weights: packed.append(len(weights)) or pack(*weights))
    program, _ = program_of_checkpoint(files(folder, torch.bfloat16), OPTIONS)
    assert program.report.stored and sorted(packed) == [1, 1, 1, 2, 3], "q, k and v; gate and up"


LLAMA = "transformers.models.llama.modeling_llama"


def test_code_that_is_loaded_may_have_been_changed():
    importlib.import_module(LLAMA)
    with pytest.raises(record.Outdated, match=f"{LLAMA} is loaded"):
        record.check_record(record.Record("", {}, {}, {LLAMA: ""}, {}, [], {}))
    assert loaded_of_models(["transformers.models.auto.modeling_auto"], sys.modules) is None, "which is looked at"


@pytest.mark.parametrize(
    ("source", "loaded", "words"),
    [
        (LLAMA, {LLAMA}, f"{LLAMA} was loaded before"),
        ("safetensors.torch", frozenset(), "its code is in safetensors.torch, too"),
    ],
    ids=["loaded before", "another package's"],
)
def test_nothing_is_recorded_of_code_that_may_be_anything(kept, source, loaded, words):
    model = AutoModelForCausalLM.from_pretrained(kept / "checkpoint").eval()
    found = Identity("", {source: ""})
    with pytest.raises(CannotStore, match=words):
        record.describe_start(model, found, files(kept / "checkpoint"), FACTS, loaded)


def test_a_record_names_all_files_that_loading_runs_and_what_was_loaded_before(kept, start):
    model = AutoModelForCausalLM.from_pretrained(kept / "checkpoint").eval()
    loaded = {"torch.nn.functional", "transformers.activations", "json"}
    made = record.describe_start(model, Identity("", {}), files(kept / "checkpoint"), FACTS, loaded)
    assert made.before == ["torch.nn.functional", "transformers.activations"]
    decide = "conversion_mapping core_model_loading generation.configuration_utils models.auto.modeling_auto".split()
    assert {f"transformers.{name}" for name in decide} <= made.sources.keys()
    assert not any(name.startswith("transformers.models.llama") for name in made.sources)
    for name in ("conversion_mapping", "models.auto.auto_factory"):
        with pytest.raises(record.Outdated, match="the source of"):
            record.check_record(replace(made, sources={**made.sources, f"transformers.{name}": "0" * 64}))


@pytest.fixture
def another_class(monkeypatch):
    """One that transformers would load in the place of its own Llama."""
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "llama", transformers.GPT2Config)


@pytest.mark.usefixtures("another_class")
def test_classes_that_were_registered(kept, start, caplog, monkeypatch, tmp_path):
    with caplog.at_level(logging.INFO, "torch_pagoda"):
        assert start() is None
        monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path))
        model = transformers.LlamaForCausalLM.from_pretrained(kept / "checkpoint").eval()
        with pytest.raises(CannotIdentify, match="GPT2Config is registered"):
            record.describe_start(model, Identity("", {}), files(kept / "checkpoint"), FACTS, frozenset())
    assert "GPT2Config is registered" in caplog.text


def test_a_function_is_what_it_was_when_dynamo_has_wrapped_it(states, monkeypatch):
    """Importing Dynamo does that to ``torch.manual_seed``."""
    monkeypatch.setattr(nn.functional, "silu", torch._disable_dynamo(nn.functional.silu))
    assert changed_module(states) is None


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as it is", "converted"])
def test_tied_and_converted_weights(tmp_path, monkeypatch, dtype):
    monkeypatch.delenv(DISABLE)
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(record, "loaded_of_models", lambda names, loaded: None)
    folder = saved(tmp_path / "checkpoint", "gpt2")
    options = CompileOptions(codegen="none", quantization="int8")
    compiled(folder, options, dtype)
    program, _ = program_of_checkpoint(files(folder, dtype), options)
    assert program.report.stored
    other = torch.float16 if dtype else torch.bfloat16
    assert program_of_checkpoint(files(folder, other), options) is None


def test_a_checkpoint_with_other_weights_is_another(kept, start, tmp_path):
    tensors = load_file(kept / "checkpoint" / "model.safetensors")
    tensors["model.norm.weight"][7] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert start() is not None
    assert start(weights=[str(tmp_path / "model.safetensors")]) is None


def test_a_torn_file_is_for_the_loader_to_refuse(kept, start, tmp_path, caplog):
    content = (kept / "checkpoint" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with caplog.at_level(logging.INFO, "torch_pagoda"):
        assert start(weights=[str(tmp_path / "model.safetensors")]) is None
    assert "cannot be mapped" in caplog.text


def test_other_texts_and_options_are_others(kept, start, monkeypatch):
    config = files(kept / "checkpoint").texts["config.json"]
    assert start(texts={"config.json": config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-03')}) is None
    assert start(replace(OPTIONS, kv_cache_dtype="int8")) is None
    assert start(replace(OPTIONS, verify="off")) is None
    monkeypatch.setenv("TRANSFORMERS_SOMETHING", "1")
    assert start() is None


CHANGES = {
    "another source": ({"sources": {"transformers.models.llama.modeling_llama": "0" * 64}}, "is another"),
    "a source that is gone": ({"sources": {"transformers.models.llama.no_such_file": "0" * 64}}, "is another"),
    "a module that is not loaded here": ({"before": ["transformers.pagoda_patches"]}, "was loaded before the model"),
    "a module of the framework": ({"states": {"torch.nn.functional": "0" * 64}}, "torch.nn.functional was changed"),
    "a weight that is gone": ({"weights": {}}, "nothing is recorded"),
    "a weight of another name": ({"weights": {"model.norm.weight": ("no.such", None)}}, "nothing|no 'no.such'"),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_a_record_that_does_not_hold(start, edit, caplog, change, words):
    edit(lambda made: replace(made, **change))
    with caplog.at_level(logging.INFO, "torch_pagoda"):
        assert start() is None
    assert re.search(words, caplog.text)


def test_logits_are_compared_with_those_that_the_model_gave(start, edit, caplog):
    def louder(data):
        logits = [rows * 1.05 for rows in data.reference.logits]
        return replace(data, reference=replace(data.reference, logits=logits))

    edit(louder, of_record=False)
    assert start() is None
    assert "standard deviations" in caplog.text


@pytest.fixture(scope="module")
def states():
    return framework_states()


def louder(function):
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


def test_what_transformers_registers_for_images_as_it_loads_does_not_count(states, monkeypatch):
    monkeypatch.setitem(auto_mappings.IMAGE_PROCESSOR_MAPPING_NAMES, "llama", "PixtralImageProcessor")
    assert changed_module(states) is None


def edited(patch, function):
    """What is loaded of a file whose numbers were others when it was."""
    constants = tuple(f"{constant} before" for constant in function.__code__.co_consts)
    patch.setattr(function, "__code__", function.__code__.replace(co_consts=constants))


PATCHES = {
    "a function of torch": lambda m: m.setattr(nn.functional, "silu", louder(nn.functional.silu)),
    "another one of torch's": lambda m: m.setattr(nn.functional, "silu", nn.functional.gelu),
    "a function that is not traced": lambda m: m.setattr(
        nn.functional, "silu", torch._disable_dynamo(louder(nn.functional.silu))
    ),
    "a C function": lambda m: m.setattr(nn.functional, "linear", torch.matmul),
    "a method": lambda m: m.setattr(nn.Linear, "forward", louder(nn.Linear.forward)),
    "another method of torch's": lambda m: m.setattr(nn.Linear, "forward", nn.Identity.forward),
    "an activation": lambda m: m.setitem(ACT2FN, "silu", nn.GELU),
    "an activation's argument": lambda m: m.setitem(ACT2FN, "gelu_10", (dict.get(ACT2FN, "gelu_10")[0], {"max": 9})),
    "an attention function": lambda m: m.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", louder(print)),
    "a default": lambda m: m.setattr(nn.functional.layer_norm, "__defaults__", (None, None, 1.0)),
    "another attention of transformers'": lambda m: m.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    ),
    "a number": lambda m: m.setattr(transformers.modeling_rope_utils, "PAGODA_TEST_NUMBER", 3, raising=False),
    "a config's method": lambda m: m.setattr(transformers.PreTrainedConfig, "to_dict", louder(print)),
    "a classmethod of a config": lambda m: m.setattr(
        transformers.PreTrainedConfig, "from_pretrained", classmethod(louder(print))
    ),
    "what makes a config": lambda m: m.setattr(transformers.PreTrainedConfig, "__init__", louder(print)),
    "the loader": lambda m: m.setattr(AutoModelForCausalLM, "from_pretrained", classmethod(louder(print))),
    "another loader of transformers'": lambda m: m.setattr(
        AutoModelForCausalLM, "from_pretrained", vars(transformers.AutoModel)["from_config"]
    ),
    "the class of a model type": lambda m: m.setitem(
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "llama", "GemmaForCausalLM"
    ),
    "a function's file, edited since": lambda m: edited(m, transformers.modeling_rope_utils._compute_yarn_parameters),
    "a method's file, edited since": lambda m: edited(m, nn.RMSNorm.forward),
    "hooks for all modules": lambda m: m.setitem(nn.modules.module._global_forward_hooks, 1, print),
}


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_changes_of_the_framework_are_seen(states, monkeypatch, patch):
    assert changed_module(states) is None
    patch(monkeypatch)
    with suppress(CannotIdentify):
        assert changed_module(states) is not None


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as it is", "converted"])
def test_large_weights_in_several_files(tmp_path, monkeypatch, caplog, dtype):
    """Weights of which samples are read, a vocabulary of 150k, shards; a change at a sampled place makes another
    checkpoint, and one elsewhere shows in the logits."""
    monkeypatch.delenv(DISABLE)
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(record, "loaded_of_models", lambda names, loaded: None)
    folder = tmp_path / "checkpoint"
    build_tiny_model("llama", num_hidden_layers=1, vocab_size=151_936).save_pretrained(folder, max_shard_size="30MB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1

    def of(weights=shards):
        return replace(files(folder, dtype, weights=[]), weights=[str(path) for path in weights])

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto").eval().requires_grad_(False)
    compile_program(model, OPTIONS, owns_weights=True, files=of(), loaded=frozenset())

    def started_with_row(row, change):
        """The start of a checkpoint with another row in its head."""
        tensors = load_file(holder)
        tensors["lm_head.weight"][row] += change
        save_file(tensors, tmp_path / holder.name, {"format": "pt"})
        return program_of_checkpoint(of([tmp_path / p.name if p == holder else p for p in shards]), OPTIONS)

    (holder,) = (path for path in shards if "lm_head.weight" in load_file(path))
    assert program_of_checkpoint(of(), OPTIONS)[0].report.stored
    assert started_with_row(0, 1.0) is None and "standard deviations" not in caplog.text
    assert started_with_row(1000, 1.0) is None and "standard deviations" in caplog.text


def test_nothing_is_recorded_of_what_a_file_does_not_hold(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv(DISABLE)
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path / "cache"))
    folder = saved(tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    model.model.norm.weight.data[3] += 1
    with caplog.at_level(logging.INFO, "torch_pagoda"):
        compile_program(model, OPTIONS, files=files(folder), loaded=frozenset())
    assert "no tensor that is 'model.norm.weight'" in caplog.text
    assert not list((tmp_path / "cache" / "programs").glob("checkpoint-*"))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_that_transformers_merges_are_found_again(name, tmp_path, monkeypatch, caplog):
    monkeypatch.delenv(DISABLE)
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(record, "loaded_of_models", lambda names, loaded: None)
    folder = saved(tmp_path / "checkpoint", name)
    compiled(folder)
    program, _ = program_of_checkpoint(files(folder), OPTIONS)
    assert program.report.stored
    assert check(program, reference_of_model(AutoModelForCausalLM.from_pretrained(folder).eval())).ok
    load = type(open_store()).load

    def exchanged(store, key, kind):
        """What is kept, with the first two experts of each layer in each other's place."""
        data = load(store, key, kind)
        if kind is record.Record:
            stored = {n: replace(s, rows=(s.rows[1], s.rows[0], *s.rows[2:])) for n, s in data.stored.items()}
            data = replace(data, stored=stored)
        return data

    monkeypatch.setattr("torch_pagoda.compiler.warm_start.file.ProgramStore.load", exchanged)
    assert program_of_checkpoint(files(folder), OPTIONS) is None
    assert "standard deviations" in caplog.text
