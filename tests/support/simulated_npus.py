"""Ranks in processes that simulate NPUs on the CPU; run as a script, this is one of them.

Reference kernels stand for the vendor's, gloo for HCCL, and what npugraph_ex captures is recorded and replayed on the
CPU (see ``captured_graphs``). Float32 counts as bfloat16, which the operators are legal in, so that tokens are exact.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from torch_pagoda import shipping
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.targets.npu.aclgraph.aclgraph_route import AclGraphs
from torch_pagoda.compiler.targets.npu.without_device import is_offline
from torch_pagoda.rank import loader, main
from torch_pagoda.runtime.npu_target import NpuTarget

COMMAND = (sys.executable, str(Path(__file__)))
FAILS = "SIMULATED_NPUS_FAIL"
"""Environment variable: ``rank:tokens``, where the rank's captures of steps of so many tokens fail."""


@contextmanager
def simulated_npus(fails: str = "") -> Iterator[None]:
    """Let this process, and the ranks that it starts, run for NPUs what they compile; see ``FAILS``."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(shipping, "COMMAND", COMMAND))
        stack.enter_context(mock.patch.object(os, "sched_getaffinity", lambda _: set(range(8))))
        stack.enter_context(mock.patch.dict(os.environ, {FAILS: fails}))
        stack.enter_context(_as_devices(0))
        yield


@contextmanager
def _as_devices(rank: int) -> Iterator[None]:
    npu_target, for_device = CompileOptions.npu_target, CompileOptions.for_device

    def counted(self: CompileOptions, device: str = "cpu") -> NpuTarget:
        return replace(npu_target(self, device), float32_as=torch.bfloat16)

    def as_it_is(self: CompileOptions, device: str) -> CompileOptions:
        return self if self.target == "npu" and self.codegen == "aclgraph" else for_device(self, device)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(CompileOptions, "npu_target", counted))
        stack.enter_context(mock.patch.object(CompileOptions, "for_device", as_it_is))
        if is_offline():
            from captured_graphs import captured_graphs

            stack.enter_context(captured_graphs())
            failing, _, tokens = os.environ.get(FAILS, "").partition(":")
            if failing == str(rank):
                from npugraph_ex._acl_concrete_graph.acl_graph import AclGraph

                stack.enter_context(
                    mock.patch.object(AclGraph, "capture", _failing_at(int(tokens), AclGraph.capture))
                )
                stack.enter_context(mock.patch.object(AclGraphs, "_run_captured", _noting_tokens))
        yield


def _failing_at(tokens: int, capture: Any) -> Any:
    def fails(*args: Any, **kwargs: Any) -> Any:
        if _running == [tokens]:
            raise RuntimeError("The resources are insufficient, error code is 207005")
        return capture(*args, **kwargs)

    return fails


_running: list[int] = []
_run = AclGraphs._run_captured


def _noting_tokens(self: AclGraphs, args: Any) -> Any:
    _running[:] = (
        [args[self._ids_at].shape[1]] if self.spare_room is not None and self.spare_room.longest > 80 else []
    )
    return _run(self, args)


if __name__ == "__main__":
    if is_offline():
        import torch_npu  # noqa: F401
    with _as_devices(int(sys.argv[-4])):
        sys.exit(main(sys.argv[1:], loader))
