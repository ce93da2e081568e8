"""vLLM on the CPU as a worker: its defaults, but for the sizes that all peers are given."""

from __future__ import annotations

import argparse
import os

from protocol import Generate, serve


def load(args: argparse.Namespace) -> Generate:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        args.model, dtype="bfloat16", max_num_seqs=32, max_model_len=args.max_model_len, skip_tokenizer_init=True
    )

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[int]:
        params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, detokenize=False) for n in outputs]
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        return [len(found.outputs[0].token_ids) for found in llm.generate(asked, params, use_tqdm=False)]

    return generate


# Its engine runs in a process of its own, which imports this file again.
if __name__ == "__main__":
    serve(load)
