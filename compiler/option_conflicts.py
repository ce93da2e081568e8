"""Conflicts between options: a table with reasons and remedies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LEFT_OUT = "omit it, or use torch_pagoda.compile or torch_pagoda.LLM"
_NO_GRAPHS = "it builds no graphs for the graph engine; use codegen='ge'"
_ONE_BY_ONE = "it calls operators one by one; use codegen='aclgraph', or 'ge' with static_decode=True"
_SUMS = "generated code has another summation order; omit one of them"
_ROUNDED = "quantization already sets the inputs' bits, and input_bits is for quantized checkpoints; omit it"
_GROUPS = "it is for quantized weights; set quantization too"
_SINGLE_STREAM = "npu_options['ge_config.enable_single_stream']=True"

CONFLICTS: dict[str, dict[str, str]] = {
    "static_decode": {
        "target='cpu'": "omit it, or use target='npu' with codegen='ge'",
        "codegen='aclgraph'": "its graphs are static already; omit it, or use codegen='ge'",
        **dict.fromkeys(("codegen='none'", "codegen='inductor'"), _NO_GRAPHS),
        "backend='pagoda'": f"the caller sets the sizes of a step there; {_LEFT_OUT}",
    },
    "tensor_parallel_size": {
        "codegen='inductor'": "several ranks run our own kernels; omit it",
        "backend='pagoda'": f"the caller's process runs the model there; {_LEFT_OUT}",
    },
    "pipeline_parallel_size": {
        "codegen='inductor'": "stages run our own kernels; omit it",
        "backend='pagoda'": f"the caller's process runs the model there; {_LEFT_OUT}",
    },
    "batch_invariant": {
        **dict.fromkeys(("codegen='inductor'", "codegen='ge'", "codegen='aclgraph'"), _SUMS),
        "target='npu'": "only CPUs support it; omit it, or use the CPU",
        "backend='pagoda'": f"the caller makes the batches there; {_LEFT_OUT}",
    },
    "group_size": {
        "quantization=None": _GROUPS,
        "target='npu' with quantization='int8'": "an NPU then uses one scale per output; omit group_size",
    },
    "group_size=0": {"quantization=None": _GROUPS},
    "input_bits": {
        **{f"quantization='{name}{rest}'": _ROUNDED for name in ("int8", "int4") for rest in ("", "-weight-only")},
        "backend='pagoda'": f"that does not quantize; {_LEFT_OUT}",
    },
    "codegen='inductor'": {"target='npu'": "use 'ge', 'aclgraph', 'none' or 'auto'"},
    "codegen='ge'": {"target='cpu'": "use 'inductor', 'none' or 'auto', or target='npu'"},
    "codegen='aclgraph'": {"target='cpu'": "use 'inductor', 'none' or 'auto', or target='npu'"},
    "quantization": {"backend='pagoda'": f"the caller keeps the weights there; {_LEFT_OUT}"},
    "quantization='int4'": {
        "target='npu'": "NPU matrix products do not support it; use another quantization, or the CPU"
    },
    "pack_weights": {"backend='pagoda'": f"the caller keeps the weights there; {_LEFT_OUT}"},
    "kv_cache_dtype": {"backend='pagoda'": f"the caller owns the cache there; {_LEFT_OUT}"},
    "npu_options": {
        "target='cpu'": "omit them",
        "target='npu' with codegen='none'": "only the toolchains of 'ge' and 'aclgraph' have options; omit them",
    },
    "schedule": {
        "target='cpu'": "a CPU runs one operator after the other; omit it",
        "target='npu' with codegen='none'": _ONE_BY_ONE,
        "codegen='ge' with static_decode=False": "dynamic graphs ignore schedules; set static_decode=True, or use "
        "codegen='aclgraph'",
        "backend='pagoda'": f"the caller may run any step there; {_LEFT_OUT}",
    },
    "schedule['super_kernels']": {
        "codegen='aclgraph'": "its scopes are for the graph engine; give npu_options={'static_kernel_compile': True, "
        "'super_kernel_optimize': True}, which fuse captured launches",
        "npu_options['dump_config.enable_dump']=True": "fused operators are not dumped; omit one of them",
    },
    "schedule['streams']": {_SINGLE_STREAM: "omit one of them"},
    "schedule['prefetch']": {_SINGLE_STREAM: "omit one of them"},
}
"""An option, or one value of it → the setting it conflicts with, joined by "with" → the reason and the remedy.
"backend" is that of ``torch.compile``."""


def check_conflicts(options: Mapping[str, Any], backend: str = "") -> None:
    """Check that options do not conflict.

    Args:
        options: fields of ``CompileOptions`` by name, each valid by itself.
        backend: "pagoda" for the drop-in.

    Raises:
        ValueError: two options conflict.
    """
    schedule = {name: on for name, on in options["schedule"].items() if on}
    given = {**options, "schedule": schedule, "static_decode": bool(options["static_decode"]), "backend": backend}
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        given[name] = None if given[name] == 1 else given[name]
    for name in ("schedule", "npu_options"):
        given |= {f"{name}[{key!r}]": value for key, value in given[name].items()}
    facts = {f"{name}={value!r}" for name, value in given.items()}
    for option, others in CONFLICTS.items():
        value = given.get(option)
        if option not in facts and (not value or value == "auto"):
            continue
        for other, why in others.items():
            if facts.issuperset(other.split(" with ")):
                shown = option if option in facts else f"{option}={value!r}"
                raise ValueError(f"{shown} cannot be used with {other}: {why}")
