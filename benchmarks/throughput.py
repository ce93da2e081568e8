"""Throughput beside HuggingFace generate, in one run: decode, prefill, and 32 requests of mixed lengths.

    python benchmarks/throughput.py                          # both shapes
    python benchmarks/throughput.py --shape tinyllama-1.1b --rounds 1
    python benchmarks/throughput.py --ablate                 # ours alone, without each pass in turn

Models have random weights, made on the spot. HuggingFace runs sdpa attention in bf16 and serves the 32 requests
as one left-padded static batch, which is what ``generate`` offers. Every repeat uses fresh prompts. Each phase is
timed for both sides in turn, so that drift of the machine hits both. A cold start is the first token of a fresh
process with empty compile caches; warm is the same with filled ones.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ablation import ablate, show_ablation
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from torch_pagoda import LLM, SamplingParams

SHAPES: dict[str, Callable[[], Any]] = {
    "tinyllama-1.1b": lambda: LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    ),
    "qwen3-0.6b": lambda: Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=True,
    ),
}
PROMPT_LENGTHS = [
    *(204, 79, 149, 224, 355, 283, 227, 391, 41, 243, 309, 274, 324, 119, 102, 504),
    *(120, 428, 346, 225, 71, 119, 206, 120, 369, 197, 57, 365, 104, 297, 436, 147),
]
OUTPUT_LENGTHS = [
    *(224, 213, 95, 191, 208, 98, 115, 232, 193, 45, 163, 163, 158, 183, 48, 209),
    *(25, 201, 143, 48, 47, 218, 167, 179, 219, 130, 199, 44, 50, 144, 144, 180),
]
DECODE_PROMPT, DECODE_TOKENS, PREFILL_PROMPT = 128, 128, 1024


def random_model(shape: str) -> PreTrainedModel:
    """A bf16 model of the shape with random weights; the head is spread so that greedy tokens vary."""
    torch.manual_seed(0)
    config = SHAPES[shape]()
    config.initializer_range = 0.02
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval().requires_grad_(False)


def read_bandwidth() -> float:
    """GB/s at which bf16 weights are read: prepacked oneDNN linears with one row, 40 distinct weights."""
    packed = [torch.ops.mkldnn._reorder_linear_weight(torch.randn(5632, 2048).bfloat16(), 1) for _ in range(40)]
    x = torch.randn(1, 2048).bfloat16()
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        for weight in packed:
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        best = max(best, 40 * 5632 * 2048 * 2 / (time.perf_counter() - start) / 1e9)
    return best


def weight_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of weights that one decoded token reads: all but the input embedding, which is looked up."""
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    rest = sum(p.numel() * p.element_size() for p in model.parameters() if p is not table)
    return rest + (head.numel() * head.element_size() if head is table else 0)


def peak_rss_mb() -> float:
    """The most memory that this program held. (``ru_maxrss`` would include the parent that it was forked from.)"""
    try:
        status = Path("/proc/self/status").read_text()
        return float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) / 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Prompts:
    """Fresh random prompts at every call."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, lengths: list[int]) -> list[list[int]]:
        return [torch.randint(100, 31000, (n,), generator=self.generator).tolist() for n in lengths]


def run_ours(llm: LLM, prompts: list[list[int]], outputs: list[int]) -> float:
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in outputs]
    start = time.perf_counter()
    results = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    assert [len(r.outputs[0].token_ids) for r in results] == outputs
    return seconds


def run_hf(model: PreTrainedModel, prompts: list[list[int]], outputs: list[int]) -> float:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    tokens = max(outputs)
    start = time.perf_counter()
    with torch.inference_mode():
        result = model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
    seconds = time.perf_counter() - start
    assert result.shape[1] == longest + tokens
    return seconds


def measure(shape: str, rounds: int, settings: dict[str, Any]) -> dict[str, Any]:
    """All phases for one shape; times in seconds, medians over ``rounds``."""
    model = random_model(shape)
    llm = LLM(model, max_num_seqs=32, max_model_len=2048, **settings)
    prompts = Prompts()
    run_ours(llm, prompts([16]), [4])
    run_hf(model, prompts([16]), [4])
    bandwidth = read_bandwidth()
    phases = {
        "decode": ([DECODE_PROMPT], [DECODE_TOKENS]),
        "first token of 128": ([DECODE_PROMPT], [1]),
        "prefill": ([PREFILL_PROMPT], [1]),
        "offline": (PROMPT_LENGTHS, OUTPUT_LENGTHS),
    }
    times: dict[str, dict[str, list[float]]] = {p: {"ours": [], "hf": []} for p in phases}
    for _ in range(rounds):
        for phase, (lengths, outputs) in phases.items():
            times[phase]["ours"].append(run_ours(llm, prompts(lengths), outputs))
            times[phase]["hf"].append(run_hf(model, prompts(lengths), outputs))
    median = {p: {who: statistics.median(t) for who, t in both.items()} for p, both in times.items()}
    per_token = weight_bytes_per_token(model)
    generated = {"decode": DECODE_TOKENS - 1, "prefill": PREFILL_PROMPT, "offline": sum(OUTPUT_LENGTHS)}
    result: dict[str, Any] = {
        "shape": shape,
        "pack_weights": settings["pack_weights"],
        "read_gb_per_s": bandwidth,
        "weight_gb_per_token": per_token / 1e9,
    }
    for who in ("ours", "hf"):
        decode = median["decode"][who] - median["first token of 128"][who]
        result[who] = {
            "decode_tok_s": generated["decode"] / decode,
            "decode_gb_s": generated["decode"] * per_token / decode / 1e9,
            "ttft_128_ms": 1e3 * median["first token of 128"][who],
            "prefill_tok_s": generated["prefill"] / median["prefill"][who],
            "offline_tok_s": generated["offline"] / median["offline"][who],
        }
    result["peak_rss_mb"] = peak_rss_mb()
    return result


def first_token(shape: str, settings: dict[str, Any]) -> None:
    """Child process: time from having the model to its first token, and the process's peak memory."""
    model = random_model(shape)
    base = peak_rss_mb()
    start = time.perf_counter()
    llm = LLM(model, max_num_seqs=32, max_model_len=2048, **settings)
    run_ours(llm, Prompts()([128]), [1])
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak_rss_mb": peak_rss_mb(), "rss_before_mb": base}))


def cold_and_warm(shape: str, settings: dict[str, Any]) -> dict[str, Any]:
    """First token in a fresh process, first with empty compile caches, then with the ones it left."""
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TORCH_PAGODA_CACHE": f"{folder}/kernels",
        }
        for kind in ("cold", "warm"):
            command = [sys.executable, __file__, "--first-token", shape, "--codegen", settings["codegen"]]
            command += ["--pack-weights"] * settings["pack_weights"]
            out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
            result[kind] = json.loads(out.strip().splitlines()[-1])
    return result


def show(console: Console, result: dict[str, Any]) -> None:
    ours, hf = result["ours"], result["hf"]
    packed = "packed weights" if result["pack_weights"] else "plain weights"
    table = Table(title=f"{result['shape']}, bf16, {packed}, {torch.get_num_threads()} threads")
    for column in ("", "torch-pagoda", "HF generate (sdpa)", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    rows = [
        ("decode, 1 request (tok/s)", "decode_tok_s", 1),
        ("  weights read (GB/s)", "decode_gb_s", 1),
        ("first token, prompt 128 (ms)", "ttft_128_ms", -1),
        ("prefill 1024 (tok/s)", "prefill_tok_s", 1),
        ("32 requests, generated (tok/s)", "offline_tok_s", 1),
    ]
    for label, key, sign in rows:
        table.add_row(label, f"{ours[key]:.1f}", f"{hf[key]:.1f}", f"{(ours[key] / hf[key]) ** sign:.2f}x")
    console.print(table)
    share = ours["decode_gb_s"] / result["read_gb_per_s"]
    console.print(
        f"measured read bandwidth {result['read_gb_per_s']:.1f} GB/s: decode reads weights at {share:.0%} of it"
    )
    for kind in ("cold", "warm"):
        if kind in result:
            start = result[kind]
            console.print(
                f"first token, {kind}: {start['seconds']:.1f} s, peak RSS {start['peak_rss_mb']:.0f} MB "
                f"({start['rss_before_mb']:.0f} MB before the engine)"
            )
    console.print(f"peak RSS of the run above, both sides in one process: {result['peak_rss_mb']:.0f} MB")
    console.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--codegen", default="auto", choices=("auto", "inductor", "none"))
    parser.add_argument("--pack-weights", action="store_true", help="LLM(pack_weights=True)")
    parser.add_argument("--no-start", action="store_true", help="skip the cold and warm starts")
    parser.add_argument("--ablate", action="store_true", help="measure what each pass is worth instead")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--first-token", metavar="SHAPE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    settings = {"codegen": args.codegen, "pack_weights": args.pack_weights}
    if args.first_token:
        first_token(args.first_token, settings)
        return
    console = Console()
    results: list[dict[str, Any]] = []
    for shape in args.shape or list(SHAPES):
        if args.ablate:
            rates = ablate(random_model(shape), Prompts(), args.rounds, settings)
            show_ablation(console, shape, rates)
            results.append({"shape": shape, "ablation": rates})
            continue
        starts = {} if args.no_start else cold_and_warm(shape, settings)
        result = measure(shape, args.rounds, settings) | starts
        show(console, result)
        results.append(result)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
