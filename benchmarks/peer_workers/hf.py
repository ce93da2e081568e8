"""transformers' generate as a worker: sdpa attention, many prompts as one left-padded batch."""

from __future__ import annotations

import argparse

import torch
from protocol import Generate, serve
from transformers import AutoModelForCausalLM


def load(args: argparse.Namespace) -> Generate:
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[int]:
        longest, tokens = max(map(len, prompts)), max(outputs)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            found = model.generate(
                ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            )
        # Those that asked for fewer tokens wait for the others.
        return [min(n, found.shape[1] - longest) for n in outputs]

    return generate


serve(load)
