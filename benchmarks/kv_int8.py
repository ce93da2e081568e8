"""What an int8 KV cache costs and saves: perplexity, bytes per token and decode speed beside the model's own dtype.

    python benchmarks/kv_int8.py [--dtype bfloat16] [--threads 2] [--repeats 3]

The text is that of examples/pydoc_text.py: documents that the shipped model was not trained on, and a sample of
those that it was, which it knows better by heart. Decoding is timed on random prompts as long as the model takes;
runs of the two alternate, and the best of each counts.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from torch_pagoda import LLM, SamplingParams
from torch_pagoda.runtime.cache.cache_specs import bytes_per_block

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "examples")]
from pydoc_text import gather_documents  # noqa: E402

from perplexity import loss_per_token  # noqa: E402

MODEL = ROOT / "examples" / "tiny-pydoc"
WINDOW = 256
PER_STEP = 16  # windows that are computed together
NEW_TOKENS = 128


def windows_of(texts: list[str], limit: int) -> torch.Tensor:
    """``[N, WINDOW]`` tokens of the texts, one after the other; what is left over is dropped."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = [token for text in texts for token in tokenizer(text)["input_ids"]]
    count = min(limit, len(ids) // WINDOW)
    return torch.tensor(ids[: count * WINDOW]).view(count, WINDOW)


def perplexity(llm: LLM, windows: torch.Tensor) -> float:
    """Over all windows."""
    losses = [loss_per_token(llm.program, part) * len(part) for part in windows.split(PER_STEP)]
    return math.exp(sum(losses) / len(windows))


def decode_rate(llm: LLM, sequences: int) -> float:
    """Tokens per second of ``sequences`` random prompts that are as long as the model takes, prompts not counted."""
    length = llm.max_model_len - NEW_TOKENS
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 2000, (length,), generator=generator).tolist() for _ in range(sequences)]

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
        return time.perf_counter() - begin

    return sequences * (NEW_TOKENS - 1) / (seconds(NEW_TOKENS) - seconds(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=16, help="that decode together")
    parser.add_argument("--windows", type=int, default=96, help="most windows of each text")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    documents = gather_documents()
    texts = {
        "held out": windows_of([d.text for d in documents if d.held_out], options.windows),
        "trained on": windows_of([d.text for d in documents if not d.held_out], options.windows),
    }
    llms = {kind: LLM(MODEL, dtype=options.dtype, kv_cache_dtype=kind) for kind in ("auto", "int8")}
    print(f"tiny-pydoc in {options.dtype}, {options.threads} threads, windows of {WINDOW} tokens")
    print(f"{'KV cache':>22} {options.dtype:>12} {'int8':>12} {'int8 / ' + options.dtype:>18}")
    report("bytes per token", {k: float(bytes_per_block(llm.program.caches, 1)) for k, llm in llms.items()})
    rates = dict.fromkeys(llms, 0.0)
    for _ in range(options.repeats):
        for kind, llm in llms.items():
            rates[kind] = max(rates[kind], decode_rate(llm, options.sequences))
    report("decode tok/s", rates)
    for name, windows in texts.items():  # last: the programs get other caches than their engines'
        report(f"perplexity, {name}", {kind: perplexity(llm, windows) for kind, llm in llms.items()})


def report(name: str, found: dict[str, float]) -> None:
    """Print one line of the table."""
    ratio = found["int8"] / found["auto"]
    print(f"{name:>22} {found['auto']:12.4f} {found['int8']:12.4f} {ratio:18.5f}", flush=True)


if __name__ == "__main__":
    main()
