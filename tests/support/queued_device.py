"""A device that works off a queue while the host goes on, for tests and benchmarks of the engine.

``QueuedProgram`` wraps a program: its call returns at once; a thread runs it, and everything that is computed from
its logits, in the order of the calls. A value exists when the queue has come to it. Whoever reads it without having
waited (``QueuedDevice.read_later``, ``synchronize``) gets a ``TooEarly``: on a real device that is where the host
would stand still. With ``strict=False`` such a read waits, as it does there.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_pagoda.runtime.step_metadata import StepMetadata


class TooEarly(RuntimeError):
    """A value was read that the device has not computed yet."""


class Result:
    """What a call on the queue returns, when it has returned."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise RuntimeError(f"the device has failed: {self.error}") from self.error
        return self.value


class QueuedDevice:
    """Calls functions in a thread of its own, in order; has the methods of ``runtime.device_queue``.

    Args:
        strict: reading too early is an error.

    Attributes:
        gaps: seconds that it had nothing to do before each step of a program, since the one before.
        num_failed: calls that raised.
        waited: seconds that the host stood still.
    """

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict
        self.gaps: list[float] = []
        self.idle = 0.0  # since the last step
        self.num_failed = 0
        self.first_error: BaseException | None = None  # since the last time that it was synchronized
        self.waited = 0.0
        self.is_synchronized = False  # since the last step
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Result] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_work, args=(self._calls, self), name="queued-device", daemon=True)
        thread.start()
        atexit.register(_end, self._calls, thread)

    def submit(self, call: Callable[[], Any]) -> Result:
        """Put a call at the end of the queue."""
        result = Result()
        self._calls.put((call, result))
        return result

    def send(self, tensor: Tensor) -> Tensor:
        return tensor

    def read_later(self, tensor: Tensor) -> HostRead:
        return HostRead(self, self.submit(lambda: real(tensor).clone()))

    def synchronize_quietly(self) -> None:
        """Wait for all, whatever failed."""
        self.wait(self.submit(lambda: None))

    def wait(self, result: Result) -> Any:
        """Wait until a call is done; returns what it returned."""
        started = time.perf_counter()
        result.done.wait()
        self.waited += time.perf_counter() - started
        return result.get()

    def synchronize(self) -> None:
        """Wait for all; raises if anything failed since the last time."""
        self.wait(self.submit(lambda: None))
        self.is_synchronized = True
        failed, self.num_failed = self.num_failed, 0
        error, self.first_error = self.first_error, None
        if failed:
            raise RuntimeError(f"the device has failed, {failed} calls") from error


def _work(calls: queue.SimpleQueue[tuple[Callable[[], Any], Result] | None], device: QueuedDevice) -> None:
    while True:
        started = time.perf_counter()
        given = calls.get()
        device.idle += time.perf_counter() - started
        if given is None:
            return
        call, result = given
        try:
            with torch.no_grad():
                result.value = call()
        except BaseException as error:
            result.error = error
            device.num_failed += 1
            device.first_error = device.first_error or error
        del given, call
        result.done.set()


def _end(calls: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    calls.put(None)
    thread.join(5)


class HostRead:
    """Values on their way to the host."""

    def __init__(self, device: QueuedDevice, result: Result) -> None:
        self._device, self._result = device, result

    def wait(self) -> Tensor:
        return self._device.wait(self._result)  # type: ignore[no-any-return]


class QueuedTensor(Tensor):
    """A tensor that the queue will compute; operations on it are put into the queue."""

    result: Result
    device_queue: QueuedDevice

    @staticmethod
    def __new__(cls: Any, meta: Tensor, result: Result, device_queue: QueuedDevice) -> Any:
        with torch.inference_mode(False):  # it is used within and without
            made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device="cpu"
            )
        made.result, made.device_queue = result, device_queue
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS and isinstance(args[0], QueuedTensor):
            return func(read_now(args[0]), *args[1:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device_queue = next(x.device_queue for x in _tensors(args, kwargs) if isinstance(x, QueuedTensor))
        if device_queue.is_synchronized:
            return func(*now_all(args), **now_all(kwargs))
        metas = {id(x): _meta(x) for x in _tensors(args, kwargs)}
        given = {id(meta): x for x in _tensors(args, kwargs) for meta in [metas[id(x)]]}
        shaped = tree_map_only(Tensor, lambda x: metas[id(x)], (args, kwargs))
        options = {name: torch.device("meta") if name == "device" else x for name, x in shaped[1].items()}
        try:
            outputs = func(*shaped[0], **options)
        except Exception as error:
            if not device_queue.strict:
                return func(*now_all(args), **now_all(kwargs))
            raise TooEarly(f"{func} needs values of the device: {error}") from None
        result = device_queue.submit(lambda: func(*real_all(args), **real_all(kwargs)))

        def wrapped(meta: Tensor) -> Tensor:
            return given[id(meta)] if id(meta) in given else QueuedTensor(meta, result, device_queue)

        if isinstance(outputs, Tensor):
            return wrapped(outputs)
        parts = []
        for i, output in enumerate(outputs):
            part = device_queue.submit(lambda i=i: result.get()[i])
            parts.append(QueuedTensor(output, part, device_queue) if isinstance(output, Tensor) else output)
        return parts


_READS = ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")


def read_now(tensor: QueuedTensor) -> Tensor:
    """The values, if they are there already."""
    if tensor.device_queue.strict and not tensor.device_queue.is_synchronized:
        raise TooEarly("a value is read that the device has not computed yet")
    return tensor.device_queue.wait(tensor.result)  # type: ignore[no-any-return]


def real(tensor: Tensor) -> Tensor:
    """The values, when it is the queue's turn to use them."""
    return tensor.result.get() if isinstance(tensor, QueuedTensor) else tensor


def real_all(values: Any) -> Any:
    return tree_map_only(Tensor, real, values)


def now_all(values: Any) -> Any:
    return tree_map_only(Tensor, lambda x: read_now(x) if isinstance(x, QueuedTensor) else x, values)


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


class QueuedProgram:
    """A program on a ``QueuedDevice``; attributes that it has not are those of the program.

    Args:
        program: what is run.
        seconds: that a step takes at least.
        strict: see ``QueuedDevice``.
    """

    def __init__(self, program: Any, seconds: float = 0.0, *, strict: bool = True) -> None:
        self.program = program
        self.seconds = seconds
        self.queue = QueuedDevice(strict=strict)
        self._logits: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, step: StepMetadata) -> Tensor:
        self.queue.is_synchronized = False
        shape = torch.empty(step.logits_rows.shape[0], self.program.vocab_size, device="meta")
        return QueuedTensor(shape, self.queue.submit(lambda: self._run(input_ids, position_ids, step)), self.queue)

    def _run(self, input_ids: Tensor, position_ids: Tensor, step: StepMetadata) -> Tensor:
        start = time.perf_counter()
        self.queue.gaps.append(self.queue.idle)
        self.queue.idle = 0.0
        if self._logits is not None:
            self._logits.fill_(torch.nan)  # logits hold until the next call
        self._logits = self.program(real(input_ids), position_ids, step)
        left = start + self.seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return self._logits
