"""Waiting for a device whose work other ranks have a share in: an error, or too long a wait, ends them all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ..device_queue import DeviceQueue, HostCopy

Together = Callable[[str], AbstractContextManager[None]]
"""Of what is waited for: what lets all ranks fail where that raises or takes too long."""


class GroupQueue(DeviceQueue):
    """The queue of rank 0's device.

    Args:
        device: see ``DeviceQueue``.
        together: see ``Together``.
    """

    def __init__(self, device: torch.device, together: Together) -> None:
        super().__init__(device)
        self._together = together

    def read_later(self, tensor: torch.Tensor) -> HostCopy:
        """See ``DeviceQueue``."""
        return _GroupCopy(tensor, self._together)

    def synchronize(self) -> None:
        """See ``DeviceQueue``.

        Raises:
            GroupFailed: a computation failed.
        """
        with self._together("the device's work"):
            super().synchronize()


class _GroupCopy(HostCopy):
    __slots__ = ("_together",)

    def __init__(self, tensor: torch.Tensor, together: Together) -> None:
        super().__init__(tensor)
        self._together = together

    def wait(self) -> torch.Tensor:
        """See ``HostCopy``.

        Raises:
            GroupFailed: a computation failed.
        """
        with self._together("the device's work"):
            return super().wait()
