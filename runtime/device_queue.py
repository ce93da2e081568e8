"""Transfers between host and device that wait for nothing that was enqueued on the device meanwhile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device, which is not waited for: copies from pinned memory are queued behind its work."""
    if tensor.device.type == "cpu" and device.type != "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def with_sampled(ids: Tensor, where: Tensor, sources: Tensor, sampled: Tensor) -> Tensor:
    """Ids ``[1, T]`` on the device of ``sampled``, whose entries ``sources`` go to the places ``where``."""
    device = sampled.device
    tokens = sampled.index_select(0, sent(sources, device))
    return sent(ids, device).index_copy(1, sent(where, device), tokens[None])


class HostCopy:
    """A tensor's values, on their way to the host; what is enqueued afterwards does not delay them.

    Args:
        tensor: on any device; on the host it is ready.
    """

    __slots__ = ("_event", "_values")

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        self._values = tensor
        if tensor.device.type != "cpu":
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.get_device_module(tensor.device).Event()
            self._event.record()

    def wait(self) -> Tensor:
        """The values, on the host.

        Raises:
            RuntimeError: a computation before them failed.
        """
        if self._event is not None:
            self._event.synchronize()
        return self._values


class DeviceQueue:
    """Work of a device, which it does in the order in which it was given, while the host goes on.

    A program whose work is queued otherwise than on the current stream of ``Program.device`` has an attribute
    ``queue`` with the same methods.

    Args:
        device: a CPU has done everything when a call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, tensor: Tensor) -> Tensor:
        """Copy a host's tensor to the device, see ``sent``."""
        return sent(tensor, self.device)

    def read_later(self, tensor: Tensor) -> HostCopy:
        """Begin to copy a tensor of the device to the host."""
        return HostCopy(tensor)

    def synchronize(self) -> None:
        """Wait for everything that was given to the device."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)
