"""Continue real text with a small trained model, many prompts in one batch, and compare with transformers.

    python examples/quickstart.py [--model FOLDER_OR_HUB_ID] [--max-tokens 64] [--prompts-file FILE]

The prompts have different lengths and run in one continuous batch over a paged KV cache, in float32 and
greedy. Every prompt is then run again, alone, by transformers' own generate. Exit status 1 if a single token
differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import torch_pagoda as pagoda

HERE = Path(__file__).resolve().parent
MODEL = HERE / "tiny-pydoc"
PROMPTS = HERE / "prompts.txt"


def read_prompts(path: Path) -> list[str]:
    """Prompts of a text file, separated by blank lines."""
    return [block.strip("\n") for block in path.read_text(encoding="utf-8").split("\n\n") if block.strip()]


def transformers_tokens(model_id: str, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """What transformers generates greedily for each prompt by itself, end tokens ignored."""
    model = AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)  # nothing but the greedy choice, without an end
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
        tokens.append(output[0, len(prompt) :].tolist())
    return tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODEL), help="checkpoint folder or hub id")
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--prompts-file", type=Path, default=PROMPTS, help="prompts separated by blank lines")
    arguments = parser.parse_args()

    begin = time.perf_counter()
    llm = pagoda.LLM(arguments.model, dtype="float32")
    print(f"compiled {arguments.model} in {time.perf_counter() - begin:.1f} s")

    params = pagoda.SamplingParams(max_tokens=arguments.max_tokens, temperature=0, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(read_prompts(arguments.prompts_file), params)
    seconds = time.perf_counter() - begin

    for output in outputs:
        print(f"\n--- prompt of {len(output.prompt_token_ids)} tokens")
        print(f"{output.prompt}>>>{output.outputs[0].text}")

    generated = [output.outputs[0].token_ids for output in outputs]
    count = sum(map(len, generated))
    stats = llm.stats()
    rate = count / seconds
    print(f"\n{len(outputs)} prompts in one batch: {count} tokens in {seconds:.2f} s, {rate:.0f} tok/s")
    print(f"KV cache: at most {stats['blocks_used_peak']} of {stats['blocks_total']} blocks in use,", end=" ")
    print(f"{stats['block_size']} tokens each")

    expected = transformers_tokens(
        arguments.model, [output.prompt_token_ids for output in outputs], arguments.max_tokens
    )
    equal = sum(
        ours == theirs
        for got, wanted in zip(generated, expected, strict=True)
        for ours, theirs in zip(got, wanted, strict=False)
    )
    total = sum(map(len, expected))
    print(f"exact: {equal}/{total} tokens equal transformers")
    return 0 if equal == total == count else 1


if __name__ == "__main__":
    sys.exit(main())
