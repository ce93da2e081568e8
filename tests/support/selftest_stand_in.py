"""A stand-in for an NPU that ``pagoda npu selftest`` can be tried on, and mistakes that it should find.

It computes with the CPU's kernels; a mistake changes what an ``npu::`` operator yields while the "device" runs. Steps
of planned sizes run the lowered graph as it is, in the place of what the toolchains compile and capture; in a Python
with the offline toolchain (``pagoda npu python``) the real torchair converts GE graphs.

Make a report without a device:
    python tests/support/selftest_stand_in.py examples/tiny-pydoc --out /tmp/selftest --mistake npu_swiglu=scale
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

WORDS = "a stand-in, which computes with the CPU's kernels, ran all of it"
FACTORY = "selftest_stand_in:stand_in"
NO_MEMORY = "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 61.00 GiB total capacity)"


def _off(tensor: torch.Tensor) -> torch.Tensor:
    """The first entry is off by twice what is tolerated."""
    made = tensor.clone()
    row = made.flatten(0, -2)[0] if made.dim() > 1 else made
    spread = float(row.float().square().mean().sqrt())
    limit = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(made.dtype, 2**-13)
    row[0] = (row[0].float() + 2.2 * limit * (row[0].float().abs() + spread)).to(made.dtype)
    return made


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    """The first two rows are in the place of each other."""
    flat = tensor.flatten(0, -2)
    if flat.shape[0] < 2:
        return tensor
    return flat[[1, 0, *range(2, flat.shape[0])]].view(tensor.shape)


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.clone()
    made.view(-1)[-1] = torch.nan
    return made


def _raise(tensor: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("The Inner error is reported as above.\n\terror code is 561002")


def _no_memory(tensor: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(NO_MEMORY)


def _vector_core(tensor: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("NPU function error: synchronize, error code is 507035")


def _hang(tensor: torch.Tensor) -> torch.Tensor:
    time.sleep(3600)
    return tensor


def _die(tensor: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)
    return tensor


MISTAKES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "off": _off,
    "scale": lambda tensor: tensor * 1.05,
    "swapped": _swapped,
    "nan": _nan,
    "raise": _raise,
    "no-memory": _no_memory,
    "vector-core": _vector_core,
    "hang": _hang,
    "die": _die,
}


class _Running:
    """Whether the "device" runs, which is when mistakes are made."""

    def __init__(self) -> None:
        self.now = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        before, self.now = self.now, True
        try:
            yield
        finally:
            self.now = before


def stand_in(mistakes: Mapping[str, str] | None = None, wrong_size: int = 0, soc: str = "Ascend910B3") -> Any:
    """A ``Device`` that is none.

    Args:
        mistakes: operator without namespace → one of ``MISTAKES``.
        wrong_size: steps of so many tokens have wrong logits, where they run as a whole graph.
        soc: name of a chip.
    """
    from torch_pagoda.npu_tools.selftest.device import Device

    running = _Running()
    for operator, kind in (mistakes or {}).items():
        _bend(operator, MISTAKES[kind], running)
    _stand_for_graphs(wrong_size)
    facts = {"device": "none"}
    return Device(torch.device("cpu"), soc, stand_in=WORDS, running=running.entered, facts=facts)


_libraries: list[torch.library.Library] = []


def _bend(operator: str, mistake: Callable[[torch.Tensor], torch.Tensor], running: _Running) -> None:
    """Let an operator's CPU kernel make a mistake while the device runs."""
    from torch_pagoda.runtime.ops.npu import OPERATORS
    from torch_pagoda.runtime.ops.npu.registration import by_schema

    overload = getattr(torch.ops.npu, operator).default
    ours = next(each for each in OPERATORS if each.name == operator)
    kernel = by_schema(ours, ours.kernel, overload._schema)

    def bent(*args: Any, **kwargs: Any) -> Any:
        results = kernel(*args, **kwargs)
        if not running.now:
            return results
        leaves, spec = pytree.tree_flatten(results)
        if results is None:  # it writes into its arguments
            written = next(i for i, argument in enumerate(overload._schema.arguments) if argument.is_write)
            args[written].copy_(mistake(args[written]))
            return results
        return pytree.tree_unflatten([mistake(leaves[0]), *leaves[1:]], spec)

    library = torch.library.Library("npu", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one already
        library.impl(operator, bent, "CPU", allow_override=True)
    _libraries.append(library)


def _stand_for_graphs(wrong_size: int) -> None:
    """Let planned sizes run the lowered graph."""
    from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import AclGraphs
    from torch_pagoda.compiler.targets.npu.ge.ge_route import GeGraphs
    from torch_pagoda.compiler.targets.npu.without_device import is_offline
    from torch_pagoda.npu_tools.selftest import graph_calls

    def graph(route: Any) -> Callable[..., Sequence[Any]]:
        at = [node.name for node in route.traced.placeholders].index(route.traced.input_ids)

        def run(*args: Any) -> Sequence[Any]:
            outputs = route.eager(*args)
            if args[at].shape[1] == wrong_size:
                outputs = (outputs[0].flip(-1), *outputs[1:])
            return outputs

        return run

    AclGraphs._compile = lambda route, scheduled: graph(route)  # type: ignore[assignment,method-assign]
    if not is_offline():
        GeGraphs._compile = lambda route, length: graph(route)  # type: ignore[assignment,method-assign]
        GeGraphs._compile_static = lambda route, inputs: graph(route)  # type: ignore[assignment,method-assign]
        graph_calls.compile_module = lambda module, *_: module  # type: ignore[assignment]


def main() -> None:
    """Make a report."""
    from torch_pagoda.cli.selftest import run_and_write
    from torch_pagoda.npu_tools.selftest.selftest import stages_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mistake", action="append", default=[], metavar="OPERATOR=KIND", help=", ".join(MISTAKES))
    parser.add_argument("--wrong-size", type=int, default=0)
    parser.add_argument("--stage", action="append")
    parser.add_argument("--comparison", action="append", default=[])
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--max-num-batched-tokens", type=int, default=64)
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    asked = {
        "model": given.model,
        "max_num_seqs": given.max_num_seqs,
        "max_num_batched_tokens": given.max_num_batched_tokens,
        "comparisons": given.comparison,
        "device": FACTORY,
        "device_arguments": {
            "mistakes": dict(each.split("=") for each in given.mistake),
            "wrong_size": given.wrong_size,
        },
    }
    report = run_and_write(asked, given.out, stages_of(given.stage or [], 1), given.timeout, given.again)
    sys.exit(0 if report.is_right else 1)


if __name__ == "__main__":
    main()
