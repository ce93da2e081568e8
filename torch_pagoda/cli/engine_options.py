"""Options that commands with an engine share, and the keywords of ``LLM`` that they become."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

Tokenizer = Annotated[
    str | None, typer.Option(help="Folder or hub id; by default the model's.", rich_help_panel="Engine")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel="Engine")]
Device = Annotated[str, typer.Option(help="auto, cpu or npu.", rich_help_panel="Engine")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens per KV-cache block.", rich_help_panel="Engine")]
NumBlocks = Annotated[int | None, typer.Option(help="Blocks in the KV cache.", rich_help_panel="Engine")]
KvCacheMemory = Annotated[str | None, typer.Option(help="The same as memory, e.g. 4GiB.", rich_help_panel="Engine")]
MinKvCacheMemory = Annotated[
    str | None, typer.Option(help="What it shrinks to with little to do.", rich_help_panel="Engine")
]
KvCacheDtype = Annotated[str, typer.Option(help="auto, or int8 for half the memory.", rich_help_panel="Engine")]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="int8 or int4 for weights (and inputs, unless -weight-only follows) of so many bits.",
        rich_help_panel="Engine",
    ),
]
GroupSize = Annotated[
    int | None, typer.Option(help="Inputs of a rounded weight that share a scale.", rich_help_panel="Engine")
]
InputBits = Annotated[
    int | None,
    typer.Option(help="Of a W8A8 checkpoint: 16 keeps more of the inputs, slower.", rich_help_panel="Engine"),
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="On a CPU: the same numbers in every batch, bit for bit; slower.",
        rich_help_panel="Engine",
    ),
]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Sequences at the same time.", rich_help_panel="Engine")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Tokens per step.", rich_help_panel="Engine")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Tokens per sequence, prompt included.", rich_help_panel="Engine")
]
NoEnablePrefixCaching = Annotated[
    bool,
    typer.Option(
        "--no-enable-prefix-caching",
        help="Compute beginnings that prompts share each time.",
        rich_help_panel="Scheduling",
    ),
]
# A pair of such long names leaves no room for what they mean on 80 columns.
EnablePrefixCaching = Annotated[bool, typer.Option("--enable-prefix-caching", hidden=True)]
Policy = Annotated[str, typer.Option(help="fcfs, priority, sjf, fair or prefix.", rich_help_panel="Scheduling")]
Preemption = Annotated[str, typer.Option(help="auto, recompute or swap.", rich_help_panel="Scheduling")]
SwapSpace = Annotated[
    str, typer.Option(help="Host memory for swapped sequences, e.g. 1GiB.", rich_help_panel="Scheduling")
]
AsyncScheduling = Annotated[
    bool,
    typer.Option(
        "--async-scheduling",
        help="Plan each step while the one before runs; by default on an NPU (else: --no-async-scheduling).",
        rich_help_panel="Scheduling",
    ),
]
NoAsyncScheduling = Annotated[bool, typer.Option("--no-async-scheduling", hidden=True)]
NpuWarmup = Annotated[
    str,
    typer.Option(help="On an NPU: full (compile all steps first), or lazy.", rich_help_panel="Scheduling"),
]
Verify = Annotated[str, typer.Option(help="model, every-pass or off.", rich_help_panel="Compiler")]
Codegen = Annotated[str, typer.Option(help="auto, none, inductor, ge or aclgraph.", rich_help_panel="Compiler")]
NpuOptions = Annotated[
    str | None,
    typer.Option(help="Options of codegen ge or aclgraph.", metavar="JSON", rich_help_panel="Compiler"),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        help='Schedules of decode steps on an NPU: {"streams": true, "prefetch": true, "super_kernels": true}.',
        metavar="JSON",
        rich_help_panel="Compiler",
    ),
]
StaticDecode = Annotated[
    bool,
    typer.Option(
        "--static-decode", help="With ge: graphs of fixed sizes for decode steps.", rich_help_panel="Compiler"
    ),
]
SkipPass = Annotated[
    list[str] | None, typer.Option(help="Leave this pass out; repeatable.", rich_help_panel="Compiler")
]
OnlyPass = Annotated[
    list[str] | None,
    typer.Option(help="Of the optional passes run only this one; repeatable.", rich_help_panel="Compiler"),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
]


def check_engine_options(given: Mapping[str, Any]) -> None:
    """Check what can be checked before anything is imported.

    Raises:
        ValueError: two options contradict each other.
    """
    for name in ("enable_prefix_caching", "async_scheduling"):
        if given[name] and given[f"no_{name}"]:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} and --no-{option} contradict each other; give one")


def llm_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of ``LLM``.

    Args:
        given: all options of a command by their names; those of others are passed over.
    """
    from ..options import LLMOptions

    values = {
        **given,
        "enable_prefix_caching": not given["no_enable_prefix_caching"],
        "async_scheduling": False if given["no_async_scheduling"] else given["async_scheduling"] or None,
        "passes": pass_selection(given["skip_pass"], given["only_pass"]),
        "npu_options": None if given["npu_options"] is None else json_object("--npu-options", given["npu_options"]),
        "schedule": None if given["schedule"] is None else json_object("--schedule", given["schedule"]),
    }
    return {name: values[name] for name in LLMOptions.__annotations__ if values.get(name) is not None}


def json_object(option: str, text: str) -> dict[str, Any]:
    """The dictionary that an option was given.

    Raises:
        ValueError: it is none.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{option} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{option} is no JSON object; write {{...}}")
    return value


def pass_selection(skip: list[str] | None, only: list[str] | None) -> dict[str, list[str]] | None:
    """The option ``passes`` from what ``--skip-pass`` and ``--only-pass`` were given."""
    selection = {name: list(passes) for name, passes in (("skip", skip), ("only", only)) if passes}
    return selection or None
