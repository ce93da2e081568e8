"""Schedules that users may ask for, by name.

- "streams": branches of decode steps run on a second stream (``passes.schedule.schedule_branches``).
- "prefetch": weights of decode steps are fetched into the L2 cache while launches before their reader leave the
  memory idle (``passes.schedule.schedule_prefetch``).
- "super_kernels": runs of operators of decode steps are fused into super kernels of the graph engine
  (``passes.schedule.schedule_super_kernels``). Captured graphs have them by options of npugraph_ex.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

PASSES = {
    "streams": "schedule_branches",
    "prefetch": "schedule_prefetch",
    "super_kernels": "schedule_super_kernels",
}
"""Schedule → the pass whose record says what of it was placed."""
KNOWN = tuple(PASSES)
LEFT_OUT = {
    "streams": "no branch runs on a second stream",
    "prefetch": "no weight is fetched before it is read",
    "super_kernels": "no launches are fused into super kernels",
}
"""Schedule → what it means that it is left out."""


def asked_for(schedule: Mapping[str, Any]) -> list[str]:
    """The names of the schedules that are on.

    Raises:
        ValueError: a name that there is not, or a value that is neither True nor False.
    """
    if not isinstance(schedule, Mapping):
        raise ValueError(f"schedule={schedule!r} is invalid; use a dictionary, such as {{'streams': True}}")
    for name, on in schedule.items():
        if name not in KNOWN:
            close = difflib.get_close_matches(str(name), KNOWN, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(map(repr, KNOWN))}"
            raise ValueError(f"schedule[{name!r}] is not known; {remedy}")
        if not isinstance(on, bool):
            raise ValueError(f"schedule[{name!r}]={on!r} is not a bool; use True or False")
    return [name for name, on in schedule.items() if on]


def leave_out(name: str, reason: str, dropped: dict[str, str]) -> None:
    """Note in ``dropped`` that a schedule is left out, and log it. The first reason of each is kept."""
    if name not in dropped:
        log.warning("%s: %s", LEFT_OUT[name], reason)
        dropped[name] = reason
