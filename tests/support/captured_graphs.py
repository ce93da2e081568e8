"""ACL graphs without a device: what npugraph_ex captures is recorded call by call on the CPU, and replayed.

A replay runs each recorded call again on the very tensors of the capture, so that an input at another address, or a
size or a length that was baked in, shows as a wrong result. Attention calls must get their lengths at every replay:
on a device they wait for an event that the update of their task records.

Calls on a second stream are replayed in two orders in turn: as late as events let them be, and as early. A call that
events do not keep behind what it needs shows as a wrong result in one of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_WORKSPACES = {
    "npu_fused_infer_attention_score": "_npu_fused_infer_attention_score_get_max_workspace",
    "npu_fused_infer_attention_score_v2": "_npu_fused_infer_attention_score_v2_get_max_workspace",
}


@dataclass
class _Call:
    function: Any
    args: Any
    kwargs: Any
    out: Any
    updated: bool | None = None  # None: of no task group
    stream: Any = None

    def run(self) -> None:
        assert self.updated is not False, f"{self.function} did not get the lengths of this replay"
        if self.updated is not None:
            self.updated = False
        results = self.function(*self.args, **self.kwargs)
        if self.function.namespace == "_c10d_functional":  # before it is copied to where the capture has it
            results = torch.ops._c10d_functional.wait_tensor(results)
        for old, new in zip(pytree.tree_leaves(self.out), pytree.tree_leaves(results), strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


@dataclass(eq=False)
class _Mark:
    """An event that a captured stream records or waits for."""

    stream: Any
    recorded: _Mark | None = None  # what is waited for; None: this one is recorded


class Graph:
    """Stands for ``torch.npu.NPUGraph``."""

    captured: ClassVar[list[Graph]] = []
    _waiting: ClassVar[Graph | None] = None

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.steps: list[_Call | _Mark] = []
        self.replays = 0
        self.group_from = 0

    def replay(self) -> None:
        Graph._waiting = self
        if not any(call.updated is not None for call in self.calls):
            Graph.run_waiting()

    @staticmethod
    def run_waiting() -> None:
        graph, Graph._waiting = Graph._waiting, None
        if graph is not None:
            graph.replays += 1
            for step in graph.in_order(main_first=graph.replays % 2 == 1):
                if isinstance(step, _Call):
                    step.run()

    @property
    def side_calls(self) -> list[_Call]:
        """Those that are not on the main stream."""
        return [call for call in self.calls if call.stream is not _MAIN_STREAM]

    def in_order(self, main_first: bool) -> list[_Call | _Mark]:
        """What was captured in an order that streams and events allow: the main stream as early as it can, or the
        others."""
        queues: dict[Any, list[_Call | _Mark]] = {_MAIN_STREAM: []}
        for step in self.steps:
            queues.setdefault(step.stream, []).append(step)
        streams = sorted(queues, key=lambda stream: (stream is not _MAIN_STREAM) == main_first)
        done: list[_Call | _Mark] = []
        recorded: set[int] = set()
        while any(queues.values()):
            step = next(
                step
                for step in (queues[stream][0] for stream in streams if queues[stream])
                if not isinstance(step, _Mark) or step.recorded is None or id(step.recorded) in recorded
            )
            queues[step.stream].pop(0)
            recorded.add(id(step))
            done.append(step)
        return done

    def reset(self) -> None:
        self.calls.clear()
        self.steps.clear()


class _Capture(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        exchanges = func.namespace == "_c10d_functional"
        out = _unexchanged(func, args) if exchanges else func(*args, **(kwargs or {}))
        if func.namespace != "npugraph_ex":  # events, which note themselves
            call = _Call(func, args, kwargs or {}, out, stream=_streams[-1])
            self.graph.calls.append(call)
            self.graph.steps.append(call)
        return out


def _unexchanged(func: Any, args: Any) -> torch.Tensor:
    """What an exchange yields while it is captured: other ranks have no part in that."""
    x: torch.Tensor = args[0]
    if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
        return x.new_empty((args[1] * x.shape[0], *x.shape[1:]))
    return x if func._schema.name.endswith(("wait_tensor", "_")) else x.clone()


class _Update(TorchDispatchMode):
    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is self.call.function
        self.call.args, self.call.kwargs, self.call.updated = args, kwargs, True
        return self.call.out


@dataclass
class _Device:
    """Stands for the functions of ``torch.npu`` that npugraph_ex calls."""

    updating: list[_Update] = field(default_factory=list)

    @contextmanager
    def graph(self, graph: Graph, **_: Any) -> Iterator[None]:
        _capturing.append(graph)
        try:
            with _Capture(graph):
                yield
        finally:
            _capturing.pop()
        if graph.calls:
            Graph.captured.append(graph)

    def group_begin(self, stream: Any) -> None:
        _capturing[-1].group_from = len(_capturing[-1].calls)

    def group_end(self, stream: Any) -> _Call:
        graph = _capturing[-1]
        (call,) = graph.calls[graph.group_from :]
        call.updated = False
        return call

    def update_begin(self, stream: Any, handle: _Call) -> None:
        self.updating.append(_Update(handle))
        self.updating[-1].__enter__()

    def update_end(self, stream: Any) -> None:
        self.updating.pop().__exit__(None, None, None)


class _Stream:
    stream_id = 0

    def __init__(self, **_: Any) -> None:
        _Stream.stream_id += 1
        self.stream_id = _Stream.stream_id

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any) -> None: ...


class _ExternalEvent:
    def record(self, stream: Any) -> None:
        Graph.run_waiting()

    def wait(self, stream: Any) -> None: ...

    def reset(self, stream: Any) -> None: ...


class _Event:
    def __init__(self) -> None:
        self.last: _Mark | None = None

    def record(self, stream: Any) -> None:
        if not _capturing:
            Graph.run_waiting()
            return
        self.last = _Mark(stream)
        _capturing[-1].steps.append(self.last)

    def wait(self, stream: Any) -> None:
        if _capturing:
            assert self.last is not None and self.last in _capturing[-1].steps, "an event of this capture"
            _capturing[-1].steps.append(_Mark(stream, self.last))


_MAIN_STREAM = _Stream()
_streams = [_MAIN_STREAM]
_capturing: list[Graph] = []


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    _streams.append(stream)
    yield
    _streams.pop()


def _tensor_at(metadata: Any) -> torch.Tensor:
    """A tensor over memory that is known by its address; something else keeps it."""
    if not metadata.nbytes:
        return torch.empty(metadata.size, dtype=metadata.dtype)
    memory = (ctypes.c_char * metadata.nbytes).from_address(metadata.data_ptr)
    flat = torch.frombuffer(memory, dtype=metadata.dtype)
    return flat.as_strided(metadata.size, metadata.stride, metadata.storage_offset)


@contextmanager
def captured_graphs() -> Iterator[list[Graph]]:
    """Let npugraph_ex capture and replay on the CPU for the duration of a block; the graphs that it captured."""
    # torchair's converters cannot be imported once npugraph_ex has defined the collectives that both define.
    import torchair._ge_concrete_graph.fx2ge_converter  # noqa: F401  # isort: skip
    import npugraph_ex  # noqa: F401
    import torch_npu
    from npugraph_ex._acl_concrete_graph import acl_graph, utils

    device = _Device()
    functions = {
        "current_device": lambda: 0,
        "NPUGraph": Graph,
        "graph": device.graph,
        "Stream": _Stream,
        "Event": _Event,
        "ExternalEvent": _ExternalEvent,
        "current_stream": lambda *_: _streams[-1],
        "stream": _on,
        "get_stream_limit": lambda _: {"cube_core_num": 20, "vector_core_num": 40},
        "set_stream_limit": lambda *_: None,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: (0, 1),
        "graph_task_group_begin": device.group_begin,
        "graph_task_group_end": device.group_end,
        "graph_task_update_begin": device.update_begin,
        "graph_task_update_end": device.update_end,
    }
    kernels = torch.library.Library("npu", "IMPL")
    for name, workspace in _WORKSPACES.items():
        packet = getattr(torch.ops.npu, name)

        def into(*args: Any, workspace: Any, out: Any, packet: Any = packet, **kwargs: Any) -> Any:
            for place, result in zip(out, packet.default(*args, **kwargs), strict=True):
                place.copy_(result)
            return tuple(out)

        kernels.impl(f"{name}.out", into, "CPU")
        kernels.impl(workspace, lambda *args, **kwargs: torch.empty(0), "CPU")
    Graph.captured = []
    with ExitStack() as stack:
        # The vendor's .out operators return what they were given, which torch takes for an error where CI is set.
        stack.enter_context(torch._functorch.config.patch(error_on_custom_op_aliasing=False))
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(torch_npu.npu, name, function, create=True))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: None))
        for name in ("_npu_getCheckpointState", "_npu_setCheckpointPoolState"):
            stack.enter_context(mock.patch.object(torch_npu._C, name, lambda *args: None, create=True))
        for module in (acl_graph, utils):
            stack.enter_context(mock.patch.object(module, "reconstruct_from_tensor_metadata", _tensor_at))
        yield Graph.captured
    kernels._destroy()


@contextmanager
def final_graphs() -> Iterator[list[torch.fx.Graph]]:
    """The graphs that npugraph_ex makes code of for the duration of a block, as they are then."""
    from npugraph_ex._acl_concrete_graph.fx2acl_converter import AclConcreteGraph

    found: list[torch.fx.Graph] = []
    write = AclConcreteGraph._codegen_fx_forward

    def noted(concrete: Any, gm: torch.fx.GraphModule, *args: Any) -> Any:
        found.append(gm.graph)
        return write(concrete, gm, *args)

    with mock.patch.object(AclConcreteGraph, "_codegen_fx_forward", noted):
        yield found
