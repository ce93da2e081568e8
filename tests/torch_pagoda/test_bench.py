"""``pagoda bench``: its figures, and that they fit each other. What they are depends on the machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_pagoda as pagoda
from torch_pagoda.cli.bench import _percentile
from torch_pagoda.reports.machine_limits import MachineLimits
from torch_pagoda.runtime.ops.linear.packed_linear import can_pack

from tiny_models import build_tiny_model

Run = Callable[..., tuple[int, str, str]]
FAST = ("--verify", "off", "--codegen", "none", "--num-blocks", "64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    build_tiny_model("llama").save_pretrained(path)
    return path


def figures(run: Run, command: str, folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    file = folder / f"{command}.json"
    status, out, err = run("bench", command, str(folder), *FAST, "--output-json", str(file), *options)
    assert status == 0, err
    return json.loads(file.read_text()), out


def test_latency(run: Run, folder: Path) -> None:
    sizes = (
        "--input-len",
        "5",
        "--output-len",
        "4",
        "--batch-size",
        "3",
        "--num-iters",
        "4",
        "--num-iters-warmup",
        "0",
    )
    found, out = figures(run, "latency", folder, *sizes)
    assert list(found["percentiles"].values()) == sorted(found["percentiles"].values())
    assert found["prompt_tokens_per_s"] == pytest.approx(3 * 5 / found["time_to_first_token"])
    assert "decode tokens per s" in out and "this machine reads" in out


def test_throughput(run: Run, folder: Path) -> None:
    found, _ = figures(run, "throughput", folder, "--input-len", "6", "--output-len", "2", "--num-prompts", "5")
    assert found["requests_per_second"] == pytest.approx(5 / found["elapsed_time"])
    assert found["total_tokens_per_second"] == pytest.approx(4 * found["output_tokens_per_second"])


def test_startup(run: Run, folder: Path) -> None:
    found, out = figures(run, "startup", folder, "--num-iters-cold", "1", "--num-iters-warm", "1")
    assert [start["kind"] for start in found["starts"]] == ["cold", "warm"]
    for start in found["starts"]:
        assert sum(start["phases"].values()) <= start["seconds"]
    assert "to the first token" in out


def test_prompts_are_computed_in_each_batch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def stop(*_: object, **options: Any) -> None:
        given.append(options["enable_prefix_caching"])
        raise ValueError("enough")

    monkeypatch.setattr("torch_pagoda.llm.LLM", stop)
    for command in ("latency", "throughput"):
        for flags in ((), ("--no-enable-prefix-caching",), ("--enable-prefix-caching",)):
            assert "enough" in run("bench", command, "model", *flags)[2]
    assert given == [False, False, True] * 2


def test_percentiles_lie_between_values() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [_percentile(values, p) for p in (0, 10, 50, 100)] == pytest.approx([1.0, 1.3, 2.5, 4.0])
    assert _percentile([5.0], 99) == 5.0


@pytest.mark.parametrize(("command", "option"), [("latency", "--num-iters"), ("throughput", "--num-prompts")])
def test_sizes_that_are_none_are_refused(run: Run, folder: Path, command: str, option: str) -> None:
    status, _, err = run("bench", command, str(folder), option, "0")
    assert status == 2 and f"{option} is 0; give 1 or more" in err


@pytest.mark.parametrize("command", ["startup", "latency", "throughput"])
def test_a_missing_folder_of_the_file_is_told_before_anything_runs(run: Run, tmp_path: Path, command: str) -> None:
    status, _, err = run("bench", command, "nosuch/model", "--output-json", str(tmp_path / "none" / "file.json"))
    assert status == 2 and "is in a folder that does not exist" in err


def test_a_start_that_fails_is_one_line(run: Run) -> None:
    status, _, err = run("bench", "startup", "./nosuch")
    assert status == 2 and err.endswith("does not exist; pass an existing checkpoint folder or a hub id\n")
    assert err.startswith("pagoda: error: a start ended with status 1: ValueError: model='./nosuch'")


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="needs packed products in bf16")
def test_shares_count_packed_weights_once_a_step() -> None:
    model = build_tiny_model("llama").bfloat16()
    llm = pagoda.LLM(model, codegen="none", num_blocks=8, pack_weights=True, verify="off")
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    limits = MachineLimits(read_gb_per_s=1.0, gemm_gflops=1.0, dtype="bfloat16")
    assert limits.share_read(llm.program, 1e9) == pytest.approx(2 * matrices, rel=0.2)
    assert limits.share_multiplied(llm.program, 1e9, 1e9) == pytest.approx(2 * matrices, rel=0.2)
    assert limits.share_multiplied(llm.program, 0, 1e9) == pytest.approx(2 * model.lm_head.weight.numel(), rel=0.2)


def test_shares_of_experts_are_unknown() -> None:
    llm = pagoda.LLM(build_tiny_model("mixtral").bfloat16(), codegen="none", num_blocks=8, pack_weights=True)
    limits = MachineLimits(read_gb_per_s=1.0, gemm_gflops=1.0, dtype="bfloat16")
    assert limits.share_read(llm.program, 1.0) is limits.share_multiplied(llm.program, 1.0, 1.0) is None
