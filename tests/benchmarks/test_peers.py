"""Side-by-side runs: the limits' model of the workload, workers that speak the protocol, the table."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from limits import ROWS, _between, layer_matrices, steps_of_workload
from peer_setup import OURS, PEERS, WORKERS
from peers import PHASES, Worker, rates, table
from shapes import OUTPUT_LENGTHS, PROMPT_LENGTHS, SHAPES
from trained_model import TINY_PYDOC
from transformers import AutoModelForCausalLM


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


@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_are_those_of_the_model(shape):
    config = SHAPES[shape]()
    with torch.device("meta"):
        layer = AutoModelForCausalLM.from_config(config).model.layers[0]
    assert sum(a * b for a, b in layer_matrices(shape)) == sum(p.numel() for p in layer.parameters() if p.dim() == 2)


@pytest.mark.parametrize("name", ["pagoda", "hf"])
def test_workers_generate_what_they_are_asked_for(name, tmp_path):
    peer = OURS if name == "pagoda" else PEERS["hf"]
    command = [sys.executable, "-u", str(WORKERS / peer.worker), "--model", str(TINY_PYDOC)]
    command += ["--weights", "bf16", "--threads", "1", "--max-model-len", "64"]
    worker = Worker(command, {**os.environ, "PYTHONPATH": str(WORKERS)}, tmp_path / "log")
    try:
        assert worker.ask(prompts=[[5, 6, 7], [8]], outputs=[3, 2])["seconds"] > 0
        assert worker.ask(memory=True)["peak_rss_mb"] > 100
        with pytest.raises(SystemExit, match="its last words"):
            worker.ask(prompts=[[]], outputs=[1])
    finally:
        worker.close()


def test_the_table_says_who_is_faster():
    seconds = {phase: {"ours": [1.0, 1.0], "theirs": [2.0, 4.0]} for phase in PHASES}
    seconds["decode"] = {"ours": [2.0, 2.0], "theirs": [4.0, 8.0]}
    result = {
        "peer": "hf",
        "shape": "s",
        "weights": "bf16",
        "threads": 2,
        "seconds": seconds,
        "memory, ours": 100.0,
        "memory, theirs": 150.0,
        "limits": [{"read_gb_per_s": 20.0, "gemm_gflops": 900.0}] * 2,
        "ceiling": 150.0,
    }
    assert rates(seconds, "ours")["decode (tok/s)"] == [127.0, 127.0]
    text = table(result)
    assert "| decode (tok/s) | 127 | 47.6 | 3.00× | 2.00–4.00 |" in text
    assert "| TTFT 128 (ms) | 1000 | 3000 | 3.00× | 2.00–4.00 |" in text
    assert "| peak memory (MB) | 100 | 150 | 1.50× |  |" in text
    assert "read 20.0 GB/s, GEMM 900 GFLOP/s, 32 requests 150.0 tok/s" in text
