"""The device that is tested. There is one in this package, the NPU; tests bring others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ...device import npu_available

__all__ = ["Device", "npu"]

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Device:
    """A device to test.

    Attributes:
        torch_device: where tensors go.
        soc: name of the chip that graphs are lowered for.
        stand_in: what it is, where it is not an Ascend device; every report says so first.
        running: entered around everything that runs on it.
        synchronize: waits until it has finished.
        peak_memory: most bytes that tensors have taken since the last call of it; None where nobody counts.
        release: gives back what nothing holds any more.
        facts: names and sizes of it, in words.
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
        """What ``function`` returns, when the device has finished."""
        with self.running():
            result = function()
            self.synchronize()
        return result


def npu() -> Device:
    """The first visible NPU.

    Raises:
        ValueError: torch_npu reports none.
    """
    if not npu_available():
        raise ValueError("torch_npu reports no NPU on this machine; pagoda npu doctor says what is missing")
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
