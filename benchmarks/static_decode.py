"""What a decode step is as a GE graph whose sizes vary, and as one of fixed sizes, architecture by architecture.

Needs no NPU: the real torchair converts both graphs, and what it converted serves four prompts operator by operator,
compared with the lowered graph called as it is, in float32.

    pagoda npu python benchmarks/static_decode.py --only 'llama,qwen*'
    pagoda npu python benchmarks/static_decode.py --soc Ascend310P3 --markdown static.md
    pagoda npu python benchmarks/static_decode.py --kv-cache-dtype int8

Models have the sizes that the limits of the operators allow, and few layers. The exit status is 1 where a graph of
fixed sizes has an input of unknown size, a node on the host, more launches than the other, a copy of a cache, or
other numbers. Over int8 caches a number halfway between two integers may become either, which changes all that comes
after; so there each step is compared by itself, too, with the same over a copy of its caches.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent))


LIMIT = 1e-5
"""Of log-probabilities in float32."""
ROUNDED = 0.01
"""Of those over int8 caches, of which a number was rounded the other way."""


@dataclasses.dataclass
class StaticRow:
    """One architecture on one chip.

    Attributes:
        name: of the architecture.
        refused: why it is not lowered, or why its decode steps have no graph of fixed sizes; "" where they have.
        is_lowered: it is lowered.
        failed: what went wrong behind the lowering; "" where nothing did.
        dynamic, static: fields of ``GraphCounts``.
        served: prompts were served with it.
        unserved: why none were, although they were to be: the model is refused in float32.
        steps: decode steps that the graph of fixed sizes ran.
        error: largest difference of a log-probability; None where tokens differ or nothing was served.
        rounds: caches are rounded.
        alike: of the steps, those that rounded every number as the same step by calls did.
        alike_error: as ``error``, in these.
    """

    name: str
    refused: str = ""
    is_lowered: bool = False
    failed: str = ""
    dynamic: dict[str, int] = dataclasses.field(default_factory=dict)
    static: dict[str, int] = dataclasses.field(default_factory=dict)
    served: bool = False
    unserved: str = ""
    steps: int = 0
    error: float | None = None
    rounds: bool = False
    alike: int = 0
    alike_error: float = 0.0

    @property
    def faults(self) -> list[str]:
        """What must not be."""
        if self.failed:
            return [self.failed]
        if self.refused:
            return []
        counted = ("host_nodes", "host_inputs", "unknown_sizes", "cache_copies")
        found = [f"{self.static[name]} {name}" for name in counted if self.static[name]]
        if self.static["launches"] > self.dynamic["launches"]:
            found.append(f"{self.static['launches']} launches, not {self.dynamic['launches']}")
        if not self.served:
            return found
        if not self.steps:
            return [*found, "no step ran"]
        if self.rounds and not self.alike:
            found.append("no step rounds alike")
        limit = ROUNDED if self.rounds else LIMIT
        if self.error is None or self.error > limit or self.alike_error > LIMIT:
            found.append("other numbers")
        return found


def examine(name: str, soc: str, *, kv_cache_dtype: str, serves: bool) -> StaticRow:
    """Lower, convert and serve one architecture."""
    import torch

    import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators
    from torch_pagoda.compiler.capture.trace import capture
    from torch_pagoda.compiler.options import CompileOptions
    from torch_pagoda.compiler.pipeline import run_pipeline
    from torch_pagoda.compiler.report import CompileReport, first_line
    from torch_pagoda.compiler.targets.npu.ge.static_graph import why_not_static
    from torch_pagoda.npu_tools.offline.decode_graphs import counted_decode_graphs
    from torch_pagoda.passes import UnsupportedModel
    from torch_pagoda.passes.lower.npu.decode_graph import decode_graph

    from legal_models import build_legal_model
    from tiny_models import LLAMA_VARIANTS, Variant

    row, variant = StaticRow(name), LLAMA_VARIANTS.get(name, Variant(name, {}))
    # 310P has no bfloat16.
    dtype, report = torch.float16 if soc.startswith("Ascend310P") else torch.bfloat16, CompileReport(name)
    try:
        model = build_legal_model(variant.model_type, dtype=dtype, **variant.overrides)
        options = CompileOptions(codegen="none", target="npu", verify="off", soc=soc, kv_cache_dtype=kv_cache_dtype)
        traced = run_pipeline(capture(model), options, None, report)
        traced = decode_graph(traced) or traced  # over int8 caches decode steps have a graph of their own
    except UnsupportedModel as error:
        row.refused = first_line(error)
        return row
    except Exception as error:  # of transformers, which cannot build it here
        row.refused = f"{type(error).__name__}: {first_line(error)}"
        return row
    row.is_lowered, row.refused = True, why_not_static(traced)
    if row.refused:
        row.refused = "; ".join([row.refused, *_why_gathered(report)])
    else:
        dynamic, static = counted_decode_graphs(traced, soc=soc)
        row.dynamic, row.static = dataclasses.asdict(dynamic), dataclasses.asdict(static)
    if not row.refused and serves:
        row.rounds = kv_cache_dtype == "int8"
        try:
            _serve(row, variant, soc, kv_cache_dtype)
        except UnsupportedModel as error:
            row.unserved = first_line(error)
        row.served = not row.unserved
    return row


def _why_gathered(report: Any) -> list[str]:
    """Reasons why attention does not read its caches where they lie."""
    routes = [route for record in report.passes for route in record.routes]
    attention = [route for route in routes if route.operator == "pagoda.paged_attention" and "aten" in route.chosen]
    # The last route that was tried is the last way out.
    return list(dict.fromkeys(route.refused[-1][1] for route in attention if route.refused))


def _serve(row: StaticRow, variant: Any, soc: str, kv_cache_dtype: str) -> None:
    """Serve four prompts; fills in the decode steps of the graph of fixed sizes and the differences."""
    import torch
    from lowered_models import served

    from torch_pagoda.compiler.capture.trace import capture
    from torch_pagoda.compiler.options import CompileOptions
    from torch_pagoda.compiler.pipeline import run_pipeline
    from torch_pagoda.compiler.report import CompileReport
    from torch_pagoda.compiler.targets.npu.decode_steps import DecodeCalls, DecodeRoute
    from torch_pagoda.compiler.targets.npu.ge.ge_route import GeGraphs
    from torch_pagoda.compiler.targets.npu.ge.static_graph import why_not_static
    from torch_pagoda.passes.lower.npu.decode_graph import decode_graph
    from torch_pagoda.runtime.npu_target import NpuTarget
    from torch_pagoda.runtime.program import is_cache_input

    from legal_models import build_legal_model

    torch._dynamo.reset()
    half = torch.float16 if soc.startswith("Ascend310P") else torch.bfloat16
    model = build_legal_model(variant.model_type, **variant.overrides)
    options = CompileOptions(codegen="none", target="npu", verify="off", soc=soc, kv_cache_dtype=kv_cache_dtype)
    # Small blocks, so that prompts have several, where the attention of the model's heads takes them.
    for block_size in (16 if kv_cache_dtype == "auto" else 32, 128):
        captured = capture(model)
        captured.traced.npu = NpuTarget(soc, block_size=block_size, float32_as=half)
        traced = run_pipeline(captured, options, None, CompileReport(variant.model_type))
        decode = decode_graph(traced)
        if not why_not_static(decode or traced):
            break
    graphs = GeGraphs(decode or traced, most_graphs=1, static_decode=True)
    route: Any = graphs
    calls: Any = traced.module
    if decode is not None:
        route = DecodeRoute(graphs, GeGraphs(traced, most_graphs=1))
        calls = DecodeCalls(traced, decode, decode.module, traced.module)
    assert graphs.static is not None
    run = graphs.static.run
    caches = [i for i, node in enumerate(graphs.traced.placeholders) if is_cache_input(node.name)]

    def counted(sequences: int, args: Sequence[Any]) -> Any:
        copied = [arg.clone() if i in caches else arg for i, arg in enumerate(args)]
        outputs = run(sequences, args)
        if outputs is None:
            return None
        row.steps += 1
        if row.rounds:
            by_calls = graphs.traced.module(*copied)
            if all(torch.equal(args[i], copied[i]) for i in caches if args[i].dtype is torch.int8):
                row.alike += 1
                a, b = (each[0][0].log_softmax(-1) for each in (outputs, by_calls))
                row.alike_error = max(row.alike_error, float((a - b).abs().max()))
        return outputs

    graphs.static.run = counted  # type: ignore[method-assign]
    found, expected = served(traced, route), served(traced, calls)
    error = 0.0
    for output, other in zip(found, expected, strict=True):
        (a,), (b,) = output.outputs, other.outputs
        if a.token_ids != b.token_ids:
            return
        assert a.logprobs is not None and b.logprobs is not None
        for step, wanted in zip(a.logprobs, b.logprobs, strict=True):
            error = max([error, *(abs(entry.logprob - wanted[token].logprob) for token, entry in step.items())])
    row.error = error


def _child(name: str, soc: str, kv_cache_dtype: str, serves: bool, answer: str) -> None:
    warnings.filterwarnings("ignore")
    with open(Path(answer).with_suffix(".log"), "w") as log:
        sys.stdout = sys.stderr = log
        try:
            row = examine(name, soc, kv_cache_dtype=kv_cache_dtype, serves=serves)
        except Exception as error:
            row = StaticRow(name, is_lowered=True, failed=" ".join(f"{type(error).__name__}: {error}".split())[:200])
        Path(answer).write_text(json.dumps(dataclasses.asdict(row)))


def in_a_process(name: str, soc: str, *, kv_cache_dtype: str, serves: bool, timeout: float) -> StaticRow:
    """``examine`` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "row.json")
        given = (name, soc, kv_cache_dtype, serves, str(answer))
        child = multiprocessing.get_context("fork").Process(target=_child, args=given)
        child.start()
        child.join(timeout)
        if child.exitcode is None:
            child.kill()
            child.join()
            return StaticRow(name, is_lowered=True, failed=f"longer than {timeout:g} s")
        if not answer.exists():
            return StaticRow(name, is_lowered=True, failed=f"its process ended with status {child.exitcode}")
        return StaticRow(**json.loads(answer.read_text()))


def table(rows: list[StaticRow], soc: str) -> str:
    """All rows as Markdown."""
    lowered = [row for row in rows if row.is_lowered]
    static = [row for row in lowered if not row.refused and not row.failed]
    refused = [row for row in lowered if row.refused]
    failed = [row for row in lowered if row.failed]
    lines = [
        f"{soc}: {len(lowered)} architectures are lowered, {len(static)} have static decode graphs, "
        f"{len(refused)} are refused by name, {sum(bool(row.faults) for row in lowered)} have faults",
        "",
        "| architecture | operators | host nodes | unknown sizes | launches | copies | steps | log-prob error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in static:
        names = ("operators", "host_nodes", "unknown_sizes", "launches", "cache_copies")
        counts = " | ".join(f"{row.dynamic[name]} → {row.static[name]}" for name in names)
        error = "" if not row.steps else "tokens differ" if row.error is None else f"{row.error:.1e}"
        if row.rounds and row.steps:
            error += f"; {row.alike_error:.1e} in {row.alike} steps that round alike"
        lines.append(f"| {row.name} | {counts} | {row.steps} | {error} |")
    lines += ["", "Without static decode graphs:", "", *(f"- {row.name}: {row.refused}" for row in refused)]
    if unserved := [row for row in static if row.unserved]:
        lines += ["", "Counted, not served:", "", *(f"- {row.name}: {row.unserved}" for row in unserved)]
    if failed:
        lines += ["", "Failed:", "", *(f"- {row.name}: {row.failed}" for row in failed)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Examine the selected architectures; write what is known after each."""
    from coverage import selected_names

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help="comma-separated names or patterns, such as 'llama*,gpt2'")
    parser.add_argument("--soc", default="Ascend910B3", help="the chip (default Ascend910B3)")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=("auto", "int8"), help="of keys and values (default auto)"
    )
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--no-serving", action="store_true", help="count only")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per architecture (default 300)")
    args = parser.parse_args()
    import torch_npu  # noqa: F401  before anything defines operators of its namespace

    import torch_pagoda.compiler.build  # noqa: F401  once for all children

    names = selected_names(args.only)
    rows: list[StaticRow] = []
    for name in names:
        row = in_a_process(
            name,
            args.soc,
            kv_cache_dtype=args.kv_cache_dtype,
            serves=not args.no_serving,
            timeout=args.timeout,
        )
        rows.append(row)
        said = (
            row.refused
            or "; ".join(row.faults)
            or f"{row.dynamic['operators']} → {row.static['operators']} operators"
            + (f", not served: {row.unserved}" if row.unserved else "")
        )
        print(f"[{len(rows)}/{len(names)}] {name}: {said}", flush=True)
        if args.markdown:
            args.markdown.write_text(table(rows, args.soc))
    print(table(rows, args.soc))
    sys.exit(any(row.faults for row in rows))


if __name__ == "__main__":
    main()
