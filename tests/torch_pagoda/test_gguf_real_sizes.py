"""A GGUF file of real sizes, heads of 128 and a vocabulary of 151,936, is read within the memory of its bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gguf_files import Gguf, Stored, dense, random_blocks

from torch_pagoda.checkpoint.gguf.block_types import BLOCK_TYPES
from torch_pagoda.checkpoint.gguf.checkpoint import open_gguf
from torch_pagoda.runtime.ops.linear.stored_weight import as_dense

pytestmark = pytest.mark.slow

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, INNER, LAYERS = 151936, 1024, 16, 8, 128, 3072, 2
WEIGHTS = {
    "attn_q": (HEADS * DIM, HIDDEN),
    "attn_k": (KV_HEADS * DIM, HIDDEN),
    "attn_v": (KV_HEADS * DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * DIM),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
NORMS = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "attn_q_norm": DIM, "attn_k_norm": DIM}
LOAD = """
import resource, sys, torch
from torch_pagoda.checkpoint.configs import load_config
from torch_pagoda.checkpoint.loading import load_model
name, config = load_config(sys.argv[1], False)
from transformers import Qwen3ForCausalLM
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load_model(name, "bfloat16", False, torch.device("cpu"), config)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def qwen3(kind: str) -> Gguf:
    blocks = next(one for one in BLOCK_TYPES.values() if one.name == kind)

    def matrix(name: str, shape: tuple[int, int]) -> Stored:
        return Stored(name, shape, kind, random_blocks(kind, shape[0] * shape[1] // blocks.weights).tobytes())

    def norm(name: str, size: int) -> Stored:
        return Stored(name, (size,), "F32", torch.ones(size).numpy().tobytes())

    said = {
        **{"context_length": 40960, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": INNER},
        **{"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": DIM},
        **{"attention.value_length": DIM, "rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6},
    }
    tensors = [matrix("token_embd.weight", (VOCAB, HIDDEN)), norm("output_norm.weight", HIDDEN)]
    for layer in range(LAYERS):
        tensors += [matrix(f"blk.{layer}.{name}.weight", shape) for name, shape in WEIGHTS.items()]
        tensors += [norm(f"blk.{layer}.{name}.weight", size) for name, size in NORMS.items()]
    metadata = {"general.architecture": "qwen3", **{f"qwen3.{key}": value for key, value in said.items()}}
    tokens = [f"t{i}" for i in range(VOCAB)]
    return Gguf({**metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 151645}, tensors)


@pytest.mark.parametrize(("kind", "most"), [("Q4_0", 1.3), ("Q8_0", 1.3), ("Q4_K", 1.6)])
def test_weights_are_read_within_the_memory_of_the_file(kind: str, most: float, tmp_path: Path) -> None:
    """Those whose codes, scales and offsets take as much as in the file; of Q4_K 6 bits for 4.5."""
    file = qwen3(kind)
    path = file.write(tmp_path / "model.gguf")
    done = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=True)
    ratio = int(done.stdout) * 1024 / path.stat().st_size
    assert ratio < most, ratio
    found = open_gguf(path)
    assert found.values["vocab_size"] == VOCAB and found.values["head_dim"] == DIM
    weights = dict(found.tensors(torch.float32))
    for name, key in (
        ("blk.1.attn_k.weight", "model.layers.1.self_attn.k_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
    ):
        assert torch.equal(as_dense(weights[key]), dense(file.tensor(name)))
