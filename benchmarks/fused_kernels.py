"""Kernels of norms, rope and activations on this machine: pagoda's against transformers' spellings.

The spellings run eagerly and under inductor, whose compiled code is called as the runtime calls it: directly, without
Dynamo's guards. Sizes are llama-1.1b's, of gated norms Qwen3.5-0.8B's and Granite 4.0 H Micro's; queries, keys, gates
and ups are slices of merged products. Times are the shortest of many calls, because others may use the machine; they
hold what a call from Python costs. GB/s counts what is read and written once, and a decode step's few KB are in a
cache.

    python benchmarks/fused_kernels.py [--dtype bfloat16] [--threads 2] [--seconds 0.3]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx
from torch.nn import functional as F

from torch_pagoda.runtime.ops import OPERATORS

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 2048, 32, 4, 64, 5632
DELTA_HEADS, DELTA_DIM, SCAN_WIDTH = 16, 128, 4096
EPS = 1e-5
ROWS = {"decode 1": 1, "decode 32": 32, "prefill 1024": 1024}


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """LlamaRMSNorm."""
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    return weight * x.to(dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    return rms_norm(total, weight), total


def norm_then_gate(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Qwen3_5RMSNormGated."""
    return (rms_norm(x, weight) * F.silu(gate.to(torch.float32))).to(x.dtype)


def gate_then_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """GraniteMoeHybridRMSNormGated behind a scan, which yields float32, and the cast behind it."""
    return rms_norm(x * F.silu(gate.to(torch.float32)), weight).to(gate.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (HIDDEN,), weight, bias, EPS)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    return layer_norm(total, weight, bias), total


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rope(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """apply_rotary_pos_emb."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (query * cos) + (rotate_half(query) * sin), (key * cos) + (rotate_half(key) * sin)


def gated_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


@dataclass(frozen=True)
class Case:
    """One operator: the tensors by name, transformers' spelling of them, and pagoda's call of them."""

    name: str
    tensors: dict[str, torch.Tensor]
    spelling: Callable[..., Any]
    ours: Callable[[], Any]
    bytes: int


def cases(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Every operator on ``rows`` tokens."""
    functions = {
        overload._schema.name.removeprefix("pagoda::"): operator.cpu for overload, operator in OPERATORS.items()
    }

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    def case(name: str, spelling: Callable[..., Any], elements: int, operator: str, **tensors: torch.Tensor) -> Case:
        function, values = functions[operator], list(tensors.values())
        calls = {
            "rms_norm": lambda: function(*values, EPS, 0.0, True),
            "add_rms_norm": lambda: function(*values, EPS, 0.0, True),
            "layer_norm": lambda: function(*values, EPS),
            "add_layer_norm": lambda: function(*values, EPS),
            "rope": lambda: function(values[:2], *values[2:], "half", 0, True),
            "gated_activation": lambda: function(*values, "silu", 0.0, 0.0),
            "activation": lambda: function(*values, "gelu_tanh"),
        }
        return Case(name, tensors, spelling, calls[operator], elements * rows * dtype.itemsize)

    x, residual, weight, bias = (tensor(*shape) for shape in ((1, rows, HIDDEN),) * 2 + ((HIDDEN,),) * 2)
    yield case("rms_norm", rms_norm, 2 * HIDDEN, "rms_norm", x=x, weight=weight)
    yield case("add_rms_norm", add_rms_norm, 4 * HIDDEN, "add_rms_norm", x=x, residual=residual, weight=weight)
    yield case("layer_norm", layer_norm, 2 * HIDDEN, "layer_norm", x=x, weight=weight, bias=bias)
    yield case(
        "add_layer_norm",
        add_layer_norm,
        4 * HIDDEN,
        "add_layer_norm",
        x=x,
        residual=residual,
        weight=weight,
        bias=bias,
    )
    gated_norm, width = functions["gated_rms_norm"], DELTA_HEADS * DELTA_DIM
    heads, own = tensor(1, rows, DELTA_HEADS, DELTA_DIM), tensor(DELTA_DIM)
    opening = tensor(1, rows, 2 * width)[..., :width].view_as(heads)
    yield Case(
        "norm * silu(gate)",
        {"x": heads, "gate": opening, "weight": own},
        norm_then_gate,
        lambda: gated_norm(heads, opening, own, EPS, 0.0, True, "silu", False, DELTA_DIM),
        3 * width * rows * dtype.itemsize,
    )
    scanned, scale = torch.randn(1, rows, SCAN_WIDTH), tensor(SCAN_WIDTH)
    first = tensor(1, rows, 2 * SCAN_WIDTH)[..., :SCAN_WIDTH]
    yield Case(
        "norm(silu(gate))",
        {"x": scanned, "gate": first, "weight": scale},
        gate_then_norm,
        lambda: gated_norm(scanned, first, scale, EPS, 0.0, False, "silu", True, SCAN_WIDTH),
        SCAN_WIDTH * rows * (4 + 2 * dtype.itemsize),
    )
    widths = [count * HEAD_DIM for count in (HEADS, KV_HEADS, KV_HEADS)]
    query, key, _ = (
        part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in tensor(1, rows, sum(widths)).split(widths, -1)
    )
    cos, sin = tensor(1, rows, HEAD_DIM), tensor(1, rows, HEAD_DIM)
    elements = 2 * (widths[0] + widths[1]) + 2 * HEAD_DIM
    yield case("rope", rope, elements, "rope", query=query, key=key, cos=cos, sin=sin)
    gate, up = tensor(1, rows, 2 * INTERMEDIATE).chunk(2, -1)
    yield case("silu(gate) * up", gated_silu, 3 * INTERMEDIATE, "gated_activation", gate=gate, up=up)
    yield case("gelu_tanh", gelu_tanh, 2 * INTERMEDIATE, "activation", x=tensor(1, rows, INTERMEDIATE))


def compiled(case: Case) -> Callable[[], Any]:
    """A call of inductor's code for the spelling."""
    programs: list[Callable[..., Any]] = []
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        nodes = graph.graph.find_nodes(op="placeholder")
        names.extend(node.name.removeprefix("l_").removesuffix("_") for node in nodes)
        programs.append(compile_fx(graph, examples))
        return programs[-1]

    torch._dynamo.reset()
    torch.compile(case.spelling, backend=backend, dynamic=False, fullgraph=True)(**case.tensors)
    arguments = [case.tensors[name] for name in names]
    return lambda: programs[0](*arguments)


def shortest_seconds(function: Callable[[], object], seconds: float) -> float:
    """Per call, the best of many batches of at least 50 us."""
    function()
    begin = time.perf_counter()
    function()
    batch = 1 + int(50e-6 / (time.perf_counter() - begin))
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(batch):
            function()
        best = min(best, (time.perf_counter() - begin) / batch)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.3, help="spent on each figure")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    print(f"{options.dtype}, {options.threads} threads")
    print(f"{'':32} {'pagoda':>24} {'eager':>12} {'faster':>7} {'inductor':>12} {'faster':>7}")
    with torch.inference_mode():
        for title, rows in ROWS.items():
            for case in cases(rows, getattr(torch, options.dtype)):
                ours = shortest_seconds(case.ours, options.seconds)
                eager = shortest_seconds(lambda c=case: c.spelling(**c.tensors), options.seconds)  # type: ignore[misc]
                inductor = shortest_seconds(compiled(case), options.seconds)
                print(
                    f"{title:14} {case.name:17} {ours * 1e6:10.1f} us {case.bytes / ours / 1e9:5.1f} GB/s "
                    f"{eager * 1e6:9.1f} us {eager / ours:6.1f}x {inductor * 1e6:9.1f} us {inductor / ours:6.1f}x",
                    flush=True,
                )


if __name__ == "__main__":
    main()
