"""torch-pagoda as a worker."""

from __future__ import annotations

import argparse

import torch
from protocol import Generate, serve

from torch_pagoda import LLM, SamplingParams


def load(args: argparse.Namespace) -> Generate:
    torch.set_num_threads(args.threads)
    as_it_is = args.weights == "bf16" or args.weights.endswith("-stored")
    quantization = None if as_it_is else args.weights
    llm = LLM(args.model, max_num_seqs=32, max_model_len=args.max_model_len, quantization=quantization)

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[int]:
        params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in outputs]
        return [len(found.outputs[0].token_ids) for found in llm.generate(prompts, params)]

    return generate


serve(load)
