"""Options that choose the device, the target and the way to run on it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import torch_pagoda as pagoda
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.device import free_memory, npu_available

from tiny_models import build_tiny_model


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "npu", "codegen": "inductor"}, "codegen='inductor' cannot be used with target='npu': use 'ge'"),
        ({"target": "cpu", "codegen": "ge"}, "codegen='ge' cannot be used with target='cpu': use 'inductor'"),
        ({"target": "cpu", "codegen": "aclgraph"}, "codegen='aclgraph' cannot be used with target='cpu'"),
        ({"target": "npu", "block_size": 24}, "block_size=24 is not a multiple of 16"),
        ({"target": "npu", "block_size": 0}, "block_size=0 is below 1"),
        ({"target": "npu", "block_size": True}, "block_size=True is not a multiple of 16"),
    ],
)
def test_options_that_do_not_go_together(options, words):
    with pytest.raises(ValueError, match=words):
        CompileOptions(**options)


def test_what_auto_means_on_a_device(monkeypatch):
    monkeypatch.delenv("TORCH_PAGODA_NPU_TOOLCHAIN", raising=False)
    options = CompileOptions()
    assert (options.for_device("cpu").target, options.for_device("cpu").codegen) == ("cpu", "auto")
    assert (options.for_device("npu").target, options.for_device("npu").codegen) == ("npu", "ge")
    simulated = CompileOptions(target="npu").for_device("cpu")
    assert (simulated.target, simulated.codegen) == ("npu", "none")
    assert CompileOptions(codegen="aclgraph").for_device("npu").codegen == "aclgraph"
    for codegen, words in (("ge", "needs an NPU, or a Python with the real torchair"), ("aclgraph", "needs an NPU,")):
        with pytest.raises(ValueError, match=words):
            CompileOptions(target="npu", codegen=codegen).for_device("cpu")
        with pytest.raises(ValueError, match="cannot be used with target='cpu'"):
            CompileOptions(codegen=codegen).for_device("cpu")
    with pytest.raises(ValueError, match="codegen='inductor' cannot be used with target='npu'"):
        CompileOptions(codegen="inductor").for_device("npu")


@pytest.mark.parametrize(
    ("codegen", "device", "mode"),
    [
        ("auto", "npu", "ge"),
        ("ge", "npu", "ge"),
        ("aclgraph", "npu", "aclgraph"),
        ("none", "npu", "aclgraph"),
        ("none", "cpu", "ge"),
    ],
)
def test_calls_that_run_one_by_one_are_lowered_like_captured_ones(codegen, device, mode):
    assert CompileOptions(target="npu", codegen=codegen).npu_target(device).graph_mode == mode


def test_a_cache_takes_a_share_of_an_npus_free_memory(monkeypatch):
    npu = SimpleNamespace(is_available=lambda: True, mem_get_info=lambda device: (1000, 5000))
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device: npu)
    assert free_memory(torch.device("meta")) == 900
    assert free_memory(torch.device("cpu")) is None
    assert npu_available()


def test_an_npu_that_is_not_there():
    with pytest.raises(ValueError, match=r"reports no NPU .*target='npu' to simulate one on the CPU"):
        pagoda.LLM(build_tiny_model("llama"), device="npu")


def test_a_model_for_an_npu_is_simulated_on_a_cpu():
    model = build_tiny_model("llama")
    params = pagoda.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    served_by = {
        target: pagoda.LLM(model, target=target, num_blocks=2 if target == "npu" else 16, max_num_seqs=2)
        for target in ("cpu", "npu")
    }
    tokens = {t: llm.generate([[4, 5, 6], [9, 8]], params) for t, llm in served_by.items()}
    assert [o.outputs[0].token_ids for o in tokens["cpu"]] == [o.outputs[0].token_ids for o in tokens["npu"]]
    npu = served_by["npu"]
    assert npu.program.block_size == npu.engine.block_manager.block_size == 128
    assert npu.compile_report.codegen == "none" and npu.compile_report.verdict.ok
    assert served_by["cpu"].engine.block_manager.block_size == 32
    with pytest.raises(ValueError, match="block_size=20 is not a multiple of 16"):
        pagoda.LLM(model, target="npu", block_size=20)
