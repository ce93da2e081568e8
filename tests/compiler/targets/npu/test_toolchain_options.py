"""Options that go to npugraph_ex and torchair: known names pass, others are refused when an engine is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import torch_pagoda as pagoda
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.targets.npu import toolchain_options
from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import aclgraph_options
from torch_pagoda.compiler.targets.npu.toolchain_options import (
    KNOWN,
    SUPER_KERNEL_OPTIONS,
    check_options,
    is_loaded,
    known_options,
    set_ge_options,
)
from torch_pagoda.runtime.npu_target import Product

from tiny_models import build_tiny_model

SUPER = {"static_kernel_compile": True, "super_kernel_optimize": True}


@pytest.mark.parametrize(
    ("codegen", "options"),
    [
        ("aclgraph", {"static_kernel_compile": True}),
        ("aclgraph", {**SUPER, "super_kernel_optimize_options": {"dcci_disable_on_kernel": [".*"]}}),
        ("aclgraph", {**SUPER, "super_kernel_debug_options": {"debug_sync_all": 1}}),
        ("aclgraph", {"deadlock_check": True, "capture_error_mode": "relaxed"}),
        (
            "ge",
            {"ge_config.enable_single_stream": True, "experimental_config.topology_sorting_strategy": "StableRDFS"},
        ),
        ("ge", {"experimental_config.static_model_ops_lower_limit": 3, "ge_config.aicore_num": "24|48"}),
        ("none", {}),
    ],
)
def test_what_may_be_given(codegen, options):
    check_options(options, codegen, Product.A2)
    if options:
        CompileOptions(target="npu", codegen=codegen, npu_options=options).for_device("npu")


@pytest.mark.parametrize(
    ("codegen", "options", "words"),
    [
        (
            "aclgraph",
            {"static_kernel": True},
            "is not an option of codegen='aclgraph'; did you mean 'static_kernel_compile'",
        ),
        ("aclgraph", {"zzz": 1}, "use one of capture_error_mode, clone_output, data_dump_dir, data_dump_stage"),
        ("ge", {"enable_single_stream": True}, "did you mean 'ge_config.enable_single_stream'"),
        ("ge", {"static_kernel_compile": True}, "is not an option of codegen='ge'"),
        ("aclgraph", {"static_kernel_compile": "yes"}, "='yes' is not one of True, False"),
        ("aclgraph", {"static_kernel_compile": 1}, "=1 is not one of True, False"),
        ("ge", {"ge_config.oo_level": "O2"}, "='O2' is not one of 'O1', 'O3'"),
        ("aclgraph", {"capture_limit": 3}, "is set internally: sizes are planned from the chip's streams"),
        ("aclgraph", {"force_eager": True}, "is set internally: give codegen='none'"),
        ("ge", {"experimental_config.pattern_fusion_pass": True}, "were not checked against"),
        ("aclgraph", {"super_kernel_optimize": True}, "fuses static kernels; set 'static_kernel_compile': True too"),
        ("aclgraph", {"super_kernel_optimize_options": {}}, "is for super kernels; set 'super_kernel_optimize'"),
        ("aclgraph", {**SUPER, "super_kernel_optimize_options": {"dcci": []}}, "has no 'dcci'; use one of"),
        (
            "aclgraph",
            {**SUPER, "super_kernel_optimize_options": {"dcci_disable_on_kernel": ".*"}},
            "='.*' is not a list",
        ),
        ("aclgraph", {**SUPER, "super_kernel_optimize_options": 3}, "=3 is not a dictionary"),
    ],
)
def test_what_is_refused_and_what_there_is(codegen, options, words):
    with pytest.raises(ValueError) as refused:
        check_options(options, codegen, Product.A2)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("product", [Product.A5, Product.INFERENCE])
def test_super_kernels_are_for_a2_and_a3(product):
    check_options(SUPER, "aclgraph", Product.A3)
    with pytest.raises(ValueError, match=r"documented for Ascend910B\* and Ascend910_93\*"):
        check_options(SUPER, "aclgraph", product)


def test_an_engine_refuses_them_before_anything_is_loaded():
    model = build_tiny_model("llama")
    for options, words in (
        ({"npu_options": {"static_kernel": True}}, "cannot be used with target='cpu': omit them"),
        (
            {"target": "npu", "npu_options": {"static_kernel": True}},
            "cannot be used with target='npu' with codegen='none': only the toolchains of 'ge'",
        ),
        ({"npu_options": [1]}, r"npu_options=\[1\] is invalid"),
        ({"npu_options": {3: 1}}, "use a dictionary"),
    ):
        with pytest.raises(ValueError, match=words):
            pagoda.LLM(model, **options)
    with pytest.raises(ValueError, match="did you mean 'static_kernel_compile'"):
        CompileOptions(target="npu", codegen="aclgraph", npu_options={"static_kernels_compile": 1}).for_device("npu")


def test_they_reach_the_configurations():
    options = aclgraph_options(5, SUPER)
    assert options["super_kernel_optimize"] is True and options["capture_limit"] == 6
    config = SimpleNamespace(ge_config=SimpleNamespace(enable_single_stream=False))
    set_ge_options(config, {"ge_config.enable_single_stream": True})
    assert config.ge_config.enable_single_stream is True


def test_nothing_that_a_route_sets_is_known():
    for codegen, ours in toolchain_options._OURS.items():
        assert not set(ours) & set(known_options(codegen))
    assert set(aclgraph_options(1)) <= set(toolchain_options._OURS["aclgraph"])


# Against the wheel


@pytest.mark.torchair
@pytest.mark.parametrize("codegen", ["ge", "aclgraph"])
def test_the_table_is_that_of_the_wheel(codegen):
    assert is_loaded()

    def plain(options: Any) -> dict[str, Any]:
        return {n: None if allowed is None else {repr(a) for a in allowed} for n, allowed in options.items()}

    assert plain(known_options(codegen)) == plain(KNOWN[codegen])


@pytest.mark.torchair
def test_values_are_held_against_the_wheel():
    with pytest.raises(
        ValueError, match=r"npu_options\['experimental_config.static_model_ops_lower_limit'\]='x' was rejected"
    ):
        check_options({"experimental_config.static_model_ops_lower_limit": "x"}, "ge", Product.A2)
    with pytest.raises(ValueError, match="was rejected: Please set legal dir path"):
        check_options({"data_dump_dir": "/no/such/folder"}, "aclgraph", Product.A2)
    check_options({"data_dump_dir": "/tmp", "static_kernel_compile": True}, "aclgraph", Product.A2)


@pytest.mark.torchair
def test_options_of_super_kernels_are_those_of_the_wheel():
    import torch_npu

    check = torch_npu.npu.NPUGraph._validate_options
    values = {int: 1, str: "x", list: [".*"], dict: {}}
    for name, known in SUPER_KERNEL_OPTIONS.items():
        wheel_name = name.removeprefix("super_kernel_")
        check(None, wheel_name, {key: values[kind] for key, kind in known.items()})
        with pytest.raises(RuntimeError):
            check(None, wheel_name, {"no_such_option": 1})


@pytest.mark.torchair
def test_torchair_gets_them():
    from torch_pagoda.compiler.targets.npu.ge.ge_route import ge_config

    config = ge_config({"ge_config.enable_single_stream": True})
    assert bool(config.ge_config.enable_single_stream) and config.mode.value == "max-autotune"
