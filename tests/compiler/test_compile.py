"""compile_program: a second start takes the stored program, which gives the very same logits, and never a stale
one."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from torch_pagoda import LLM, SamplingParams
from torch_pagoda.compiler import CompileOptions, compile_program
from torch_pagoda.compiler import build as build_module
from torch_pagoda.compiler import compile as compile_module
from torch_pagoda.compiler.user_passes import register_pass, unregister_pass
from torch_pagoda.compiler.verify.self_check import check, compared_steps, reference_of_model
from torch_pagoda.compiler.warm_start.file import DISABLE, ProgramStore
from torch_pagoda.compiler.warm_start.identity import Identity
from torch_pagoda.compiler.warm_start.restore import StoredProgram
from torch_pagoda.passes import PassRecord
from torch_pagoda.runtime.ops.native import load_kernels

from tiny_models import build_tiny_model
from toy_lm import ToyLM, sdpa


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty store, in use."""
    load_kernels()  # those of all runs: the empty folder has none
    monkeypatch.delenv(DISABLE)
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path))
    return tmp_path / "programs"


@pytest.fixture
def no_compiler(monkeypatch):
    """From now on nothing can be compiled."""

    def forbid():
        def build(*args, **kwargs):
            raise AssertionError("compiled again")

        monkeypatch.setattr(build_module, "build_unpacked", build)

    return forbid


def logits(program, reference):
    return torch.cat([found.clone() for _, found, _ in compared_steps(program, reference)])


CASES = [
    ("llama", {}),
    ("llama", {"pack_weights": True}),
    ("llama", {"quantization": "int4", "verify": "off"}),
    ("llama", {"kv_cache_dtype": "int8"}),
    ("gpt2", {"pack_weights": True}),  # a tied head, transposed weights
    ("bloom", {}),  # slopes as a table
    ("gemma3_text", {"pack_weights": True}),  # windows, 1 + weight
    ("gpt_oss", {}),  # sinks, experts
    ("deepseek_v3", {}),  # keys and values of different sizes
    ("phi3", {}),
    ("olmo2", {"opt_level": 0}),
]


@pytest.mark.parametrize(("kind", "given"), CASES, ids=lambda x: str(x))
def test_second_start_takes_the_same_program(kind, given, no_compiler):
    options = CompileOptions(codegen="none", **given)
    reference = reference_of_model(build_tiny_model(kind))
    first = compile_program(build_tiny_model(kind), options)
    assert not first.report.stored
    expected = logits(first, reference)
    no_compiler()
    second = compile_program(build_tiny_model(kind), options)
    assert second.report.stored
    assert torch.equal(logits(second, reference), expected)
    assert second.report.verdict == first.report.verdict
    assert second.report.passes == first.report.passes
    assert set(second.report.seconds) <= {"load", "reference", "verify", "pack"}
    assert second.caches == first.caches
    assert (second.max_model_len, second.vocab_size) == (first.max_model_len, first.vocab_size)
    assert [t.shape for t in second.copied_weights] == [t.shape for t in first.copied_weights]


def test_longrope_keeps_where_it_starts_anew(no_compiler):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 1e4}
    rope["original_max_position_embeddings"] = 64
    settings = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    options = CompileOptions(codegen="none")
    first = compile_program(build_tiny_model("phi3", **settings), options)
    assert first.rope_switch == first.restart_length == 64
    no_compiler()
    second = compile_program(build_tiny_model("phi3", **settings), options)
    assert (second.rope_switch, second.restart_length) == (64, 64)


def test_stored_program_reads_the_weights_that_there_are(no_compiler):
    """In-place changes after loading reach it, as they do any program over a live module."""
    options = CompileOptions(codegen="none")
    compile_program(build_tiny_model("llama"), options)
    no_compiler()
    model = build_tiny_model("llama")
    program = compile_program(model, options)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    for _, found, expected in compared_steps(program, reference_of_model(model)):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_stale_program_is_found_when_it_is_loaded(monkeypatch, caplog):
    """Whatever the digest leaves out: here it leaves out everything."""
    monkeypatch.setattr(compile_module, "identity", lambda *args: Identity("0" * 64, {}))

    def with_gain(gain):
        return ToyLM(sdpa, finish=lambda logits: logits * gain + gain * logits.square())

    options = CompileOptions(codegen="none")
    assert not compile_program(with_gain(0.5), options).report.stored
    assert compile_program(with_gain(0.5), options).report.stored
    program = compile_program(with_gain(2.0), options)
    assert not program.report.stored
    assert "does not match the model" in caplog.text
    assert check(program, reference_of_model(with_gain(2.0))).ok
    assert compile_program(with_gain(2.0), options).report.stored, "the new one took its place"


def test_changed_weights_are_compiled_and_checked_anew():
    options = CompileOptions(codegen="none")
    compile_program(build_tiny_model("llama"), options)
    other = compile_program(build_tiny_model("llama", seed=1), options)
    assert not other.report.stored


def test_folded_constants_are_of_the_weights_that_there_are(monkeypatch):
    """A digest of samples may overlook a change of a large parameter; what was computed from it may not."""
    from torch_pagoda.compiler import compile as compile_module

    monkeypatch.setattr(compile_module, "contents_digest", lambda model: "the same")

    def attention(model, q, k, v, position_ids):
        return sdpa(model, q, k, v, position_ids) * torch.nn.functional.softplus(model.head.weight).mean()

    def model(gain):
        torch.manual_seed(0)
        toy = ToyLM(attention)
        with torch.no_grad():
            toy.head.weight.mul_(gain)
        return toy

    options = CompileOptions(codegen="none")
    first, again, other = (compile_program(model(gain), options) for gain in (1.0, 1.0, 2.0))
    assert first.copied_weights
    assert again.report.stored
    assert not other.report.stored


def refuse(folder, caplog, reason):
    assert reason in caplog.text
    assert not folder.exists()


def test_inductor_is_not_stored(folder):
    program = compile_program(build_tiny_model("llama"), CompileOptions(codegen="inductor"))
    assert program.report.codegen == "inductor"
    assert not folder.exists()


def test_registered_passes_are_not_stored(folder, caplog):
    register_pass("mine", lambda graph: PassRecord("mine"))
    try:
        with caplog.at_level(logging.INFO):
            compile_program(build_tiny_model("llama"), CompileOptions(codegen="none"))
    finally:
        unregister_pass("mine")
    refuse(folder, caplog, "the content of pass 'mine' is not known")


def test_programs_that_lost_a_pass_are_not_stored(folder, monkeypatch, caplog):
    from torch_pagoda.compiler import options
    from torch_pagoda.passes import Pass
    from torch_pagoda.passes.graph.attention_node import paged_attention_nodes

    def wrong(graph):
        for node in paged_attention_nodes(graph):
            node.args = (*node.args[:11], node.args[11] * 1.5, *node.args[12:])
        return PassRecord("wrong", matches=1)

    monkeypatch.setattr(options, "PASSES", (*options.PASSES, Pass("wrong", wrong, required=False)))
    program = compile_program(ToyLM(sdpa), CompileOptions(codegen="none"))
    assert [name for name, _ in program.report.dropped_passes] == ["wrong"]
    assert not folder.exists()


CANNOT_BE_TOLD = {
    "an iterator": (lambda model: setattr(model.model, "source", iter([1])), "list_iterator"),
    "a hook": (lambda model: model.model.norm.register_forward_hook(lambda *given: None), "model.norm has hooks"),
}


@pytest.mark.parametrize(("change", "reason"), CANNOT_BE_TOLD.values(), ids=CANNOT_BE_TOLD)
def test_modules_that_cannot_be_told_apart_are_not_stored(folder, caplog, change, reason):
    model = build_tiny_model("llama")
    change(model)
    with caplog.at_level(logging.INFO):
        compile_program(model, CompileOptions(codegen="none"))
    refuse(folder, caplog, reason)


class Settling(LlamaRotaryEmbedding):
    """Rotary frequencies that change at the first call."""

    def forward(self, x, position_ids):
        if not self.settled:
            self.settled = True
            self.inv_freq *= 1.01
        return super().forward(x, position_ids)


def test_modules_whose_tensors_change_at_the_first_call_are_not_stored(folder, caplog):
    model = build_tiny_model("llama")
    model.model.rotary_emb.settled = False
    model.model.rotary_emb.__class__ = Settling
    with caplog.at_level(logging.INFO):
        assert compile_program(model, CompileOptions(codegen="none")).report.verdict.ok
    refuse(folder, caplog, "the first call changed tensors of the module")


def test_every_pass_and_dumps_look_at_the_passes(folder, monkeypatch, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        compile_program(build_tiny_model("llama"), CompileOptions(codegen="none", verify="every-pass"))
        monkeypatch.setenv("PAGODA_DUMP", str(tmp_path / "dump"))
        compile_program(build_tiny_model("llama"), CompileOptions(codegen="none"))
    assert caplog.text.count("its passes must be inspected") == 2
    refuse(folder, caplog, "its passes must be inspected")


def test_disabled(folder, monkeypatch):
    monkeypatch.setenv(DISABLE, "1")
    compile_program(build_tiny_model("llama"), CompileOptions(codegen="none"))
    assert not folder.exists()


def test_programs_that_do_not_fit_are_replaced(folder, caplog):
    options = CompileOptions(codegen="none")
    compile_program(build_tiny_model("llama"), options)
    (path,) = folder.iterdir()
    store, key = ProgramStore(folder), path.stem
    data = store.load(key, StoredProgram)
    assert data is not None
    store.save(key, replace(data, weights=dict.fromkeys(data.weights, "no.such.tensor")))
    with caplog.at_level(logging.INFO):
        assert not compile_program(build_tiny_model("llama"), options).report.stored
    assert "no tensor 'no.such.tensor'" in caplog.text
    store.save(key, replace(data, graph=[("call_function", "a", "operator aten.no_such.default", ("tuple",), {})]))
    assert not compile_program(build_tiny_model("llama"), options).report.stored
    assert "there is no 'operator aten.no_such.default'" in caplog.text
    assert compile_program(build_tiny_model("llama"), options).report.stored


def test_llm_takes_it(tmp_path, no_compiler):
    build_tiny_model("llama").save_pretrained(tmp_path / "model")
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    found = []
    for _ in range(2):
        llm = LLM(str(tmp_path / "model"), max_model_len=64)
        found.append((llm.compile_report.stored, llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids))
        no_compiler()
    assert [stored for stored, _ in found] == [False, True]
    assert found[0][1] == found[1][1]
