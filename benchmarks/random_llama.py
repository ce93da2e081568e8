"""A Llama-like model of 88 million random parameters.

Large enough that reading its weights is what decoding costs, and small enough for two cores.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from torch_pagoda import LLM, SamplingParams

VOCAB_SIZE = 8192


def llama_config(layers: int = 12) -> LlamaConfig:
    """The shape: 768 wide, 12 heads of 64, 4 of them with keys of their own; 12 KiB of keys and values per token in
    bfloat16."""
    return LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=0.02,
    )


def random_llama(dtype: torch.dtype = torch.bfloat16, layers: int = 12) -> PreTrainedModel:
    """The model, with the same weights at every call."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama_config(layers), dtype=dtype, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def greedy(max_tokens: int) -> SamplingParams:
    """Exactly so many tokens, the likeliest each."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def warm_up(llm: LLM) -> None:
    """Run every kind of step once."""
    llm.generate([[5, 6, 7, 8]] * min(4, llm.batcher.max_num_seqs), greedy(4))
