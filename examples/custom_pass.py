"""Two passes of your own: a pattern that calls your kernel, and a function that walks the graph.

python examples/custom_pass.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torch_pagoda as pagoda


@torch.library.custom_op("mylib::swiglu", mutates_args=())
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up  # your kernel


swiglu.register_fake(lambda gate, up: torch.empty_like(up))
example = torch.empty(1, 7, 128)
pattern = pagoda.Pattern(
    search=lambda gate, up: torch.nn.functional.silu(gate) * up,
    replace=lambda gate, up: torch.ops.mylib.swiglu(gate, up),
    example_inputs=[example, example],
    name="my_swiglu",
)


def list_norms(traced: pagoda.TracedGraph) -> pagoda.PassRecord:
    norms = [n for n in traced.graph.nodes if n.target is torch.ops.pagoda.add_rms_norm.default]
    return pagoda.PassRecord("list_norms", rejections=[pagoda.Rejection(n.name, "seen") for n in norms])


config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
)
pagoda.register_pass("list_norms", list_norms)
llm = pagoda.LLM(LlamaForCausalLM(config).eval(), patterns=[pattern], codegen="none")
for record in llm.compile_report.passes:
    print(f"{record.name:28} {record.matches:3} rewritten, {len(record.rejections)} reported")
