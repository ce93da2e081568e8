"""build_program: exact programs, refusals with a reason, and the self-check's fallback."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from torch_pagoda import passes
from torch_pagoda.compiler import CompileOptions, UnsupportedModel, build, options, pipeline
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.pass_runs import PassError
from torch_pagoda.compiler.verify.graph_check import check_own_weights
from torch_pagoda.compiler.verify.long_windows import check_long_windows
from torch_pagoda.compiler.verify.self_check import check, reference_of_model
from torch_pagoda.passes import PASSES, Pass, PassRecord
from torch_pagoda.passes.graph.attention_node import paged_attention_nodes
from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.runtime.cache.kv_cache import allocate_kv_cache
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_lm import DYNAMO_PASSES, HIDDEN, ToyLM, causal_mask, repeat_kv, sdpa, traced

PLAIN = CompileOptions(codegen="none")


@pytest.fixture
def extra_pass(monkeypatch):
    """Append a pass to the pipeline for one test."""

    def add(name, apply, required):
        entry = Pass(name, apply, required=required)
        monkeypatch.setattr(options, "PASSES", (*PASSES, entry))
        return entry

    return add


def scale_attention(graph):
    """A rewrite that is wrong: every attention's scale is 5 % off. Tokens alone would hardly show it."""
    for node in paged_attention_nodes(graph):
        node.args = (*node.args[:11], node.args[11] * 1.05, *node.args[12:])
    return PassRecord("wrong_scale", matches=1)


def test_report_says_what_was_done():
    program = build_program(ToyLM(sdpa), PLAIN)
    report = program.report
    assert (report.attention_recognized, report.attention_total) == (1, 1)
    assert report.verdict is not None and report.verdict.ok
    assert [r.name for r in report.passes] == [p.name for p in PASSES if PLAIN.selects(p)]
    assert report.codegen == "none"
    assert not report.dropped_passes


def test_inductor_gives_the_same_program():
    program = build_program(ToyLM(sdpa), CompileOptions(codegen="inductor"))
    assert program.report.codegen == "inductor"
    assert program.report.verdict is not None and program.report.verdict.ok


def test_every_pass_verification_keeps_good_passes():
    report = build_program(ToyLM(sdpa), CompileOptions(codegen="none", verify="every-pass")).report
    assert not report.dropped_passes
    assert {r.name for r in report.passes if r.matches} >= {"insert_paged_cache", "gather_logits"}


def test_a_wrong_optional_pass_is_found_and_left_out(extra_pass, caplog):
    extra_pass("wrong_scale", scale_attention, required=False)
    program = build_program(ToyLM(sdpa), PLAIN)
    assert [name for name, _ in program.report.dropped_passes] == ["wrong_scale"]
    assert program.report.verdict is not None and program.report.verdict.ok
    assert "wrong_scale" in caplog.text


@pytest.mark.parametrize("verify", ["model", "every-pass"])
def test_a_wrong_required_pass_refuses_the_model_and_is_named(extra_pass, verify):
    extra_pass("wrong_scale", scale_attention, required=True)
    with pytest.raises(UnsupportedModel, match="pass wrong_scale is not exact"):
        build_program(ToyLM(sdpa), dataclasses.replace(PLAIN, verify=verify))


def test_every_pass_compares_after_each(monkeypatch):
    compared = []

    def spy(graph, reference, *, alone=False):
        verdict = check_own_weights(graph, reference, alone=alone)
        compared.append((alone, len(graph.caches), verdict.ok))
        return verdict

    monkeypatch.setattr(pipeline, "check_own_weights", spy)
    report = build_program(ToyLM(sdpa), dataclasses.replace(PLAIN, verify="every-pass")).report
    changed = [record.name for record in report.passes if record.matches]
    # One comparison per pass that changed something, the last of them on mixed steps, and the finished program's.
    assert len(compared) == len(changed) + 2 and all(ok for *_, ok in compared)
    assert compared[0] == (True, 0, True), "recognized attention runs before there is a cache"
    assert [alone for alone, *_ in compared[-2:]] == [False, False]


@pytest.mark.parametrize("verify", ["model", "off"])
def test_an_optional_pass_that_fails_is_left_out(extra_pass, verify, caplog):
    def fail(graph):
        for node in paged_attention_nodes(graph):
            node.args = (*node.args[:11], 100.0, *node.args[12:])
        raise IndexError("out of luck")

    extra_pass("unlucky", fail, required=False)
    program = build_program(ToyLM(sdpa), dataclasses.replace(PLAIN, verify=verify))
    assert program.report.dropped_passes == [("unlucky", "pass unlucky failed: out of luck")]
    assert check(program, reference_of_model(ToyLM(sdpa))).ok
    assert "dropping pass unlucky" in caplog.text


def test_inductor_that_fails_leaves_the_graph_as_it_is(monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("No working C++ compiler found\nin a long list of places")

    monkeypatch.setattr(build, "generate_code", fail)
    program = build_program(ToyLM(sdpa), CompileOptions(codegen="inductor"))
    assert program.report.codegen == "none"
    assert program.report.dropped_passes == [("inductor", "No working C++ compiler found")]
    assert check(program, reference_of_model(ToyLM(sdpa))).ok
    assert "running the rewritten graph uncompiled" in caplog.text


def test_without_gather_the_asked_rows_are_taken_at_the_end():
    program = build_program(ToyLM(sdpa), dataclasses.replace(PLAIN, passes={"skip": ["gather_logits"]}))
    with_gather = build_program(ToyLM(sdpa), PLAIN)
    prompts = [[5, 6, 7, 8], [9, 10]]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    ours, expected = (
        [o.outputs[0].token_ids for o in Engine(p, num_blocks=16).generate(prompts, params)]
        for p in (program, with_gather)
    )
    assert ours == expected and all(len(tokens) == 5 for tokens in ours)


def test_verify_off_trusts(extra_pass):
    extra_pass("wrong_scale", scale_attention, required=True)
    assert build_program(ToyLM(sdpa), dataclasses.replace(PLAIN, verify="off")).report.verdict is None


def test_a_pass_that_breaks_the_graph_is_named(extra_pass):
    def change_type(graph):
        head = next(n for n in reversed(graph.graph.nodes) if callee(n) == "linear")
        with graph.graph.inserting_after(head):
            cast = graph.graph.call_method("double", (head,))
        cast.meta["example_value"] = head.meta["example_value"]
        head.replace_all_uses_with(cast, delete_user_cb=lambda u: u is not cast)
        return PassRecord("change_type", matches=1)

    extra_pass("change_type", change_type, required=True)
    with pytest.raises(PassError, match="change_type"):
        build_program(ToyLM(sdpa), PLAIN)


def unmasked(m, q, k, v, pos):
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v))


def masked_by_data(m, q, k, v, pos):
    mask = causal_mask(pos) & (q[..., :1] > -100)
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=mask)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: ToyLM(unmasked), "not causal"),
        (lambda: ToyLM(masked_by_data), "depends on the tokens"),
        (lambda: ToyLM(lambda m, q, k, v, pos: q), "no attention that a pass recognizes"),
        (lambda: ToyLM(sdpa, before=lambda m, h, pos: h.cumsum(1)), "cumsum runs over the tokens"),
        (
            lambda: ToyLM(sdpa, before=lambda m, h, pos: h if float(h.sum()) > 0 else -h),
            "cannot be traced into one graph",
        ),
    ],
    ids=["bidirectional", "data mask", "no attention", "recurrence", "graph break"],
)
def test_models_that_cannot_be_exact_are_refused_in_one_line(model, reason):
    with pytest.raises(UnsupportedModel, match=reason) as error:
        build_program(model(), PLAIN)
    assert "\n" not in str(error.value)


def test_skipping_a_required_pass_refuses_the_model():
    options = CompileOptions(codegen="none", passes={"skip": ["classify_masks"]})
    with pytest.raises(UnsupportedModel, match="mask was not classified"):
        build_program(ToyLM(sdpa), options)


def test_window_larger_than_the_check_is_kept():
    def windowed(m, q, k, v, pos):
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=causal_mask(pos, 4096))

    program = build_program(ToyLM(windowed), PLAIN)
    assert program.caches[0].sliding_window == 4096


@pytest.mark.parametrize("number", [4096, 4096.0])
@pytest.mark.parametrize("offset", [0, 1, -1])
def test_long_windows_are_checked_shortened(offset, number):
    """A window that is one off in 4096 shows in no short sequence; on the shortened copies it does."""

    def windowed(m, q, k, v, pos):
        back = pos[:, None, :, None] - pos[:, None, None, :]
        mask = causal_mask(pos) & ((back.float() if isinstance(number, float) else back) < number)
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=mask)

    model = ToyLM(windowed)
    original = traced(model)
    rewritten = original.copy()
    for entry in DYNAMO_PASSES:
        entry.apply(rewritten)
    for node in paged_attention_nodes(rewritten):
        node.args = (*node.args[:12], node.args[12] + offset, *node.args[13:])
    reference = reference_of_model(model)
    rewritten.recompile()
    assert check(link(rewritten, rewritten.module), reference).ok
    short = check_long_windows(original, rewritten, reference)
    assert short is not None
    assert short.ok == (offset == 0)


def test_short_windows_need_no_second_check():
    model = ToyLM(sdpa)
    original = traced(model)
    rewritten = original.copy()
    for entry in DYNAMO_PASSES:
        entry.apply(rewritten)
    assert check_long_windows(original, rewritten, reference_of_model(model)) is None


def test_program_refuses_caches_that_do_not_fit():
    program = build_program(ToyLM(sdpa), PLAIN)
    wrong = [(torch.zeros(4, 4, 3, 8), torch.zeros(4, 4, 3, 8))]
    with pytest.raises(ValueError, match=r"kv_cache\[0\] key"):
        program.bind(wrong)
    with pytest.raises(ValueError, match="needs 1"):
        program.bind([])


def test_int8_caches_come_with_their_scales():
    program = build_program(ToyLM(sdpa), dataclasses.replace(PLAIN, kv_cache_dtype="int8"))
    (cache,) = allocate_kv_cache(program.caches, 3, 4)
    assert [t.dtype for t in cache] == [torch.int8, torch.int8, torch.float32, torch.float32]
    program.bind([cache])
    with pytest.raises(ValueError, match=r"kv_cache\[0\] has 2 tensors; give key_cache, value_cache, key_sc"):
        program.bind([cache[:2]])
    with pytest.raises(ValueError, match=r"kv_cache\[0\] value_scale is .* torch.float16; give .* torch.float32"):
        program.bind([(*cache[:3], cache[3].half())])
    with pytest.raises(ValueError, match=r"kv_cache\[0\] key_cache is .* torch.float32; .* torch.int8"):
        program.bind([(cache[0].float(), *cache[1:])])


def test_the_model_is_not_changed():
    model = ToyLM(sdpa)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    build_program(model, PLAIN)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert passes.PASSES is PASSES
    assert model.q.in_features == HIDDEN
