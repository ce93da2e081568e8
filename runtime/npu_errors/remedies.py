"""Explains errors of torch_npu and CANN: a meaning and a remedy for a code.

Errors after which the device computes nothing any more are ``device_errors``'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from .device_lost import lost_reason, reported_codes
from .error_table import OUT_OF_MEMORY, REMEDIES, Remedy

__all__ = ["DeviceError", "explain", "explained_errors"]

# Messages of CANN hold traces of many lines; what says the code stands at their start.
_READ = 65536
# "EI0002: ...", "EZ9999[PID: 7]", "Memory_Allocation_Failure(EL0004)".
_MODULE = re.compile(r"(?<![A-Za-z0-9])(E[A-Z1]\d{4})(?=[\[):])")
_NO_MEMORY = re.compile(r"\bNPU out of memory\b")


class DeviceError(RuntimeError):
    """An error of an Ascend device, with its meaning and a remedy; the original is its ``__cause__``.

    Attributes:
        code: of the table, such as "507035" or "EI0002"; "" for torch_npu's own out of memory.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


def explain(error: Exception) -> Exception:
    """A ``DeviceError`` whose cause is ``error``, if its message has a code that is known, else ``error`` itself."""
    if not isinstance(error, RuntimeError) or isinstance(error, DeviceError) or lost_reason(error):
        return error
    message = str(error)[:_READ]
    code, remedy = _find(message)
    if remedy is None:
        return error
    named = f" ({code})" if code else ""
    first = message.strip().splitlines()[0]
    explained = DeviceError(f"{remedy.meaning}{named}; {remedy.remedy}. The error was: {first}", code)
    explained.__cause__ = error
    return explained


@contextmanager
def explained_errors() -> Iterator[None]:
    """Raise errors of a device as ``DeviceError``; let all others through as they are."""
    try:
        yield
    except RuntimeError as error:
        explained = explain(error)
        if explained is error:
            raise
        raise explained from error


def _find(message: str) -> tuple[str, Remedy | None]:
    """The first code that the table has; memory before all else, and numbers before the modules' codes.

    A module's code tells where an error was noticed, the number what it is: EZ9999 accompanies most numbers.
    """
    if _NO_MEMORY.search(message):
        return "", OUT_OF_MEMORY
    for code in (*reported_codes(message), *_MODULE.findall(message)):
        if code in REMEDIES:
            return code, REMEDIES[code]
    return "", None
