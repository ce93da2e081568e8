"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OK", "PROBLEM", "UNKNOWN", "Finding", "ok", "problem", "unknown"]

OK, PROBLEM, UNKNOWN = "ok", "problem", "not known"


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        check: what was checked.
        status: ``OK``, ``PROBLEM`` or ``UNKNOWN``.
        text: the finding.
        remedy: the next step; "" for none.
        stops: whether it prevents serving on an NPU.
    """

    check: str
    status: str
    text: str
    remedy: str = ""
    stops: bool = False


def ok(check: str, text: str) -> Finding:
    return Finding(check, OK, text)


def problem(check: str, text: str, remedy: str, stops: bool = True) -> Finding:
    return Finding(check, PROBLEM, text, remedy, stops)


def unknown(check: str, text: str, remedy: str = "") -> Finding:
    return Finding(check, UNKNOWN, text, remedy)
