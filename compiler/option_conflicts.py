"""Options that do not go together: a table of what has no place beside what, with the reasons and remedies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LEFT_OUT = "leave it out, or use torch_pagoda.compile or torch_pagoda.LLM"
_NO_GRAPHS = "it makes no graphs for the graph engine; use codegen='ge'"
_ONE_BY_ONE = "it makes the calls one by one; use codegen='aclgraph', or 'ge' with static_decode=True"
_SUMS = "generated code does not know its order of sums; leave one of them out"
_ROUNDED = "that says how inputs are rounded, and input_bits is for weights that are rounded already; leave it out"
_GROUPS = "it is for quantized weights; give quantization too"
_SINGLE_STREAM = "npu_options['ge_config.enable_single_stream']=True"

CONFLICTS: dict[str, dict[str, str]] = {
    "static_decode": {
        "target='cpu'": "leave it out, or use target='npu' with codegen='ge'",
        "codegen='aclgraph'": "its graphs have fixed sizes already; leave it out, or use codegen='ge'",
        **dict.fromkeys(("codegen='none'", "codegen='inductor'"), _NO_GRAPHS),
        "backend='pagoda'": f"the sizes of a step are the caller's there; {_LEFT_OUT}",
    },
    "batch_invariant": {
        **dict.fromkeys(("codegen='inductor'", "codegen='ge'", "codegen='aclgraph'"), _SUMS),
        "target='npu'": "it is for CPUs so far; leave it out, or use the CPU",
        "backend='pagoda'": f"batches are the caller's there; {_LEFT_OUT}",
    },
    "group_size": {
        "quantization=None": _GROUPS,
        "target='npu' with quantization='int8'": "an NPU has one scale for each output then; leave group_size out",
    },
    "group_size=0": {"quantization=None": _GROUPS},
    "input_bits": {
        **{f"quantization='{name}{rest}'": _ROUNDED for name in ("int8", "int4") for rest in ("", "-weight-only")},
        "backend='pagoda'": f"nothing is quantized there; {_LEFT_OUT}",
    },
    "codegen='inductor'": {"target='npu'": "use 'ge', 'aclgraph', 'none' or 'auto'"},
    "codegen='ge'": {"target='cpu'": "use 'inductor', 'none' or 'auto', or target='npu'"},
    "codegen='aclgraph'": {"target='cpu'": "use 'inductor', 'none' or 'auto', or target='npu'"},
    "quantization": {"backend='pagoda'": f"the weights stay the caller's there; {_LEFT_OUT}"},
    "quantization='int4'": {"target='npu'": "no product of an NPU takes it; use another quantization, or the CPU"},
    "pack_weights": {"backend='pagoda'": f"the weights stay the caller's there; {_LEFT_OUT}"},
    "kv_cache_dtype": {"backend='pagoda'": f"the cache is the caller's there; {_LEFT_OUT}"},
    "npu_options": {
        "target='cpu'": "leave them out",
        "target='npu' with codegen='none'": "'ge' and 'aclgraph' have a toolchain that takes them; leave them out",
    },
    "schedule": {
        "target='cpu'": "a CPU runs one launch after the other; leave it out",
        "target='npu' with codegen='none'": _ONE_BY_ONE,
        "codegen='ge' with static_decode=False": "dynamic graphs ignore schedules; give static_decode=True, or use "
        "codegen='aclgraph'",
        "backend='pagoda'": f"steps may be of any kind there; {_LEFT_OUT}",
    },
    "schedule['super_kernels']": {
        "codegen='aclgraph'": "its scopes are for the graph engine; give npu_options={'static_kernel_compile': True, "
        "'super_kernel_optimize': True}, which fuse what is captured",
        "npu_options['dump_config.enable_dump']=True": "of what is fused nothing is dumped; leave one of them out",
    },
    "schedule['streams']": {_SINGLE_STREAM: "leave one of them out"},
    "schedule['prefetch']": {_SINGLE_STREAM: "leave one of them out"},
}
"""An option that asks for something, or one value of it → what it is not for, joined by "with" → why, and the
remedy. "backend" is that of ``torch.compile``."""


def check_conflicts(options: Mapping[str, Any], backend: str = "") -> None:
    """Check that options go together.

    Args:
        options: those of ``CompileOptions`` by name, each of them valid by itself.
        backend: "pagoda" for the drop-in.

    Raises:
        ValueError: two do not.
    """
    schedule = {name: on for name, on in options["schedule"].items() if on}
    given = {**options, "schedule": schedule, "static_decode": bool(options["static_decode"]), "backend": backend}
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
                raise ValueError(f"{shown} is not for {other}: {why}")
