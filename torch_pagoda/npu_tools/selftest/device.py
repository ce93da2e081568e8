"""The device under test: the NPU, or one that tests provide."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ...device import npu_available

__all__ = ["Device", "npu", "simulated"]

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Device:
    """A device to test.

    Attributes:
        torch_device: the torch device.
        soc: name of the chip to lower graphs for.
        stand_in: its description, if it is not an Ascend device; every report states it first.
        running: context manager around everything that runs on it.
        synchronize: waits until it has finished.
        peak_memory: maximum bytes of tensors since the last call; None if unknown.
        release: frees unused memory.
        facts: names and sizes, as text.
    """

    torch_device: torch.device
    soc: str
    stand_in: str = ""
    running: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    synchronize: Callable[[], None] = lambda: None
    peak_memory: Callable[[], int | None] = lambda: None
    release: Callable[[], None] = lambda: None
    facts: dict[str, str] = field(default_factory=dict)

    def run(self, function: Callable[[], _Result]) -> _Result:
        """The result of ``function``, after the device has finished."""
        with self.running():
            result = function()
            self.synchronize()
        return result


def npu() -> Device:
    """The first visible NPU.

    Raises:
        ValueError: torch_npu reports no NPU.
    """
    if not npu_available():
        raise ValueError("torch_npu reports no NPU on this machine; run pagoda npu doctor")
    module: Any = torch.npu  # type: ignore[attr-defined]
    name = str(module.get_device_name())
    free, total = module.mem_get_info()

    def peak() -> int:
        most = int(module.max_memory_allocated())
        module.reset_peak_memory_stats()
        return most

    return Device(
        torch_device=torch.device("npu", module.current_device()),
        soc=name,
        synchronize=module.synchronize,
        peak_memory=peak,
        release=module.empty_cache,
        facts={"device": name, "memory": f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"},
    )


def simulated(soc: str = "Ascend910B3") -> Device:
    """A CPU, whose reference kernels stand for a device's.

    Args:
        soc: name of the chip to lower graphs for.
    """
    words = "processes on a CPU ran all of it, with reference kernels in place of an NPU's and gloo in that of HCCL"
    return Device(torch.device("cpu"), soc, stand_in=words, facts={"device": "none"})
