"""Stages of one model in real processes: the tokens of transformers, and of one process in all modes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_pagoda as pagoda
from torch_pagoda import SamplingParams
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.warm_start.file import DISABLE
from torch_pagoda.load_options import LoadOptions
from torch_pagoda.shipping import other_ranks

from hf_reference import greedy_without_cache
from tiny_models import build_tiny_model

SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 32}
LENGTHS = (4, 70, 21, 9, 40)
"""Of prompts: some are cut into chunks, and not all fit into the cache together."""
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of tiny checkpoints."""
    made: dict[str, Path] = {}

    def get(kind: str, **overrides: Any) -> Path:
        key = f"{kind}{sorted(overrides.items())}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind)
            build_tiny_model(kind, **overrides).save_pretrained(made[key])
        return made[key]

    return get


@pytest.fixture
def several_processors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """More than this machine has."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    yield


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 250, (n,), generator=generator).tolist() for n in LENGTHS]


def tokens(outputs: list[Any]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def served(folder: Path, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Greedy tokens, samples of two and beams of all prompts, one of them twice more; and figures of the engine."""
    with pagoda.LLM(folder, **{**SIZES, **options}) as llm:
        greedy = tokens(llm.generate(prompts(), GREEDY))
        again = [tokens(llm.generate(prompts()[1:2], GREEDY)) for _ in range(2)]
        sampled = SamplingParams(max_tokens=6, temperature=1.0, seed=5, n=2, ignore_eos=True)
        pairs = tokens(llm.generate(prompts()[:2], sampled))
        beams = llm.beam_search(prompts()[2:4], pagoda.BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True))
        found = [list(sequence.token_ids) for output in beams for sequence in output.sequences]
        return [greedy, again, pairs, found], llm.stats()


def check(kind: str, folder: Path, stages: int = 2, ranks: int = 1, **options: Any) -> dict[str, Any]:
    """Compare with transformers and with one process."""
    found, stats = served(folder, pipeline_parallel_size=stages, tensor_parallel_size=ranks, **options)
    alone, _ = served(folder, **options)
    assert found == alone
    if not options.get("kv_cache_dtype"):
        model = build_tiny_model(kind)
        assert found[0] == [[greedy_without_cache(model, prompt, GREEDY.max_tokens).tokens] for prompt in prompts()]
    assert stats["ranks"] == stages * ranks
    return stats


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
