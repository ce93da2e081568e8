"""A device that computes as late as it may, with what tests use of ``torch.cuda``.

Its main stream computes nothing before the host waits for an event, for a value or for the device. Any other stream
computes at once. So a value that is read without waiting, memory that is written while queued work has yet to read
it, and work that no event orders give wrong numbers, every time. Memory that was not written holds NaN, or 7.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("lazy", 0)
"""Of a type that every build of torch takes tensors of, and that nothing else here uses."""
MEMORY_BYTES = 2**30
aten = torch.ops.aten


class LateTensor(Tensor):
    """A tensor of the device: its numbers are in ``memory``, on the host, once its queue has come to them."""

    memory: Tensor
    late: LateDevice

    @staticmethod
    def __new__(cls, memory: Tensor, late: LateDevice) -> LateTensor:
        layout = {"strides": memory.stride(), "storage_offset": memory.storage_offset(), "dtype": memory.dtype}
        with torch.inference_mode(False):  # where views share the version of what they are views of
            made: LateTensor = Tensor._make_wrapper_subclass(cls, memory.shape, device=DEVICE, **layout)  # type: ignore
        made.memory, made.late = memory, late
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        late = next(x.late for x in tree_leaves((args, kwargs)) if isinstance(x, LateTensor))
        return late.call(func, args, kwargs or {})


class LateDevice(TorchDispatchMode):
    """The device: what is called on its tensors, or makes some, goes to the end of its queue."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Callable[[], object]] = deque()
        self.num_given = self.num_done = 0
        self.captured: list[Callable[[], object]] | None = None
        self.is_on_side_stream = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def give(self, work: Callable[[], object]) -> None:
        if self.captured is not None:
            self.captured.append(work)
        elif self.is_on_side_stream:
            work()
        else:
            self.queue.append(work)
            self.num_given += 1

    def work_off(self, up_to: int | None = None) -> None:
        """Do what was given, or the first ``up_to`` of it since the device was made."""
        if self.captured is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        with torch.inference_mode():
            while self.num_done < (self.num_given if up_to is None else up_to):
                self.num_done += 1
                self.queue.popleft()()

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in (aten.pin_memory.default, aten._pin_memory.default):
            return args[0].clone()
        if kwargs.get("pin_memory"):
            return _unwritten(func(*args, **{**kwargs, "pin_memory": False}))
        leaves, device = tree_leaves((args, kwargs)), kwargs.get("device")
        if not any(isinstance(x, LateTensor) for x in leaves) and (device is None or device.type != DEVICE.type):
            return func(*args, **kwargs)
        with self:
            if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result
        may_wait = not (kwargs.get("non_blocking") or (func is aten.copy_.default and args[2:] == (True,)))
        changes = func._schema.is_mutable

        def in_memory(x: Tensor) -> Tensor:
            if isinstance(x, LateTensor):
                return x.memory
            return x.clone() if may_wait and not (changes and x is args[0]) else x

        given, named = tree_map_only(Tensor, in_memory, (args, {**kwargs, **({"device": _HOST} if device else {})}))
        if changes:
            self.give(lambda: func(*given, **named))
            if may_wait and not isinstance(args[0], LateTensor):
                self.work_off()
            return args[0]
        if any(result.alias_info is not None for result in func._schema.returns):
            return self._wrapped(func(*given, **named))
        shapes = None if device == _HOST else _shapes(func, args, kwargs)
        if shapes is None:
            self.work_off()
            values = func(*given, **named)
            return values if device == _HOST else self._wrapped(values)
        results = tree_map_only(Tensor, lambda x: LateTensor(_allocated(x), self), shapes)
        if "empty" not in func._schema.name:
            places = [x.memory for x in tree_leaves(results)]

            def compute() -> None:
                for place, value in zip(places, tree_leaves(func(*given, **named)), strict=True):
                    place.copy_(value)

            self.give(compute)
        return results

    def _wrapped(self, values: Any) -> Any:
        return tree_map_only(Tensor, lambda x: LateTensor(x, self), values)

    @contextmanager
    def graph(self, graph: Any, pool: Any = None) -> Iterator[None]:
        self.work_off()
        self.captured = graph.work
        try:
            yield
        finally:
            self.captured = None

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.is_on_side_stream = True
        try:
            yield
        finally:
            self.is_on_side_stream = False


_HOST = torch.device("cpu")


def _shapes(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The results as tensors without numbers; None where numbers decide what they are."""
    named = {**kwargs, **({"device": torch.device("meta")} if "device" in kwargs else {})}
    args, named = tree_map_only(
        Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), (args, named)
    )
    try:
        shapes = func(*args, **named)
    except (RuntimeError, NotImplementedError):
        return None
    return shapes if all(isinstance(x, Tensor) for x in tree_leaves(shapes)) else None


def _allocated(shape: Tensor) -> Tensor:
    if shape.numel() * shape.element_size() > MEMORY_BYTES:
        raise torch.OutOfMemoryError(f"out of memory. Tried to allocate {shape.numel()} elements")
    return _unwritten(torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype))


def _unwritten(memory: Tensor) -> Tensor:
    return memory.fill_(math.nan if memory.is_floating_point() else 7)


@contextmanager
def late_device() -> Iterator[torch.device]:
    """The device, for the duration of a block; ``torch.get_device_module`` returns its functions."""
    late = LateDevice()

    class Event:
        def record(self) -> None:
            self.at = late.num_given

        def query(self) -> bool:
            return late.num_done >= self.at

        def synchronize(self) -> None:
            late.work_off(self.at)

    class Graph:
        def __init__(self) -> None:
            self.work: list[Callable[[], object]] = []

        def replay(self) -> None:
            for work in self.work:
                late.give(work)

    module = SimpleNamespace(
        Event=Event,
        Stream=object,
        CUDAGraph=Graph,
        stream=late.stream,
        graph=late.graph,
        graph_pool_handle=lambda: None,
        synchronize=lambda device=None: late.work_off(),
        _sleep=lambda cycles: None,
    )
    with (
        mock.patch.object(torch, "get_device_module", lambda device: module),
        mock.patch.object(torch, "is_autocast_enabled", lambda device_type: False),  # it does not know the type
        late,
    ):
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor calls the mode for the copy to the device
        try:
            yield DEVICE
        finally:
            torch._C._set_only_lift_cpu_tensors(False)
