"""Several ranks for NPUs in real processes, simulated on the CPU: the tokens of transformers, one step ahead."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_npus import simulated_npus

import torch_pagoda as pagoda
from torch_pagoda import SamplingParams
from torch_pagoda.runtime.device_queue import HostCopy
from torch_pagoda.runtime.parallel.device_group import DeviceGroup

from hf_reference import greedy_without_cache
from legal_models import build_legal_model

SIZES: dict[str, Any] = {
    **{"target": "npu", "block_size": 16, "num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 32},
    **{"tensor_parallel_size": 2, "async_scheduling": True},
}
LENGTHS = (4, 70, 21, 9)
"""Of prompts, one of which is cut into chunks."""
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
STATIC = {"codegen": "ge", "static_decode": True}
CAPTURED = {"codegen": "aclgraph"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of small checkpoints."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            build_legal_model(kind).save_pretrained(made[kind])
        return made[kind]

    return get


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 250, (n,), generator=generator).tolist() for n in LENGTHS]


def tokens(llm: pagoda.LLM) -> list[list[int]]:
    """Greedy ones, of ranks that were compared with the model."""
    assert llm.compile_report.verdict is not None and llm.compile_report.verdict.ok
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts(), GREEDY)]


def served(folder: Path, fails: str = "", **options: Any) -> tuple[list[list[int]], dict[str, Any], Any]:
    """Greedy tokens, figures of the engine, and the outcome of the planned sizes."""
    with simulated_npus(fails), pagoda.LLM(folder, **{**SIZES, **options}) as llm:
        return tokens(llm), llm.stats(), {size.name: size.reason for size in llm.compile_report.sizes}


def expected(kind: str) -> list[list[int]]:
    model = build_legal_model(kind)
    return [greedy_without_cache(model, prompt, GREEDY.max_tokens).tokens for prompt in prompts()]


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_ranks_serve_the_tokens_of_transformers(kind: str, saved: Callable[[str], Path]) -> None:
    found, stats, _ = served(saved(kind))
    assert found == expected(kind)
    assert stats["ranks"] == 2
    assert stats["steps_ahead"] > stats["steps"] // 2


def test_ranks_serve_until_a_device_fails(saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    broadcast = DeviceGroup.broadcast

    def to_other_places(self: DeviceGroup, x: torch.Tensor, source: int) -> torch.Tensor:
        return broadcast(self, x.roll(1), source).roll(-1)

    def fails(self: HostCopy) -> torch.Tensor:
        raise RuntimeError("an operator failed, error code is 507015")

    with simulated_npus(), pagoda.LLM(saved("llama"), **SIZES) as llm:
        assert tokens(llm) == expected("llama")
        stats = llm.stats()
        assert stats["ranks"] == 2 and stats["steps_ahead"] > stats["steps"] // 2
        # Ids of steps ahead come from rank 0's device: were they wrong on one rank, tokens would be.
        with monkeypatch.context() as patch:
            patch.setattr(DeviceGroup, "broadcast", to_other_places)
            assert tokens(llm) != expected("llama")
        monkeypatch.setattr(HostCopy, "wait", fails)
        (output,) = llm.generate([[5, 6, 7]], GREEDY)
        assert output.outputs[0].finish_reason == "error"
        assert re.search(r"rank 0 failed in the device's work: .*507015", str(output.outputs[0].error))
        assert llm.device_lost is not None


# With the real torchair and npugraph_ex


@pytest.mark.torchair
@pytest.mark.parametrize("options", [STATIC, CAPTURED], ids=["static", "captured"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
def test_ranks_serve_by_graphs(kind: str, options: dict[str, Any], saved: Callable[[str], Path]) -> None:
    found, stats, sizes = served(saved(kind), **options)
    assert found == expected(kind)
    assert any(name.startswith("decode steps") for name in sizes) and not any(sizes.values())
    assert stats["steps_ahead"] > stats["steps"] // 2 and not stats["operator_steps"]


@pytest.mark.torchair
def test_a_size_that_fails_on_one_rank_is_dropped_on_all(saved: Callable[[str], Path]) -> None:
    found, stats, sizes = served(saved("llama"), fails="1:3", **CAPTURED)
    assert found == expected("llama")
    assert {name: reason for name, reason in sizes.items() if reason} == {
        "decode steps of 3 tokens": "it fails: another rank could not capture it"
    }
    assert stats["graph_sizes_dropped"] == 1
