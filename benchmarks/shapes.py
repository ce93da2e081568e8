"""The models that speed is measured on, with random weights, and what they are asked.

The figures of other systems for the same shapes and requests can be compared with ours when both are measured in one
run; see ``peers.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
)

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
STATE_SHAPES: dict[str, Callable[[], Any]] = {
    "qwen3.5-0.8b": lambda: Qwen3_5TextConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        vocab_size=248320,
        max_position_embeddings=262144,
        rope_parameters={"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
    ),
    "granite-4.0-h-micro, 10 layers": lambda: GraniteMoeHybridConfig(
        hidden_size=2048,
        intermediate_size=8192,
        shared_intermediate_size=8192,
        num_hidden_layers=10,
        layer_types=[*["linear_attention"] * 5, "full_attention", *["linear_attention"] * 4],
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=64,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        vocab_size=100352,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
}
"""Models most layers of which keep a state in place of keys and values; see ``states.py``."""
LARGE_SHAPES: dict[str, Callable[[], Any]] = {
    name: lambda sizes=sizes: Qwen3Config(  # type: ignore[misc]
        hidden_size=sizes[0],
        intermediate_size=sizes[1],
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=sizes[2],
    )
    for name, sizes in (("qwen3-4b", (2560, 9728, True)), ("qwen3-8b", (4096, 12288, False)))
}
"""Models whose starts are measured."""
START_SHAPES = {**SHAPES, **LARGE_SHAPES}
EXPERT_SHAPES: dict[str, Callable[[], Any]] = {
    "gpt-oss-20b, 4 layers": lambda: GptOssConfig(
        num_hidden_layers=4, num_local_experts=32, tie_word_embeddings=False
    ),
}
"""Models whose layers choose among experts: what a token reads of them is not told by their matrices."""
WHOLE_SHAPES = {**SHAPES, **STATE_SHAPES}
"""Models each token of which reads all matrices."""
ALL_SHAPES = {**WHOLE_SHAPES, **EXPERT_SHAPES}
PROMPT_LENGTHS = [
    *(204, 79, 149, 224, 355, 283, 227, 391, 41, 243, 309, 274, 324, 119, 102, 504),
    *(120, 428, 346, 225, 71, 119, 206, 120, 369, 197, 57, 365, 104, 297, 436, 147),
]
OUTPUT_LENGTHS = [
    *(224, 213, 95, 191, 208, 98, 115, 232, 193, 45, 163, 163, 158, 183, 48, 209),
    *(25, 201, 143, 48, 47, 218, 167, 179, 219, 130, 199, 44, 50, 144, 144, 180),
]
DECODE_PROMPT, DECODE_TOKENS, PREFILL_PROMPT = 128, 128, 1024


def head_dim(config: Any) -> int:
    """Of one attention head; configs name it only where it does not follow from the others."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def attention_layers(config: Any) -> int:
    """How many layers keep keys and values."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return sum(kind.endswith("attention") and kind != "linear_attention" for kind in kinds)


def random_model(shape: str) -> PreTrainedModel:
    """A bf16 model of the shape with random weights; the head is spread so that greedy tokens vary."""
    torch.manual_seed(0)
    config = ALL_SHAPES[shape]()
    config.initializer_range = 0.02
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval().requires_grad_(False)


def weight_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of weights that one decoded token reads: all but the input embedding, which is looked up."""
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    rest = sum(p.numel() * p.element_size() for p in model.parameters() if p is not table)
    return rest + (head.numel() * head.element_size() if head is table else 0)


class Prompts:
    """Fresh random prompts at every call."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, lengths: list[int]) -> list[list[int]]:
        return [torch.randint(100, 31000, (n,), generator=self.generator).tolist() for n in lengths]
