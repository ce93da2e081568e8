"""``PAGODA_DUMP=folder``: every stage of a graph as readable Python, and a script for each self-check that fails.

Each compilation gets a folder of its own in it. The files are numbered in the order in which they were written;
a pass that changed nothing writes none. The environment variable is read here and nowhere else.
"""

from __future__ import annotations

import keyword
import logging
import os
import re
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import _format_import_block
from torch.package import sys_importer

from ...passes import TracedGraph
from ...passes.graph.provenance import scopes, source_line
from ...runtime.program import is_cache_input
from ..link.linker import link
from ..tolerance import TOLERANCE
from .self_check import Reference, compared_steps

log = logging.getLogger(__name__)

VARIABLE = "PAGODA_DUMP"

_ASSIGNMENT = re.compile(r"    (?P<name>\w+)(?:: \"[^\"]*\")? = ")
# Dynamo's names of lifted parameters and buffers, and the lines in which they only get a lower-case letter.
_LIFTED = re.compile(r"[lL]_(model|self|fn)_(?=modules_|parameters_|buffers_)")
_SAME = re.compile(r"\s*(\w+) = \1")
_SHADOWED = frozenset(keyword.kwlist) | {"self", "torch", "device", "inf", "nan", "forward"}
# fx lets go of values after their last use, which only hides what a line says.
_RELEASES = re.compile(r";  (\w+ = )+None$")
_folder: ContextVar[Path | None] = ContextVar("folder", default=None)


def is_on() -> bool:
    """True if the variable is set."""
    return bool(os.environ.get(VARIABLE))


def begin(model: str) -> None:
    """Write what follows into a new folder named after ``model``; does nothing unless the variable is set."""
    root = os.environ.get(VARIABLE)
    if not root:
        _folder.set(None)
        return
    number = 0
    while True:
        folder = Path(root) / (model if not number else f"{model}_{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        break
    _folder.set(folder)
    log.info("%s: graphs go to %s", VARIABLE, folder)


def write_graph(traced: TracedGraph, stage: str) -> None:
    """Write the graph as ``NN_stage.py``; does nothing unless the variable was set when the compilation began."""
    folder = _folder.get()
    if folder is not None:
        number = len(list(folder.glob("[0-9][0-9]*_*.py")))
        (folder / f"{number:02d}_{stage}.py").write_text(readable(traced.module), encoding="utf-8")


def readable(module: fx.GraphModule) -> str:
    """A graph as Python that can be imported: values with dtype and shape, module and source line where they change.

    The one function in it is ``forward(self, *placeholders)``; ``self`` holds what ``get_attr`` nodes read.
    """
    code = module.graph.python_code("self", verbose=True)
    source = _with_short_names(code.src)
    nodes = {node.name: node for node in module.graph.nodes}
    lines, last = [], ("", "")
    for line in source.splitlines():
        if line.lstrip().startswith("# File:") or not line.strip():
            continue  # said by the comment below, with the module
        if _SAME.fullmatch(line):
            continue
        match = _ASSIGNMENT.match(line)
        node = nodes.get(match["name"]) if match else None
        if node is not None and node.op.startswith("call"):
            stack = scopes(node)
            where = (f"{stack[-1].path} ({stack[-1].kind})" if stack else "", source_line(node))
            if where[0] != last[0] and where[0]:
                lines += ["", f"    # == {where[0]}"]
            if where[1] != last[1] and where[1]:
                lines.append(f"    # {where[1]}")
            last = where
        lines.append(_RELEASES.sub("", line))
    lines = [_one_argument_per_line(line) if line.startswith("def forward(") else line for line in lines]
    return f"{_format_import_block(code.globals, sys_importer)}\n\n\n" + "\n".join(lines).strip() + "\n"


def _with_short_names(source: str) -> str:
    """``l_model_modules_lm_head_parameters_weight_`` → ``lm_head_weight``, where that is no other name."""
    taken = set(re.findall(r"\w+", source))
    short: dict[str, str] = {}
    owners: dict[str, str] = {}
    for name in sorted(n for n in taken if _LIFTED.match(n)):
        shorter = re.sub(r"(modules|parameters|buffers)_", "", _LIFTED.sub("", name)).strip("_")
        free = shorter.isidentifier() and shorter not in taken and shorter not in _SHADOWED
        if free and owners.setdefault(shorter, name.lower()) == name.lower():
            short[name] = shorter
    return re.sub(r"\w+", lambda m: short.get(m[0], m[0]), source)


def _one_argument_per_line(line: str) -> str:
    head, _, rest = line.partition("(")
    arguments = re.findall(r"\w+(?:\s*:\s*\"[^\"]*\")?", rest.rpartition(")")[0])
    return f"{head}(\n" + "".join(f"    {argument},\n" for argument in arguments) + "):"


def write_reproducer(
    name: str, before: TracedGraph, after: TracedGraph, reference: Reference, *, alone: bool, reason: str
) -> None:
    """Write a folder with which a failed self-check can be run again: both graphs, all data and ``run.py``.

    It holds the weights. Does nothing unless the variable was set when the compilation began.

    Args:
        name: the pass, or whatever else is to blame.
        before: the graph that was still right.
        after: the graph that is not.
        reference: what the model says.
        alone: as for ``self_check.check``.
        reason: of the failed check.
    """
    folder = _folder.get()
    if folder is None:
        return
    target = folder / f"failing_{name}"
    target.mkdir(exist_ok=True)
    try:
        graphs = {"before": _recorded(before, reference, alone), "after": _recorded(after, reference, alone)}
        data = {
            "constants": {**before.constants, **after.constants},
            "graphs": graphs,
            "tolerance": TOLERANCE.get(reference.dtype, 0.3),
            "share": 0.9 if reference.dtype in (torch.bfloat16, torch.float16) else 1.0,
        }
        torch.save(data, target / "data.pt")
    except Exception as error:  # the graph may be what fails; the files that are there still help
        log.warning("%s: no reproducer for %s: %s", VARIABLE, name, error)
    for stage, traced in (("before", before), ("after", after)):
        (target / f"{stage}.py").write_text(readable(traced.module), encoding="utf-8")
    text = _SCRIPT.replace("NAME", name).replace("REASON", " ".join(reason.split()))
    (target / "run.py").write_text(text, encoding="utf-8")
    log.warning("%s: run %s to see what %s breaks", VARIABLE, target / "run.py", name)


def _recorded(traced: TracedGraph, reference: Reference, alone: bool) -> dict[str, Any]:
    """Inputs of the graph in the self-check, step by step, and the rows that would be right."""
    calls: list[dict[str, Any]] = []
    caches: dict[str, torch.Tensor] = {}
    names = [node.name for node in traced.placeholders]
    traced.recompile()

    def record(*args: Any) -> Sequence[Any]:
        given = {n: a for n, a in zip(names, args, strict=True) if n not in traced.constants}
        for n in [n for n in given if is_cache_input(n)]:
            cache = given.pop(n)
            caches.setdefault(n, cache.clone())
        calls.append({n: a.clone() if isinstance(a, torch.Tensor) else a for n, a in given.items()})
        results: Sequence[Any] = traced.module(*args)
        return results

    program = link(traced, record)
    expected = [rows for _, _, rows in compared_steps(program, reference, alone=alone)]
    steps = [{"inputs": call, "expected": rows} for call, rows in zip(calls, expected, strict=True)]
    attributes = {n.target: getattr(traced.module, str(n.target)) for n in traced.graph.nodes if n.op == "get_attr"}
    return {"placeholders": names, "caches": caches, "steps": steps, "attributes": attributes}


_SCRIPT = '''"""The self-check fails after NAME: REASON.

before.py is the graph in front of it and after.py the one behind it. Both are plain Python: edit, and run again.

    python run.py
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

import torch_pagoda.runtime.ops  # registers the pagoda operators

import after
import before

data = torch.load(Path(__file__).parent / "data.pt", weights_only=True)


def largest_error(graph, recorded):
    """max|difference| / std of the logits over all steps; of the worst rows, or in half precision of nine in ten."""
    attributes = SimpleNamespace(**recorded["attributes"])
    caches = {name: cache.clone() for name, cache in recorded["caches"].items()}
    worst = 0.0
    for number, step in enumerate(recorded["steps"]):
        given = {**data["constants"], **caches, **step["inputs"]}
        with torch.no_grad():
            logits = graph.forward(attributes, *[given[name] for name in recorded["placeholders"]])[0][0].float()
        expected = step["expected"]
        rows = (logits - expected).abs().amax(-1) / expected.std(-1).clamp_min(1e-6)
        ordered = rows.nan_to_num(nan=float("inf")).sort().values
        error = float(ordered[int(data["share"] * (len(ordered) - 1))])
        print(f"  step {number}: {len(expected)} rows, error {error:.3g}")
        worst = max(worst, error)
    return worst


worst = {}
for name, graph in (("before", before), ("after", after)):
    print(name)
    worst[name] = largest_error(graph, data["graphs"][name])
print(f"before NAME: {worst['before']:.3g}, after it: {worst['after']:.3g}, limit {data['tolerance']}")
sys.exit(worst["after"] > data["tolerance"])
'''
