"""Schedules that users may ask for, by name.

- "streams": branches of decode steps run on a second stream (``passes.schedule.schedule_branches``).
- "prefetch": weights of decode steps are fetched into the L2 cache while launches before their reader leave the
  memory idle (``passes.schedule.schedule_prefetch``).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

PASSES = {"streams": "schedule_branches", "prefetch": "schedule_prefetch"}
"""Schedule → the pass whose record says what of it was placed."""
KNOWN = tuple(PASSES)
_SINGLE_STREAM = "ge_config.enable_single_stream"


def asked_for(schedule: Mapping[str, Any]) -> list[str]:
    """The names of the schedules that are on.

    Raises:
        ValueError: a name that there is not, or a value that is neither True nor False.
    """
    if not isinstance(schedule, Mapping):
        raise ValueError(f"schedule={schedule!r} is not understood; give a dictionary, such as {{'streams': True}}")
    for name, on in schedule.items():
        if name not in KNOWN:
            close = difflib.get_close_matches(str(name), KNOWN, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(map(repr, KNOWN))}"
            raise ValueError(f"schedule[{name!r}] is not known; {remedy}")
        if not isinstance(on, bool):
            raise ValueError(f"schedule[{name!r}]={on!r} is neither True nor False; give one of them")
    return [name for name, on in schedule.items() if on]


def check_schedule(
    schedule: Mapping[str, Any],
    target: str,
    codegen: str,
    *,
    static_decode: bool = False,
    npu_options: Mapping[str, Any] | None = None,
) -> None:
    """Check that what a schedule asks for can run.

    Args:
        schedule: by name.
        target: "cpu" or "npu".
        codegen: what the lowered graph goes through.
        static_decode: decode steps have graphs of fixed sizes on the graph engine.
        npu_options: of the toolchain.

    Raises:
        ValueError: it cannot, or ``asked_for`` refuses it.
    """
    if not asked_for(schedule):
        return
    given = f"schedule={dict(schedule)!r}"
    if target != "npu":
        raise ValueError(f"{given} is for target='npu': a CPU runs one launch after the other; leave it out")
    if codegen not in ("ge", "aclgraph"):
        raise ValueError(
            f"{given} is not for codegen={codegen!r}, which makes the calls one by one; use codegen='aclgraph', or "
            "'ge' with static_decode=True"
        )
    if codegen == "ge" and not static_decode:
        raise ValueError(
            f"{given} needs static_decode=True with codegen='ge': dynamic graphs ignore schedules; give it, or use "
            "codegen='aclgraph'"
        )
    if codegen == "ge" and (npu_options or {}).get(_SINGLE_STREAM):
        raise ValueError(f"{given} contradicts npu_options[{_SINGLE_STREAM!r}]; leave one of them out")
