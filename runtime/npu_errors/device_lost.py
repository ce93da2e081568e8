"""Errors after which a device no longer computes.

Codes are those of CANN's runtime (``error_codes/rt_error_codes.h`` of https://github.com/hicann/runtime); torch_npu
puts them, and the runtime's words, into what it raises (``torch_npu/csrc/core/npu/NPUException.h``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator


class DeviceLost(RuntimeError):
    """The device computes nothing any more, whatever it is given; the message says what it reported."""


_LOST_CODES = {
    "507010": "its task scheduler does not respond",
    "507053": "its memory is faulty",
    "507054": "its memory has multi-bit errors",
    "507056": "its link to others is broken",
    "507901": "its connection to the host is closed",
}
"""Codes of the runtime that say so → in words."""

# "error code is 507035", "ERROR_CODE:507015", "errorCode=507901", "ret=507010".
_CODE = re.compile(r"(?:\berr(?:or)?[ _]?code|\berror|\bret)\b(?: is)?\W{0,4}(\d{6})\b", re.IGNORECASE)
_WORDS = re.compile(
    r"\bdevice (?:is |was |has been )?lost\b|\blost heartbeat\b|\b(?:HBM MULTI BIT ECC|UCE|HCCS LINK) ERROR\b",
    re.IGNORECASE,
)
_REMEDY = "check npu-smi info and the device's log, then restart the process"


def reported_codes(message: str) -> list[str]:
    """Numbers of errors that CANN's runtime and torch_npu name in a message, in order."""
    return _CODE.findall(message)


def raise_if_lost(error: BaseException) -> None:
    """Raise ``DeviceLost`` if ``error``, or one that it came from, says that the device is lost."""
    if (reason := lost_reason(error)) is not None:
        raise DeviceLost(reason) from error


def lost_reason(error: BaseException) -> str | None:
    """What a lost device reported, in one line with the remedy; None if ``error`` says no such thing."""
    for each in _chain(error):
        if isinstance(each, DeviceLost):
            return str(each)
        text = str(each)
        codes = [_LOST_CODES[code] for code in reported_codes(text) if code in _LOST_CODES]
        if codes or _WORDS.search(text):
            reported = " ".join(text.split())[:300]
            words = f", {codes[0]}" if codes else ""
            return f"the device is lost{words} ({reported}); {_REMEDY}"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__
