"""Several ranks of one model in real processes: the tokens of transformers, and of one process in all modes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_pagoda as pagoda
from torch_pagoda import SamplingParams
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.warm_start.file import DISABLE
from torch_pagoda.load_options import LoadOptions
from torch_pagoda.passes.rewrite import shard_vocabulary
from torch_pagoda.runtime.parallel import launch
from torch_pagoda.runtime.parallel.torchrun import host_id
from torch_pagoda.shipping import load_program, other_ranks

from hf_reference import greedy_without_cache
from tiny_models import build_tiny_model

ARCHITECTURES = (
    *("llama", "gpt2", "falcon", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "deepseek_v32"),
    *("qwen3_5_text", "nemotron_h", "mamba", "olmo2", "mixtral", "cohere2", "bloom"),
)
SIZES: dict[str, Any] = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 32}
LENGTHS = (4, 70, 21, 9, 40)
"""Of prompts: some are cut into chunks, and not all fit into the cache together."""
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny checkpoints."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            build_tiny_model(kind).save_pretrained(made[kind])
        return made[kind]

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


def served(folder: Path, ranks: int, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Greedy tokens, samples of two and beams of all prompts, one of them twice more; and figures of the engine."""
    with pagoda.LLM(folder, tensor_parallel_size=ranks, **SIZES, **options) as llm:
        greedy = tokens(llm.generate(prompts(), GREEDY))
        again = [tokens(llm.generate(prompts()[1:2], GREEDY)) for _ in range(2)]
        sampled = SamplingParams(max_tokens=6, temperature=1.0, seed=5, n=2, ignore_eos=True)
        pairs = tokens(llm.generate(prompts()[:2], sampled))
        beams = llm.beam_search(prompts()[2:4], pagoda.BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True))
        found = [list(sequence.token_ids) for output in beams for sequence in output.sequences]
        return [greedy, again, pairs, found], llm.stats()


def check(kind: str, ranks: int, folder: Path, **options: Any) -> dict[str, Any]:
    """Compare with transformers and with one process."""
    found, stats = served(folder, ranks, **options)
    alone, _ = served(folder, 1, **options)
    assert found == alone
    if not options.get("kv_cache_dtype"):
        model = build_tiny_model(kind)
        assert found[0] == [[greedy_without_cache(model, prompt, GREEDY.max_tokens).tokens] for prompt in prompts()]
    assert stats["ranks"] == ranks
    return stats


def test_two_ranks_serve_the_tokens_of_transformers(saved: Callable[[str], Path]) -> None:
    stats = check("llama", 2, saved("llama"))
    assert stats["preemptions"] and stats["prefix_hit_tokens"]


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("gpt2", {}),
        ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 12}),
        ("mamba2", {"num_hidden_layers": 12}),
    ],
)
def test_ranks_that_pack_their_parts_are_compared_with_the_model(
    kind: str, overrides: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_vocabulary, "LEAST_PARAMETERS", 2**13)
    build_tiny_model(kind, **overrides).save_pretrained(tmp_path)
    with pagoda.LLM(tmp_path, tensor_parallel_size=2, dtype="bfloat16", **SIZES) as llm:
        assert llm.compile_report.verdict is not None
        assert llm.compile_report.verdict.ok
        assert len(tokens(llm.generate(prompts(), GREEDY))[1][0]) == GREEDY.max_tokens


def test_ranks_start_again_with_the_stored_program(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DISABLE, "")
    served = []
    for is_stored in (False, True):
        with pagoda.LLM(saved("gpt2"), tensor_parallel_size=2, **SIZES) as llm:
            assert llm.compile_report.stored is is_stored
            served.append(tokens(llm.generate(prompts(), GREEDY)))
    assert served[0] == served[1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_architectures(kind: str, ranks: int, saved: Callable[[str], Path], several_processors: None) -> None:
    check(kind, ranks, saved(kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"kv_cache_dtype": "int8"},
        {"preemption": "swap", "swap_space": "1MiB", "async_scheduling": True},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_modes(options: dict[str, Any], saved: Callable[[str], Path]) -> None:
    check("qwen3_moe", 2, saved("qwen3_moe"), **options)


class LonelyGroup:
    rank = 0


# What is refused before anything is loaded


def refused(model: Any, size: int, device: str = "cpu", **options: Any) -> str:
    compiling = CompileOptions(tensor_parallel_size=size, **options)
    with pytest.raises(ValueError) as raised:
        other_ranks(model, LoadOptions(), compiling, torch.device(device))
    return str(raised.value)


def test_a_live_module_is_refused() -> None:
    assert refused(torch.nn.Identity(), 2) == (
        "tensor_parallel_size=2: every rank reads the checkpoint, and a live module has none; pass its folder"
    )


def test_more_ranks_than_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert "tensor_parallel_size=3 is more than the 2 processors" in refused("folder", 3)


def test_more_ranks_than_npus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "npu", SimpleNamespace(device_count=lambda: 1, is_available=lambda: False), raising=False
    )
    npu: Any = SimpleNamespace(type="npu")
    with pytest.raises(ValueError) as raised:
        other_ranks("folder", LoadOptions(), CompileOptions(tensor_parallel_size=2), npu)
    assert str(raised.value) == (
        "tensor_parallel_size=2: 2 ranks on this host need a device each, and it has 1; lower it, or name more in "
        "ASCEND_RT_VISIBLE_DEVICES"
    )


def test_restarts_on_npus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "npu", SimpleNamespace(device_count=lambda: 2, is_available=lambda: False), raising=False
    )
    npu: Any = SimpleNamespace(type="npu")
    with pytest.raises(ValueError, match="worker_restarts=1 is for CPUs"):
        other_ranks("folder", LoadOptions(worker_restarts=1), CompileOptions(tensor_parallel_size=2), npu)


def test_files_that_have_changed_are_refused(saved: Callable[[str], Path]) -> None:
    from torch_pagoda.compiler.warm_start.file import to_bytes
    from torch_pagoda.compiler.warm_start.record import Sources
    from torch_pagoda.compiler.warm_start.shipment import Shipment

    program: Any = ()
    shipment = torch.frombuffer(bytearray(to_bytes(Shipment(program, Sources({}, {}, {}), True))), dtype=torch.uint8)
    values = {"model": str(saved("llama")), "dtype": "auto", "trust_remote_code": False, "files": [[0, 0, 0, 0]]}
    values |= {"processors": [sorted(os.sched_getaffinity(0))], "host": host_id()}
    group = LonelyGroup()
    with pytest.raises(ValueError, match="are not those that rank 0 reads; copy them, or start again"):
        load_program(launch.Message("load", values, {"program": shipment}), group)  # type: ignore[arg-type]
