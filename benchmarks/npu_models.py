"""What lowering for Ascend NPUs makes of the models that people run there, with their published sizes.

No weights are needed: as many layers as show every kind are built from the configuration, without values, as
``pagoda inspect`` does. Each model has a process of its own.

    python benchmarks/npu_models.py --markdown models.md
    python benchmarks/npu_models.py --models llama-3.1-8b,gpt-oss-20b --socs Ascend910B3,Ascend310P3
    python benchmarks/npu_models.py --launches --models qwen3-8b   # kernels of torchair's graphs
    python benchmarks/npu_models.py --serve              # serve each on the reference kernels, beside transformers

The table has the operators of decoder layers that launch work in decode steps, one number for each kind of layer:
those of graphs for the graph engine, and of captured ones. Where other steps have a graph of their own, its numbers
follow. Notes say what is rejected, and what stays in ATen though an operator of the vendor exists, with the reasons.

``--launches`` has the kernels that the real torchair makes of the graphs for the graph engine instead (first:
``pagoda npu setup``).

``--serve`` cuts hidden sizes, experts and vocabularies, and keeps heads, latents, windows and choices of keys. The
lowered graph runs in float32 that counts as bfloat16; prompts are shorter and longer than every window. The exit
status is 1 where tokens are not those of transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

SOCS = ("Ascend910B3", "Ascend910_9391", "Ascend950PR_9589", "Ascend310P3")
CAPTURED = "Ascend910B3"
"""The chip that graphs for captures are lowered for, too."""
PROCESSES = multiprocessing.get_context("forkserver")
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}
_FAR_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
_PART_ROPE = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": (
        "llama",
        {
            **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072},
            **{"rms_norm_eps": 1e-5, "rope_parameters": {**_LLAMA3_ROPE, "factor": 8.0}},
        },
    ),
    "llama-3.2-1b": (
        "llama",
        {
            **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072},
            **{
                "rms_norm_eps": 1e-5,
                "rope_parameters": {**_LLAMA3_ROPE, "factor": 32.0},
                "tie_word_embeddings": True,
            },
        },
    ),
    "mistral-7b": ("mistral", {"sliding_window": 4096, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5}),
    "qwen2.5-0.5b": (
        "qwen2",
        {
            **{"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
            **{"num_key_value_heads": 2, "rope_parameters": _FAR_ROPE, "tie_word_embeddings": True},
        },
    ),
    "qwen3-8b": (
        "qwen3",
        {
            **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "max_position_embeddings": 40960, "rope_parameters": _FAR_ROPE},
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            **{"num_hidden_layers": 48, "head_dim": 128, "norm_topk_prob": True},
            **{"max_position_embeddings": 40960, "rope_parameters": _FAR_ROPE},
        },
    ),
    "glm-4.6": (
        "glm4_moe",
        {
            **{"hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92, "head_dim": 128},
            **{"moe_intermediate_size": 1536, "n_routed_experts": 160, "first_k_dense_replace": 3},
            **{"routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True},
            **{"max_position_embeddings": 202752, "rope_parameters": {**_FAR_ROPE, "partial_rotary_factor": 0.5}},
        },
    ),
    "minimax-m2": ("minimax_m2", {"rotary_dim": 64}),
    "deepseek-v3": ("deepseek_v3", {"max_position_embeddings": 163840, "rope_parameters": _YARN}),
    "kimi-k2": (
        "deepseek_v3",
        {
            **{"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1},
            **{"topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "vocab_size": 163840},
            **{
                "max_position_embeddings": 131072,
                "rope_parameters": {**_YARN, "rope_theta": 50000.0, "factor": 32.0},
            },
        },
    ),
    "deepseek-v3.2": ("deepseek_v32", {"rope_parameters": _YARN}),
    "glm-5": ("glm_moe_dsa", {}),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gemma-3-1b": (
        "gemma3_text",
        {
            **{"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4},
            **{
                "num_key_value_heads": 1,
                "sliding_window": 512,
                "vocab_size": 262144,
                "max_position_embeddings": 32768,
            },
        },
    ),
    "gemma-3-4b": (
        "gemma3_text",
        {
            **{"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024},
            **{"rope_parameters": _GEMMA3_ROPE},
        },
    ),
    "gemma-3-27b": (
        "gemma3_text",
        {
            **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32},
            **{"num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024},
            **{"rope_parameters": _GEMMA3_ROPE},
        },
    ),
    "gemma-4-31b": (
        "gemma4_text",
        {
            **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32},
            **{"num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": True},
            **{"global_head_dim": 512, "sliding_window": 1024, "hidden_size_per_layer_input": 0},
            **{"num_kv_shared_layers": 0, "final_logit_softcapping": 30.0, "max_position_embeddings": 262144},
        },
    ),
    "qwen3-next-80b": (
        "qwen3_next",
        {"intermediate_size": 5120, "max_position_embeddings": 262144, "rope_parameters": _PART_ROPE},
    ),
    "qwen3.5-9b": ("qwen3_5_text", {"max_position_embeddings": 262144, "rope_parameters": _PART_ROPE}),
    "qwen3.5-35b-a3b": ("qwen3_5_moe_text", {"max_position_embeddings": 262144, "rope_parameters": _PART_ROPE}),
    "phi-3-mini": ("phi3", {"sliding_window": 2047}),
    "deepseek-v4-flash": ("deepseek_v4", {}),
    "mimo-v2-flash": ("mimo_v2_flash", {}),
    "hy-v3": ("hy_v3", {}),
    "kimi-linear-48b": ("kimi_linear", {}),
}
"""Name → architecture, and the sizes that are not transformers' defaults, from the published config.json."""

CUT = {
    **{"vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 512, "moe_intermediate_size": 512},
    **{"shared_expert_intermediate_size": 512, "num_experts": 32, "n_routed_experts": 32, "num_local_experts": 32},
}
"""The most of each size that served models have; at 32 experts they are chosen as with more."""
MOST_CHOOSING_HEADS = 32
"""Of served models that choose keys, whose scores transformers keeps for all heads at once."""
PROMPT_LENGTHS = (37, 600)
BEYOND = 70
"""Tokens by which the last prompt is longer than the longest window."""
STEPS = 6


@dataclasses.dataclass
class Lowered:
    """A model on one chip, in one graph mode.

    Attributes:
        soc: the chip.
        graph_mode: see ``NpuTarget``.
        decode: operators that launch work in a decode step, of each kind of layer.
        others: the same of all other steps, where these have a graph of their own; else [].
        refused: why it is not lowered; "" where it is.
        not_static: why decode steps have no graphs of fixed sizes; "" where they can.
        kept: what stays in ATen though there is an operator for it, with the reasons.
    """

    soc: str
    graph_mode: str
    decode: list[int] = dataclasses.field(default_factory=list)
    others: list[int] = dataclasses.field(default_factory=list)
    refused: str = ""
    not_static: str = ""
    kept: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Served:
    """Prompts that the reference kernels served.

    Attributes:
        refused: why none were; "" where they were.
        lengths: tokens of the prompts.
        differ: those of prompts whose tokens are not transformers'.
        error: largest error of a log-probability.
    """

    refused: str = ""
    lengths: list[int] = dataclasses.field(default_factory=list)
    differ: list[int] = dataclasses.field(default_factory=list)
    error: float = 0.0

    @property
    def said(self) -> str:
        """One line."""
        if self.refused:
            return f"rejected: {self.refused}"
        wrong = f"other tokens for prompts of {', '.join(map(str, self.differ))} tokens"
        lengths = ", ".join(map(str, self.lengths))
        return f"{wrong if self.differ else 'same tokens'}, prompts of {lengths}, error {self.error:.1e}"


def published_config(name: str) -> Any:
    """The configuration of a model of ``PUBLISHED``."""
    from transformers import AutoConfig

    architecture, sizes = PUBLISHED[name]
    return AutoConfig.for_model(architecture, **sizes)


def lowered(name: str, socs: Sequence[str]) -> list[Lowered]:
    """Lower a model without weights for each chip, for ``CAPTURED`` in both graph modes."""
    import torch
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from torch_pagoda.compiler.capture.trace import capture
    from torch_pagoda.compiler.costs.skeleton import build_skeleton
    from torch_pagoda.compiler.report import first_line
    from torch_pagoda.passes import UnsupportedModel
    from torch_pagoda.runtime.npu_target import GRAPH_MODES, Product

    torch.set_num_threads(1)
    found = []
    config = published_config(name)
    for dtype in (torch.bfloat16, torch.float16):
        rows = [
            Lowered(soc, mode)
            for soc in socs
            for mode in (GRAPH_MODES if soc == CAPTURED else GRAPH_MODES[:1])
            if soc.startswith(Product.INFERENCE.value) == (dtype is torch.float16)  # which has no bfloat16
        ]
        if not rows:
            continue
        try:
            captured = capture(build_skeleton(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, dtype).model)
        except UnsupportedModel as error:
            found += [dataclasses.replace(row, refused=first_line(error)) for row in rows]
            continue
        found += [_lowered_for(captured, row) for row in rows]
    return found


def _lowered_for(captured: Any, row: Lowered) -> Lowered:
    """Fill in the row of a captured graph."""
    from torch_pagoda.compiler.options import CompileOptions
    from torch_pagoda.compiler.pipeline import run_pipeline
    from torch_pagoda.compiler.report import CompileReport, first_line
    from torch_pagoda.compiler.targets.npu.ge.static_graph import why_not_static
    from torch_pagoda.passes import UnsupportedModel
    from torch_pagoda.passes.lower.npu.decode_graph import decode_graph_or_reason
    from torch_pagoda.runtime.npu_target import NpuTarget

    captured.traced.npu = NpuTarget(row.soc, graph_mode=row.graph_mode)
    report = CompileReport("the model")
    try:
        traced = run_pipeline(captured, CompileOptions(codegen="none", target="npu", verify="off"), None, report)
    except UnsupportedModel as error:
        row.refused = first_line(error)
        return row
    decode, reason = decode_graph_or_reason(traced)
    row.decode = _launches(decode or traced)
    row.others = _launches(traced) if decode is not None else []
    row.not_static = reason or why_not_static(decode or traced)
    row.kept = list(dict.fromkeys(_kept(report)))
    return row


def launches(name: str, socs: Sequence[str]) -> list[Lowered]:
    """Convert a model without weights by torchair for each chip; the numbers are those of kernels."""
    import torch
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from torch_pagoda.compiler.costs.skeleton import build_skeleton
    from torch_pagoda.compiler.options import CompileOptions
    from torch_pagoda.reports.npu_graph import graph_engine_report
    from torch_pagoda.runtime.npu_target import Product

    found, config = [], published_config(name)
    for soc in socs:
        dtype = torch.float16 if soc.startswith(Product.INFERENCE.value) else torch.bfloat16
        skeleton = build_skeleton(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, dtype)
        options = CompileOptions(codegen="none", target="npu", verify="off", soc=soc)
        graph = graph_engine_report(skeleton.model, skeleton.representatives, options)
        row = Lowered(soc, "ge", sorted({layer.launches for layer in graph.layers}), refused=graph.unavailable)
        row.others = [] if graph.other_steps is None else [graph.other_steps]
        row.not_static = "" if graph.decode else "its sizes stay unknown"
        found.append(row)
    return found


def _launches(traced: Any) -> list[int]:
    """Operators that launch work in a layer, once for each number that there is."""
    from torch_pagoda.passes.graph.provenance import decoder_layers, launches_work

    layers = decoder_layers(traced.graph, tokens=traced.placeholder(traced.input_ids))
    return sorted({sum(map(launches_work, layers.nodes(i))) for i in range(len(layers.paths))})


def _kept(report: Any) -> Iterator[str]:
    """What has become ATen operators, with the reasons why no operator of the vendor was taken."""
    from torch_pagoda.reports.npu import route_summaries

    for route in route_summaries(report.passes):
        if "aten" in route.chosen and route.refused:
            reasons = "; ".join(f"{name.removeprefix('npu.')}: {reason}" for name, reason in route.refused)
            yield f"{route.operator.removeprefix('pagoda.')}: {reasons}"


def cut_config(name: str) -> Any:
    """A configuration that can be served here: few layers, narrow, with the heads and windows of the model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from torch_pagoda.compiler.costs.skeleton import build_skeleton

    config = published_config(name)
    config = build_skeleton(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config).model.config
    implied = config.to_dict().get("head_dim") is None  # by hidden_size
    for size, most in CUT.items():
        if (getattr(config, size, None) or 0) > most and not (implied and size == "hidden_size"):
            setattr(config, size, most)
    if getattr(config, "index_topk", None):
        config.num_attention_heads = config.num_key_value_heads = min(config.num_attention_heads, MOST_CHOOSING_HEADS)
    config.bos_token_id = config.eos_token_id = None
    config.pad_token_id = 0
    return config


def served(name: str) -> Served:
    """Serve a narrow model with random weights, and compare tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from torch_pagoda import LLM, SamplingParams
    from torch_pagoda.compiler.options import CompileOptions
    from torch_pagoda.compiler.report import first_line
    from torch_pagoda.passes import UnsupportedModel
    from torch_pagoda.runtime.npu_target import NpuTarget

    from hf_reference import greedy_with_cache

    config = cut_config(name)
    windows = [getattr(config, known, None) or 0 for known in ("sliding_window", "index_topk")]
    lengths = [*PROMPT_LENGTHS, max(windows) + BEYOND]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # otherwise tokens hardly depend on the layers
            parameter.mul_(2)
    prompts = [torch.randint(3, config.vocab_size, (length,)).tolist() for length in lengths]
    row = Served(lengths=lengths)
    target = NpuTarget(float32_as=torch.bfloat16)
    with mock.patch.object(CompileOptions, "npu_target", lambda *_: target):
        try:
            llm = LLM(
                model,
                target="npu",
                max_num_seqs=2,
                max_model_len=max(lengths) + STEPS + 1,
                max_num_batched_tokens=512,
            )
        except UnsupportedModel as error:
            return Served(first_line(error))
        params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=5)
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        (answer,) = output.outputs
        expected = greedy_with_cache(model, prompt, STEPS)
        row.error = max(row.error, expected.largest_error(answer.token_ids, answer.logprobs))
        if list(answer.token_ids) != expected.tokens:
            row.differ.append(len(prompt))
    return row


def in_a_process(examine: Callable[[str], Any], name: str) -> Any:
    """The result of a function of a model's name, computed in a process that ends with it.

    Raises:
        BrokenProcessPool: the process died, as of memory that ended.
    """
    with ProcessPoolExecutor(1, PROCESSES) as pool:
        return pool.submit(examine, name).result()


def _cell(row: Lowered) -> str:
    if row.refused:
        return "rejected"
    decode = ", ".join(map(str, row.decode))
    return f"{decode} (others {', '.join(map(str, row.others))})" if row.others else decode


def table(rows: dict[str, list[Lowered]]) -> str:
    """All models as Markdown, with notes on what is rejected or kept."""
    columns = list(dict.fromkeys((row.soc, row.graph_mode) for found in rows.values() for row in found))
    lines = [f"| model | {' | '.join(f'{soc}, {mode}' for soc, mode in columns)} | static decode graphs |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    notes: list[str] = []
    for name, found in rows.items():
        of = {(row.soc, row.graph_mode): row for row in found}
        static = [row.soc for row in found if row.graph_mode == "ge" and not row.refused and not row.not_static]
        chips = {row.soc for row in found}
        said = "yes" if len(static) == len(chips) else ", ".join(static) or "no"
        lines.append(f"| {name} | {' | '.join(_cell(of[column]) for column in columns)} | {said} |")
        notes += _notes(name, found)
    return "\n".join([*lines, "", *notes]) + "\n"


def _notes(name: str, found: Sequence[Lowered]) -> Iterator[str]:
    where: dict[str, list[str]] = {}
    for row in found:
        texts = [f"rejected: {row.refused}"] if row.refused else [f"kept: {kept}" for kept in row.kept]
        if row.graph_mode == "ge" and row.not_static:
            texts.append(f"no static decode graphs: {row.not_static}")
        for text in texts:
            where.setdefault(text, []).append(f"{row.soc} {row.graph_mode}")
    for text, columns in where.items():
        yield f"- {name}, {'everywhere' if len(columns) == len(found) else ', '.join(columns)}: {text}"


def main() -> int:
    """Lower or serve the chosen models; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(PUBLISHED), help="names, separated by commas (default all)")
    parser.add_argument("--socs", default=",".join(SOCS), help=f"chips (default {','.join(SOCS)})")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--serve", action="store_true", help="serve narrow models, and compare tokens")
    ways.add_argument("--launches", action="store_true", help="count kernels of the graphs that torchair makes")
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    args = parser.parse_args()
    names = args.models.split(",")
    if unknown := [name for name in names if name not in PUBLISHED]:
        parser.error(f"--models names {', '.join(unknown)}; known are {', '.join(PUBLISHED)}")
    PROCESSES.set_forkserver_preload(["torch._dynamo", "transformers", "torch_pagoda"])
    examine: Callable[[str], Any] = served
    if not args.serve:
        examine = partial(launches if args.launches else lowered, socs=args.socs.split(","))
    rows: dict[str, Any] = {}
    failed = []
    for name in names:
        try:
            rows[name] = in_a_process(examine, name)
        except Exception as error:
            failed.append(name)
            print(f"{name}: failed: {type(error).__name__}: {error}", flush=True)
            continue
        said = rows[name].said if args.serve else "; ".join(f"{r.soc} {r.graph_mode} {_cell(r)}" for r in rows[name])
        print(f"{name}: {said}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1, default=dataclasses.asdict) + "\n")
        if args.markdown and not args.serve:
            args.markdown.write_text(table(rows))
    if args.serve:
        right = [row for row in rows.values() if not row.refused and not row.differ]
        print(f"{len(right)} of {len(names)} models are served with the tokens of transformers")
        return 1 if failed or any(row.differ for row in rows.values()) else 0
    print(table(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
