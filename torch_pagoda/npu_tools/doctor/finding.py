"""What a check finds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OK", "PROBLEM", "UNKNOWN", "Finding", "ok", "problem", "unknown"]

OK, PROBLEM, UNKNOWN = "ok", "problem", "not known"


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        check: what was looked at.
        status: ``OK``, ``PROBLEM`` or ``UNKNOWN``.
        text: what was found.
        remedy: the next step, "" where there is none to take.
        stops: whether nothing can be served on an NPU as long as this is so.
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
