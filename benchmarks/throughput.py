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
from pathlib import Path
from typing import Any

import torch
from ablation import ablate, show_ablation
from limits import machine_limits
from rich.console import Console
from rich.table import Table
from shapes import (
    DECODE_PROMPT,
    DECODE_TOKENS,
    OUTPUT_LENGTHS,
    PREFILL_PROMPT,
    PROMPT_LENGTHS,
    SHAPES,
    Prompts,
    random_model,
    weight_bytes_per_token,
)
from transformers import PreTrainedModel

from torch_pagoda import LLM, SamplingParams
from torch_pagoda.compiler.options import QUANTIZATIONS


def peak_rss_mb() -> float:
    """The most memory that this program held. (``ru_maxrss`` would include the parent that it was forked from.)"""
    try:
        status = Path("/proc/self/status").read_text()
        return float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) / 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


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
    limits = machine_limits()
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
    per_token = weight_bytes_per_token(model)  # as HuggingFace reads them
    generated = {"decode": DECODE_TOKENS - 1, "prefill": PREFILL_PROMPT, "offline": sum(OUTPUT_LENGTHS)}
    result: dict[str, Any] = {
        "shape": shape,
        "pack_weights": settings["pack_weights"],
        "quantization": settings["quantization"],
        "read_gb_per_s": limits.read_gb_per_s,
        "gemm_gflops": limits.gemm_gflops,
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
            for option in ("quantization", "group_size"):
                if settings[option] is not None:
                    command += [f"--{option.replace('_', '-')}", str(settings[option])]
            out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
            result[kind] = json.loads(out.strip().splitlines()[-1])
    return result


def show(console: Console, result: dict[str, Any]) -> None:
    ours, hf = result["ours"], result["hf"]
    weights = result["quantization"] or ("packed weights" if result["pack_weights"] else "plain weights")
    table = Table(title=f"{result['shape']}, bf16, {weights}, {torch.get_num_threads()} threads")
    for column in ("", "torch-pagoda", "HF generate (sdpa)", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    rows = [
        ("decode, 1 request (tok/s)", "decode_tok_s", 1),
        ("  as bf16 weights (GB/s)", "decode_gb_s", 1),
        ("first token, prompt 128 (ms)", "ttft_128_ms", -1),
        ("prefill 1024 (tok/s)", "prefill_tok_s", 1),
        ("32 requests, generated (tok/s)", "offline_tok_s", 1),
    ]
    for label, key, sign in rows:
        table.add_row(label, f"{ours[key]:.1f}", f"{hf[key]:.1f}", f"{(ours[key] / hf[key]) ** sign:.2f}x")
    console.print(table)
    if result["quantization"] is None:
        share = ours["decode_gb_s"] / result["read_gb_per_s"]
        console.print(
            f"measured read bandwidth {result['read_gb_per_s']:.1f} GB/s: decode reads weights at {share:.0%} of it; "
            f"GEMM {result['gemm_gflops']:.0f} GFLOP/s"
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
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of ours")
    parser.add_argument("--group-size", type=int, help="of quantized weights")
    parser.add_argument("--no-start", action="store_true", help="skip the cold and warm starts")
    parser.add_argument("--ablate", action="store_true", help="measure what each pass is worth instead")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--first-token", metavar="SHAPE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    settings = {
        "codegen": args.codegen,
        "pack_weights": args.pack_weights,
        "quantization": args.quantization,
        "group_size": args.group_size,
    }
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
