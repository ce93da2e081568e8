"""The process of a stage: prepares the stage's items, then runs the requested ones, one after the other.

Requests and answers are JSON over a pipe; stdout and stderr of libraries go to the parent, which quotes their end.
Nothing heavy is imported here: each stage imports what it needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

Progress: TypeAlias = Callable[[dict[str, Any]], None]
"""Called with partial results, also as a sign of life."""
Items: TypeAlias = Mapping[str, Callable[[Progress], dict[str, Any]]]
"""Name of an item → runs it, and returns its result as JSON data; its "wrong" is the reason why it is wrong, or
""."""

_PR_SET_PDEATHSIG = 1
_LONGEST = 2000


def main() -> None:
    """Serve the process that started this one."""
    with contextlib.suppress(OSError, AttributeError):  # not on every system
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pipe = Connection(int(sys.argv[1]))

    def say(**message: Any) -> None:
        pipe.send_bytes(json.dumps(message).encode())

    request = json.loads(pipe.recv_bytes())
    module, _, name = request["stage"].partition(":")
    try:
        items: Items = getattr(importlib.import_module(module), name)(**request["arguments"])
    except Exception as error:
        say(**_failure(error))
        return
    say(items=list(items))
    with contextlib.suppress(EOFError):  # nothing is left to run
        while True:
            item = json.loads(pipe.recv_bytes())["run"]
            try:
                result = items[item](lambda found: say(progress=found))
            except Exception as error:
                failure = _failure(error)
                say(**failure)
                if failure["fatal"]:
                    return
            else:
                say(result=result)


def _failure(error: Exception) -> dict[str, Any]:
    """An error as text, with its remedy if one is known; "fatal" if the process can no longer use the device."""
    from ...runtime.npu_errors.device_lost import lost_reason
    from ...runtime.npu_errors.remedies import DeviceError, explain

    lost = lost_reason(error)
    explained = explain(error)
    of_runtime = isinstance(explained, DeviceError) and explained.code.startswith("507")
    text = lost or " ".join(str(explained).split()) or type(error).__name__
    if not (lost or isinstance(explained, DeviceError | ValueError)):
        text = f"{type(error).__name__}: {text}"
    return {"error": text[:_LONGEST], "fatal": bool(lost) or of_runtime}


if __name__ == "__main__":
    main()
