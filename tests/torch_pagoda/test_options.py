"""Keywords of LLM, AsyncLLM and compile: who takes them, what is refused, what editors see."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import torch_pagoda as pagoda
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.user_passes import Pattern
from torch_pagoda.load_options import LoadOptions
from torch_pagoda.options import LLMOptions, ModelOptions, split_options
from torch_pagoda.runtime.engine.engine_options import EngineOptions


def split(**options: Any) -> tuple[LoadOptions, EngineOptions, CompileOptions]:
    return split_options(options, owns_weights=True)


def test_every_keyword_is_somebodys_and_every_field_is_a_keyword() -> None:
    taken = [f.name for part in (LoadOptions, EngineOptions, CompileOptions) for f in fields(part)]
    # The chip and CANN are those of the machine; block_size is the cache's, and what operators of an NPU bake in.
    # Hidden rows are asked for by speculative_config.
    assert set(taken) - set(LLMOptions.__annotations__) == {"soc", "cann", "taps_hidden"}
    assert set(LLMOptions.__annotations__) <= set(taken)
    assert [name for name in set(taken) if taken.count(name) > 1] == ["block_size"]


def test_keywords_reach_those_who_take_them() -> None:
    load, engine, compiling = split(dtype="float32", max_num_seqs=3, block_size=48, target="npu", opt_level=1)
    assert (load.dtype, engine.max_num_seqs, engine.block_size) == ("float32", 3, 48)
    assert (compiling.opt_level, compiling.target, compiling.block_size) == (1, "npu", 48)
    assert split(block_size=20)[1].block_size == 20, "a CPU takes any"
    assert split()[2].block_size == split(block_size=None, target="npu")[2].block_size == 128


GIVEN: dict[str, Any] = {
    **{"dtype": "float32", "device": "cpu", "generation_config": "vllm", "trust_remote_code": True, "gguf_file": "a"},
    **{"block_size": 48, "num_blocks": 7, "kv_cache_memory": "1GiB", "min_kv_cache_memory": 5, "swap_space": 6},
    **{"max_num_seqs": 3, "max_num_batched_tokens": 9, "max_model_len": 99, "max_queue": 2, "npu_warmup": "lazy"},
    **{"enable_prefix_caching": False, "policy": "sjf", "preemption": "swap", "async_scheduling": True},
    **{"kv_cache_dtype": "int8", "quantization": "int4", "group_size": 128, "input_bits": 16, "pack_weights": False},
    **{"verify": "off", "passes": {"skip": ["hoist_gather"]}, "opt_level": 1, "batch_invariant": True},
    **{"patterns": (Pattern(torch.relu, torch.relu, [torch.ones(2)]),), "codegen": "none", "target": "npu"},
    **{"static_decode": True, "npu_options": {"ge_config.enable_single_stream": True}, "schedule": {"streams": True}},
    "pipeline_parallel_size": 2,
    **{"expert_parallel_size": 1, "enable_expert_parallel": False},
    **{"speculative_config": {"method": "suffix"}, "draft_forced_tokens": False},
    **{"kv_store": "folder:///kv", "kv_store_size": 8, "kv_store_key_file": "key"},
    **{"kv_store_wait": 1.5, "kv_store_write": "all"},
    **{"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher", "worker_restarts": 1},
    **{"step_timeout": 20.0},
}
"""Of every keyword a value that is not its default."""
BESIDE = {
    "group_size": {"quantization": "int8"},
    "block_size": {"target": "npu"},
    "static_decode": {"target": "npu", "codegen": "ge"},
    "npu_options": {"target": "npu", "codegen": "ge"},
    "schedule": {"target": "npu", "codegen": "ge", "static_decode": True},
}


@pytest.mark.parametrize("name", LLMOptions.__annotations__)
def test_every_keyword_reaches_each_record_that_has_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_pagoda.compiler.options.is_offline", lambda: True)
    options = {**BESIDE.get(name, {}), name: GIVEN[name]}
    before = [getattr(record, name, None) for record in split(**BESIDE.get(name, {}))]
    after = [getattr(record, name, None) for record in split(**options)]
    assert [value for value in after if value is not None] == [GIVEN[name]] * (2 if name == "block_size" else 1)
    assert GIVEN[name] not in before


def test_weights_are_packed_where_they_take_the_place_of_others() -> None:
    assert split()[2].pack_weights and not split_options({}, owns_weights=False)[2].pack_weights
    assert not split(pack_weights=False)[2].pack_weights
    assert split_options({"pack_weights": True}, owns_weights=False)[2].pack_weights


@pytest.mark.parametrize("owner", [pagoda.LLM, pagoda.AsyncLLM])
def test_the_signature_names_every_keyword_with_its_default(owner: Callable[..., Any]) -> None:
    parameters = inspect.signature(owner).parameters
    assert list(parameters) == ["model", "tokenizer", *LLMOptions.__annotations__]
    assert parameters["max_num_batched_tokens"].default == EngineOptions().max_num_batched_tokens
    assert parameters["device"].default == "auto" and parameters["verify"].default == "model"
    assert (
        parameters["passes"].default is parameters["pack_weights"].default is parameters["block_size"].default is None
    )


@pytest.mark.parametrize("make", [pagoda.LLM, pagoda.AsyncLLM, pagoda.compile])
def test_unknown_keywords_are_refused_with_the_nearest(
    make: Callable[..., Any], llama: PreTrainedModel, one_line: Callable[[BaseException], str]
) -> None:
    for error in (TypeError, ValueError):
        with pytest.raises(error) as refused:
            make(llama, max_num_seq=3)
        assert "'max_num_seq' (given 3)" in one_line(refused.value) and "'max_num_seqs'" in str(refused.value)
    with pytest.raises(TypeError, match="use one of async_scheduling, batch_invariant, block_size"):
        make(llama, nonsense=1)


def test_a_live_model_has_no_checkpoint_to_load() -> None:
    for name in ("generation_config", "trust_remote_code"):
        with pytest.raises(ValueError, match=f"option '{name}'"):
            split_options({name: "vllm"}, owns_weights=False, known=ModelOptions)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 0}, "block_size=0 is not an integer >= 1"),
        ({"num_blocks": True}, "num_blocks=True"),
        ({"max_num_seqs": None}, "max_num_seqs=None"),
        ({"max_num_batched_tokens": 1.5}, "max_num_batched_tokens=1.5"),
        ({"max_model_len": "8"}, "max_model_len='8'"),
        ({"max_queue": 0}, "max_queue=0"),
        ({"num_blocks": 8, "kv_cache_memory": "1GiB"}, "both size the KV cache"),
        ({"kv_cache_memory": "plenty"}, "kv_cache_memory='plenty' is not a size"),
        ({"min_kv_cache_memory": -1}, "min_kv_cache_memory=-1"),
        ({"swap_space": "much"}, "swap_space='much'"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching=1 is not a bool"),
        ({"policy": "lifo"}, "policy='lifo'"),
        ({"preemption": "kill"}, "preemption='kill'"),
    ],
)
def test_wrong_values_are_refused_before_anything_loads(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split(**options)


def test_sizes_are_read_as_bytes() -> None:
    options = EngineOptions(kv_cache_memory="1GiB", min_kv_cache_memory=5, swap_space="2 kb")
    assert (options.cache_bytes, options.min_cache_bytes, options.swap_bytes) == (1 << 30, 5, 2000)
    assert (EngineOptions().cache_bytes, EngineOptions().swap_bytes, EngineOptions(swap_space="0").swap_bytes) == (
        None,
        0,
        0,
    )


def test_passes_take_their_british_names_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="'quantise_linears' was renamed to 'quantize_linears'"):
        options = CompileOptions(passes={"skip": ["quantise_linears", "merge_linears"]})
    assert options.passes == {"skip": ["quantize_linears", "merge_linears"]}
    with pytest.raises(ValueError, match="unknown pass 'quantise_everything'"):
        CompileOptions(passes={"skip": ["quantise_everything"]})
