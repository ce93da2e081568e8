"""Whole models over a store of blocks: a later start takes what an earlier one has computed, and no token changes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_blocks import patience

from torch_pagoda import LLM, SamplingParams

from hf_reference import forced, greedy_without_cache
from tiny_models import build_tiny_model

MODELS = {
    "dense": ("llama", {}),
    "windows": ("gemma3_text", {}),
    "sinks": ("gpt_oss", {}),
    "latents": ("deepseek_v3", {}),
    "indexer": ("deepseek_v32", {}),
    "experts": ("mixtral", {}),
    "states": ("qwen3_5_text", {}),
    "states alone": ("mamba", {}),
    "int8": ("llama", {"kv_cache_dtype": "int8"}),
}
LENGTHS = (101, 83)


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    """However loaded the machine is."""
    with patience():
        yield


def served(path: Path, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], list[int]]:
    """Tokens, and numbers of cached tokens, of a start that keeps its blocks beside the checkpoint."""
    llm = LLM(
        path / "model",
        **{"block_size": 4, "num_blocks": 512, "max_num_batched_tokens": 64, "max_model_len": 256},
        **{"kv_store": f"folder://{path}/kv", "kv_store_write": "all", "kv_store_wait": 30.0, **options},
    )
    try:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        llm.batcher.check()
    finally:
        llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs], [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("kind", MODELS)
def test_a_later_start_takes_all_full_blocks(kind: str, tmp_path: Path) -> None:
    name, options = MODELS[kind]
    model = build_tiny_model(name)
    model.save_pretrained(tmp_path / "model")
    prompts = [torch.randint(3, 250, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
    tokens, _ = served(tmp_path, prompts, **options)
    again, cached = served(tmp_path, prompts, **options)
    assert again == tokens and cached == [(length - 1) // 4 * 4 for length in LENGTHS]
    if not options:
        assert [forced(model, prompt, own).tokens for prompt, own in zip(prompts, tokens, strict=True)] == tokens


@pytest.mark.parametrize("kind", ["dense", "windows", "latents", "experts", "int8"])
def test_ranks_and_one_process_read_the_same_entries(kind: str, tmp_path: Path) -> None:
    name, options = MODELS[kind]
    model = build_tiny_model(name)
    model.save_pretrained(tmp_path / "model")
    prompts = [torch.randint(3, 250, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
    first, second = [(length - 1) // 4 * 4 for length in LENGTHS]
    one, cached = served(tmp_path, prompts[:1], tensor_parallel_size=2, **options)
    assert cached == [0]
    tokens, cached = served(tmp_path, prompts, **options)
    assert tokens[:1] == one and cached == [first, 0]
    assert served(tmp_path, prompts, tensor_parallel_size=2, **options) == (tokens, [first, second])
    if not options:
        assert [forced(model, prompt, own).tokens for prompt, own in zip(prompts, tokens, strict=True)] == tokens


def test_what_ranks_have_stored_is_whole_though_one_was_killed(tmp_path: Path) -> None:
    model = build_tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    prompts = [torch.randint(3, 250, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    expected = [greedy_without_cache(model, prompt, 8).tokens for prompt in prompts]
    with LLM(
        tmp_path / "model",
        **{"block_size": 4, "num_blocks": 512, "max_num_batched_tokens": 16, "tensor_parallel_size": 2},
        **{"kv_store": f"folder://{tmp_path}/kv", "kv_store_write": "all", "kv_store_wait": 30.0},
    ) as llm:
        for number, prompt in enumerate(prompts):
            llm.submit(prompt, params, str(number))
        for _ in range(3):
            llm.step()
        os.kill(llm.program.pids[0], signal.SIGKILL)
        found = {}
        while llm.has_unfinished():
            found |= {output.request_id: list(output.outputs[0].token_ids) for output in llm.step()}
        assert [found[str(number)] for number in range(len(prompts))] == expected
        assert llm.stats()["rank_restarts"] == 1
        llm.batcher.check()
    again, cached = served(tmp_path, prompts)
    assert again == expected and cached == [(length - 1) // 4 * 4 for length in LENGTHS]


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("qwen3_5_text", {}, "for models with states"),
        ("deepseek_v32", {}, "KV heads are not divided among the ranks"),
        ("llama", {"num_key_value_heads": 1}, "KV heads are not divided among the ranks"),
    ],
    ids=str,
)
def test_ranks_that_do_not_divide_the_heads_are_refused(
    name: str, overrides: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    build_tiny_model(name, **overrides).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=reason):
        served(tmp_path, [[5, 6, 7]], tensor_parallel_size=2)


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    prompt = list(range(3, 50))
    model = build_tiny_model("llama")
    for k in range(2):
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[5, 7] += k  # not among the samples that tell programs apart
        model.save_pretrained(tmp_path / "model")
        tokens, cached = served(tmp_path, [prompt])
        assert cached == [0] and tokens == [forced(model, prompt, tokens[0]).tokens]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"target": "npu"}, "target='npu'"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"kv_store does not support {reason}"):
        LLM(tmp_path, kv_store=f"folder://{tmp_path}/kv", **options)


def test_a_live_module_and_unknown_files_have_no_fingerprint(tmp_path: Path) -> None:
    model = build_tiny_model("llama")
    with pytest.raises(ValueError, match="save the module"):
        LLM(model, kv_store=f"folder://{tmp_path}/kv")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="use safetensors or GGUF files"):
        LLM(tmp_path, kv_store=f"folder://{tmp_path}/kv")
