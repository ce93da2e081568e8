"""Stages of one model in real processes: the tokens of transformers, and of one process in all modes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from served_ranks import GREEDY, SIZES, check_ranks, prompts, tokens

import torch_pagoda as pagoda
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.warm_start.file import DISABLE
from torch_pagoda.load_options import LoadOptions
from torch_pagoda.shipping import other_ranks


def check(kind: str, folder: Path, stages: int = 2, ranks: int = 1, **options: Any) -> dict[str, Any]:
    """Compare with transformers and with one process."""
    asked = {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks}
    return check_ranks(kind, folder, asked, **options)


def test_two_stages_serve_the_tokens_of_transformers(saved: Callable[..., Path]) -> None:
    stats = check("llama", saved("llama"))
    assert stats["preemptions"]
    assert stats["prefix_hit_tokens"]


def test_stages_start_again_with_the_stored_program(
    saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DISABLE, "")
    found = []
    for is_stored in (False, True):
        folder = saved("llama", num_hidden_layers=12, tie_word_embeddings=True)
        with pagoda.LLM(folder, pipeline_parallel_size=2, dtype="bfloat16", **SIZES) as llm:
            assert llm.compile_report.stored is is_stored
            assert llm.compile_report.verdict is not None
            assert llm.compile_report.verdict.ok
            found.append(tokens(llm.generate(prompts(), GREEDY)))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["gpt2", "gemma3_text", "gemma4_text", "zamba2", "mamba", "qwen3_5_text", "nemotron_h", "deepseek_v32"]
)
def test_architectures(kind: str, saved: Callable[..., Path]) -> None:
    check(kind, saved(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "qwen3_5_text"])
def test_stages_of_two_ranks(kind: str, saved: Callable[..., Path], several_processors: None) -> None:
    check(kind, saved(kind), ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"kv_cache_dtype": "int8"},
        {"preemption": "swap", "swap_space": "1MiB"},
        {"enable_prefix_caching": False},
        {"kv_cache_memory": "200KiB", "num_blocks": None},
    ],
    ids=str,
)
def test_modes(options: dict[str, Any], saved: Callable[..., Path]) -> None:
    check("qwen3_moe", saved("qwen3_moe"), **options)


# What is refused before anything is loaded


def refused(model: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as raised:
        other_ranks(model, LoadOptions(), CompileOptions(**options), torch.device("cpu"))
    return str(raised.value)


def test_a_live_module_is_refused() -> None:
    found = refused(torch.nn.Identity(), pipeline_parallel_size=2)
    assert found.startswith("pipeline_parallel_size=2: every rank reads the checkpoint")


def test_more_ranks_than_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    found = refused("folder", pipeline_parallel_size=2, tensor_parallel_size=2)
    assert found == (
        "pipeline_parallel_size=2 with tensor_parallel_size=2 is more than the 2 processors that this process may "
        "use; lower it"
    )


def test_fewer_layers_than_stages_are_refused(tmp_path: Path, several_processors: None) -> None:
    Path(tmp_path, "config.json").write_text('{"text_config": {"num_hidden_layers": 3}}')
    found = refused(tmp_path, pipeline_parallel_size=4)
    assert found == "pipeline_parallel_size=4 is more than the 3 layers of the model; lower it"


def test_stages_go_on_when_one_dies(saved: Callable[..., Path]) -> None:
    """Several steps are under way then; all tokens are computed again and are the same."""
    with pagoda.LLM(saved("llama"), pipeline_parallel_size=2, **SIZES) as llm:
        expected = tokens(llm.generate(prompts(), GREEDY))
        seen: list[Any] = []

        def kill_once(progress: Any) -> None:
            seen.append(progress)
            if len(seen) == 9:
                os.kill(other_rank(), signal.SIGKILL)

        assert tokens(llm.generate(prompts(), GREEDY, on_progress=kill_once)) == expected
        assert llm.stats()["rank_restarts"] == 1
        assert llm.stats()["steps_beside_others"]


def other_rank() -> int:
    """The process id of the rank that this process has started."""
    children = [
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
        if b"torch_pagoda.rank" in Path("/proc", pid, "cmdline").read_bytes()
    ]
    return children[0]
