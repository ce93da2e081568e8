"""How speed changes with the batch, the length of the context, and the depth of the model.

    python benchmarks/scaling.py --out results
    python benchmarks/scaling.py --quick                        # small sizes, a few minutes
    python benchmarks/scaling.py --only depth --only batch --quantization int8

  batch    decoded tokens/s of B requests at a time (prompts of 32, so that they begin together), beside what bf16
           matrix products alone would allow with B rows
  context  prompt tokens/s of one prompt and decoded tokens/s after it; the part of the measured GEMM limit that the
           prompt's products, attention's causal half included, reach; and the attention kernel alone: GB/s of keys
           and values that it reads for one new token, beside the measured read limit
  depth    seconds from having a model of so many layers (768 wide, random weights) to its first token, in a fresh
           process with empty compile caches, by phase of the compiler; "rest" is the engine and the first token

Models have random weights. Figures are medians of the repeats; a cold start is measured once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attention_kernels import Shape, Step, best_seconds
from limits import StepTimes, machine_limits
from peer_figures import prompt_flops
from random_llama import greedy, random_llama, warm_up
from report import add_arguments, conditions, markdown_table, plotter, save, save_plot
from shapes import SHAPES, Prompts, head_dim, random_model
from workloads import random_prompt

from torch_pagoda import LLM, RequestOutput
from torch_pagoda.compiler.options import QUANTIZATIONS

CURVES = ("batch", "context", "depth")
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DEPTHS = (2, 4, 8, 16, 32, 48)
BATCH_PROMPT = 32
CACHES_BYTES = 512e6
"""Keys and values that the attention kernel is timed on, if the model has so many: more than a CPU caches."""


def decode_rate(outputs: Sequence[RequestOutput]) -> float:
    """Tokens/s from when all requests have their first token until all have ended, if they began together."""
    begin = max(output.metrics.first_token_time or 0.0 for output in outputs)
    end = max(output.metrics.finished_time or 0.0 for output in outputs)
    return sum(len(output.outputs[0].token_ids) - 1 for output in outputs) / (end - begin)


def batch_curve(shape: str, batches: Sequence[int], count: int, repeats: int, settings: dict[str, Any]) -> list[Any]:
    """Decoded tokens/s by batch; ``allowed``: if nothing but bf16 products took time."""
    llm = LLM(
        random_model(shape),
        max_num_seqs=max(batches),
        max_model_len=BATCH_PROMPT + count,
        pack_weights=True,
        **settings,
    )
    warm_up(llm)
    prompts, rows = Prompts(), []
    for batch in batches:
        found = []
        for _ in range(repeats):
            found.append(decode_rate(llm.generate(prompts([BATCH_PROMPT] * batch), greedy(count))))
        rows.append({"batch": batch, "tokens_per_second": statistics.median(found)})
    del llm
    times = StepTimes(shape)
    return [row | {"allowed": row["batch"] / times(row["batch"], row["batch"])} for row in rows]


def attention_layer(shape: str, context: int) -> Shape:
    """One new token of one sequence, as a layer of the model sees it."""
    config = SHAPES[shape]()
    name = f"decode 1 x {context}, {shape}"
    return Shape(name, config.num_attention_heads, config.num_key_value_heads, head_dim(config), ((1, context),))


def kv_bytes(layer: Shape) -> int:
    """Of bf16 keys and values that a layer's step reads."""
    return sum(context for _, context in layer.sequences) * layer.kv_heads * layer.dim * 2 * 2


def attention_read(shape: str, context: int, repeats: int) -> float:
    """GB/s of keys and values that the attention kernel reads, layer after layer with caches of their own."""
    layer = attention_layer(shape, context)
    count = min(SHAPES[shape]().num_hidden_layers, max(1, round(CACHES_BYTES / kv_bytes(layer))))
    with torch.inference_mode():
        steps = [Step(layer, torch.bfloat16) for _ in range(count)]
        seconds = best_seconds(lambda: [step.ours() for step in steps], repeats)
    return count * kv_bytes(layer) / seconds / 1e9


def context_curve(
    shape: str, contexts: Sequence[int], count: int, repeats: int, settings: dict[str, Any]
) -> list[Any]:
    """Prefill, decode, and what attention reads, by context."""
    llm = LLM(random_model(shape), max_num_seqs=4, max_model_len=max(contexts) + count, pack_weights=True, **settings)
    warm_up(llm)
    prompts, rows = Prompts(), []
    for context in contexts:
        found = [llm.generate(prompts([context]), greedy(count))[0].metrics for _ in range(repeats)]
        ttft = statistics.median(metrics.ttft or 0.0 for metrics in found)
        rows.append(
            {
                "context": context,
                "prefill_tokens_per_second": context / ttft,
                "prefill_gflops": prompt_flops(shape, context) / ttft / 1e9,
                "decode_tokens_per_second": 1 / statistics.median(metrics.tpot or 0.0 for metrics in found),
            }
        )
    del llm
    for row in rows:
        row["attention_gb_per_s"] = attention_read(shape, row["context"], 5 * repeats)
    return rows


def cold_start(layers: int, settings: dict[str, Any]) -> dict[str, float]:
    """In this very process: seconds to the first token, by phase."""
    model = random_llama(torch.bfloat16, layers)
    prompt = random_prompt(128, torch.Generator().manual_seed(0))
    begin = time.perf_counter()
    llm = LLM(model, max_num_seqs=4, max_model_len=256, pack_weights=True, **settings)
    llm.generate([prompt], greedy(1))
    total = time.perf_counter() - begin
    phases = dict(llm.compile_report.seconds)
    return {**phases, "rest": total - sum(phases.values())}


def depth_curve(depths: Sequence[int], threads: int, settings: dict[str, Any]) -> list[Any]:
    """Cold starts, each in a process of its own."""
    rows = []
    for layers in depths:
        with tempfile.TemporaryDirectory() as folder:
            env = os.environ | {
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
                "TORCH_PAGODA_CACHE": f"{folder}/own",
            }
            command = [sys.executable, __file__, "--threads", str(threads), "--cold-start", str(layers)]
            for option, value in settings.items():
                command += [f"--{option}", value] if value else []
            out = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
        rows.append({"layers": layers, "seconds": json.loads(out.strip().splitlines()[-1])})
    return rows


def tables(result: dict[str, Any]) -> str:
    """All curves as Markdown."""
    read, gemm = result["limits"]["read_gb_per_s"], result["limits"]["gemm_gflops"]
    lines = [f"Read {read:.1f} GB/s, GEMM {gemm:.0f} GFLOP/s, {result['threads']} threads.\n"]
    if "batch" in result:
        rows = [
            (
                row["batch"],
                row["tokens_per_second"],
                row["allowed"],
                f"{row['tokens_per_second'] / row['allowed']:.0%}",
            )
            for row in result["batch"]
        ]
        lines.append(f"### {result['batch_shape']}, {result['weights']}: decode by batch\n")
        lines.append(markdown_table(("batch", "decode (tok/s)", "bf16 products alone (tok/s)", "of that"), rows))
    if "context" in result:
        rows = [
            (
                row["context"],
                row["prefill_tokens_per_second"],
                f"{row['prefill_gflops'] / gemm:.0%}",
                row["decode_tokens_per_second"],
                row["attention_gb_per_s"],
                f"{row['attention_gb_per_s'] / read:.0%}",
            )
            for row in result["context"]
        ]
        columns = (
            "context",
            "prefill (tok/s)",
            "of GEMM",
            "decode (tok/s)",
            "attention alone, KV read (GB/s)",
            "of read",
        )
        lines.append(f"### {result['context_shape']}, {result['weights']}: by context\n")
        lines.append(markdown_table(columns, rows))
    if "depth" in result:
        phases = phases_of(result["depth"])
        rows = [
            (row["layers"], *(row["seconds"].get(phase, 0.0) for phase in phases), sum(row["seconds"].values()))
            for row in result["depth"]
        ]
        lines.append(f"### Cold start by depth (s), codegen {result['codegen']}\n")
        lines.append(markdown_table(("layers", *phases, "first token"), rows))
    return "\n".join(lines)


def phases_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """In the order in which they happen, rest last."""
    names = dict.fromkeys(phase for row in rows for phase in row["seconds"] if phase != "rest")
    return [*names, "rest"]


def plot(result: dict[str, Any], out: Path | None) -> None:
    """A figure with a panel for each curve."""
    plt = plotter(out)
    shown = [curve for curve in CURVES if curve in result]
    if plt is None or out is None or not shown:
        return
    figure, panels = plt.subplots(1, len(shown), figsize=(6 * len(shown), 4.5), squeeze=False)
    for curve, axes in zip(shown, panels[0], strict=True):
        rows = result[curve]
        if curve == "depth":
            bottom = [0.0] * len(rows)
            for phase in phases_of(rows):
                seconds = [row["seconds"].get(phase, 0.0) for row in rows]
                axes.bar([str(row["layers"]) for row in rows], seconds, bottom=bottom, label=phase)
                bottom = [a + b for a, b in zip(bottom, seconds, strict=True)]
            axes.set(xlabel="layers", ylabel="seconds", title="cold start")
        else:
            if curve == "batch":
                lines = {"measured": "tokens_per_second", "bf16 products alone": "allowed"}
                axes.set(title=f"decode, {result['batch_shape']}, {result['weights']}")
            else:
                lines = {"prefill": "prefill_tokens_per_second", "decode": "decode_tokens_per_second"}
                axes.set(title=f"one request, {result['context_shape']}, {result['weights']}")
            for label, key in lines.items():
                axes.plot([row[curve] for row in rows], [row[key] for row in rows], marker="o", label=label)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks([row[curve] for row in rows], [str(row[curve]) for row in rows], rotation=45)
            axes.set(xlabel=curve, ylabel="tokens/s")
        axes.legend(loc="upper left" if curve == "depth" else "best")
    save_plot(plt, figure, out / "scaling.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CURVES, action="append", help="default: all; may be given more than once")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--batch-shape", choices=SHAPES, default="tinyllama-1.1b")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--codegen", choices=("auto", "inductor", "none"), default="inductor")
    parser.add_argument("--cold-start", type=int, metavar="LAYERS", help=argparse.SUPPRESS)
    add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = {"codegen": args.codegen, "quantization": args.quantization}
    if args.cold_start:
        print(json.dumps(cold_start(args.cold_start, settings)))
        return
    wanted = args.only or CURVES
    batches, contexts, depths = BATCHES, CONTEXTS, DEPTHS
    repeats, count = args.repeats, 64
    if args.quick:
        batches, contexts, depths, repeats, count = (1, 4), (128, 512), (2, 4), 1, 8
    # Only one of the shapes is trained on more than 2,048 positions.
    result: dict[str, Any] = {
        **conditions(args.threads),
        "codegen": args.codegen,
        "weights": args.quantization or "bf16",
        "batch_shape": args.batch_shape,
        "context_shape": "qwen3-0.6b",
        "limits": vars(machine_limits()),
    }
    curves = {
        "batch": lambda: batch_curve(args.batch_shape, batches, count, repeats, settings),
        "context": lambda: context_curve("qwen3-0.6b", contexts, count // 2, repeats, settings),
        "depth": lambda: depth_curve(depths, args.threads, settings),
    }
    for curve in wanted:
        result[curve] = curves[curve]()
        print(tables({key: value for key, value in result.items() if key not in CURVES or key == curve}), flush=True)
        save(args.out, "scaling", result, tables(result))
    plot(result, args.out)


if __name__ == "__main__":
    main()
