"""Options: one set of keys, unknown ones refused by name."""

from __future__ import annotations

import pytest
import torch
from aten_graphs import aten_of_tiny_model

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.backend import pagoda
from torch_pagoda.compiler.options import selected_passes
from torch_pagoda.compiler.pass_runs import run_passes
from torch_pagoda.compiler.targets.cpu.inductor import is_fusible
from torch_pagoda.compiler.user_passes import register_pass
from torch_pagoda.passes import PASSES

from toy_lm import ToyLM, sdpa

SHARDING = ("shard_layers", "shard_vocabulary")


def test_several_ranks_ask_for_what_cuts_layers():
    options = CompileOptions(tensor_parallel_size=2)
    assert [p.name for p in PASSES if options.selects(p) and p.option == "tensor_parallel_size"] == list(SHARDING)


@pytest.mark.parametrize("ranks", [0, 129, True, 2.0])
def test_numbers_of_ranks_are_checked(ranks):
    with pytest.raises(ValueError, match=f"tensor_parallel_size={ranks} is not a number from 1 to 128; give one"):
        CompileOptions(tensor_parallel_size=ranks)


def test_defaults_select_every_pass():
    options = CompileOptions.from_dict(None)
    left_out = [p.name for p in PASSES if not options.selects(p) and p.target != "npu"]
    assert left_out == [*SHARDING, "quantize_linears", "make_batch_invariant", "pack_linears"]
    assert (options.verify, options.codegen) == ("model", "auto")


def test_levels_are_0_to_2_for_users_passes_too():
    assert max(entry.level for entry in PASSES) == 2
    with pytest.raises(ValueError, match="opt_level=3 is not one of 0, 1, 2"):
        CompileOptions(opt_level=3)
    with pytest.raises(ValueError, match="level=3 is invalid; use one of 0, 1, 2"):
        register_pass("mine", lambda traced: None, level=3)


def test_skip_and_only():
    given = {"passes": {"skip": ["gather_logits"]}, "pack_weights": True, "quantization": "int8"}
    skipping = CompileOptions.from_dict(given)
    left_out = [p.name for p in PASSES if not skipping.selects(p) and p.target != "npu"]
    assert left_out == ["gather_logits", *SHARDING, "make_batch_invariant"]


@pytest.mark.parametrize("target", ["cpu", "npu"])
def test_only_chooses_among_the_optional_passes(target):
    only = CompileOptions(passes={"only": ["merge_linears"]}, target=target, opt_level=0)
    chosen = {p.name for p in PASSES if only.selects(p)}
    required = {p.name for p in PASSES if p.required and not p.option and p.target in ("", target)}
    assert "insert_paged_cache" in required and ("lower_npu_norms" in required) == (target == "npu")
    assert chosen == {*required, "merge_linears"}


def test_only_keeps_what_an_option_asks_for():
    only = CompileOptions(passes={"only": []}, pack_weights=True, quantization="int8")
    assert {p.name for p in PASSES if only.selects(p) and not p.required} == {"quantize_linears", "pack_linears"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"verfy": "off"}, "did you mean 'verify'"),
        ({"verify": "yes"}, "verify='yes' is not one of"),
        ({"codegen": "triton"}, "codegen='triton'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4' is not one of 'auto', 'int8'"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype=None is not one of 'auto', 'int8'"),
        ({"kv_cache_dtype": "bfloat16"}, "use 'auto', .* dtype='bfloat16'"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "use 'int8'"),
        *(
            ({"kv_cache_dtype": name}, f"kv_cache_dtype='{name}' is not supported .*use 'int8'.* or 'auto'")
            for name in ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "fp8_per_token_head", "nvfp4", "FP8")
        ),
        ({"quantization": "fp8"}, "quantization='fp8' is not one of 'int8'"),
        ({"quantization": "int4", "group_size": 32}, "group_size=32 is not supported"),
        ({"group_size": 64}, "set quantization too"),
        ({"target": "tpu"}, "target='tpu'"),
        ({"static_decode": "yes"}, "static_decode='yes' is not one of"),
        ({"static_decode": True, "target": "cpu"}, "static_decode=True cannot be used with target='cpu'"),
        ({"static_decode": True, "target": "npu", "codegen": "aclgraph"}, "graphs are static already"),
        (
            {"static_decode": True, "target": "npu", "codegen": "none"},
            "cannot be used with codegen='none'.*use codegen='ge'",
        ),
        ({"passes": {"skip": ["gather_logit"]}}, "did you mean 'gather_logits'"),
        ({"passes": {"skip": "gather_logits"}}, "lists of pass names"),
        ({"passes": {"skip": [], "only": []}}, "is invalid"),
        ({"passes": ["gather_logits"]}, "is invalid"),
    ],
)
def test_mistakes_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        CompileOptions.from_dict(given)


def test_static_decode_needs_the_graph_engine():
    assert CompileOptions(static_decode=True).for_device("npu").codegen == "ge"
    with pytest.raises(ValueError, match="static_decode=True cannot be used with target='cpu'"):
        CompileOptions(static_decode=True).for_device("cpu")
    with pytest.raises(ValueError, match="static_decode=True cannot be used with codegen='none'"):
        CompileOptions(static_decode=True, target="npu").for_device("cpu")


def test_auto_codegen_goes_by_size_and_by_what_is_left():
    options = CompileOptions(codegen="auto")
    assert not options.uses_inductor(1_000_000, fusible=True)
    assert not options.uses_inductor(1_000_000_000, fusible=False)
    assert options.uses_inductor(1_000_000_000, fusible=True)
    assert CompileOptions(codegen="inductor").uses_inductor(1, fusible=False)
    assert not CompileOptions(codegen="none").uses_inductor(1_000_000_000, fusible=True)


@pytest.mark.parametrize(("name", "level", "fusible"), [("llama", 2, False), ("llama", 0, True), ("gpt2", 2, False)])
def test_inductor_pays_where_the_passes_left_something(name, level, fusible):
    graph = aten_of_tiny_model(name)
    run_passes(graph, selected_passes(CompileOptions(opt_level=level), "aten"))
    assert is_fusible(graph) is fusible


def test_other_modes_are_refused():
    model = ToyLM(sdpa)
    compiled = torch.compile(model, backend=pagoda, mode="max-autotune")
    with pytest.raises(Exception, match="mode='max-autotune' is not supported"), torch.no_grad():
        compiled(torch.ones(1, 4, dtype=torch.long), torch.arange(4)[None])
