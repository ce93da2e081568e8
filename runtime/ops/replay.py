"""Records calls of C++ kernels, and repeats them without Python in between."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from .native import NotedCall, kernel_function


class Replay:
    """Kernel calls that can be made again, in order, as often as one likes.

    What their arguments point to must stay where it is.

    Args:
        calls: as :func:`~torch_pagoda.runtime.ops.native.noting_calls` noted them.

    Raises:
        RuntimeError: there are no kernels.
    """

    def __init__(self, calls: Sequence[NotedCall]) -> None:
        function = kernel_function("pagoda_replay")
        if function is None:
            raise RuntimeError("there are no C++ kernels to replay calls of")
        self._function = function
        self._refused = [call.refused for call in calls]
        self._arguments = [ctypes.create_string_buffer(call.arguments, len(call.arguments)) for call in calls]
        pairs = [
            number
            for call, arguments in zip(calls, self._arguments, strict=True)
            for number in (call.address, ctypes.addressof(arguments))
        ]
        self._calls = (ctypes.c_int64 * len(pairs))(*pairs)
        self._whole = struct.pack("=2q", ctypes.addressof(self._calls), len(calls))

    def run(self) -> bool:
        """Make the calls.

        Returns:
            False if a kernel refused its arguments; the calls after it were not made.

        Raises:
            Exception: what the refused call was noted with.
        """
        status = self._function(self._whole)
        if status and (refused := self._refused[status - 1]) is not None:
            refused()
        return status == 0
