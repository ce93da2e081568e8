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
_SINGLE_STREAM, _DUMP = "ge_config.enable_single_stream", "dump_config.enable_dump"


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
    asked = asked_for(schedule)
    if not asked:
        return
    given, options = f"schedule={dict(schedule)!r}", npu_options or {}
    if target != "npu":
        raise ValueError(f"{given} is for target='npu': a CPU runs one launch after the other; leave it out")
    if codegen not in ("ge", "aclgraph"):
        raise ValueError(
            f"{given} is not for codegen={codegen!r}, which makes the calls one by one; use codegen='aclgraph', or "
            "'ge' with static_decode=True"
        )
    if codegen == "aclgraph" and "super_kernels" in asked:
        raise ValueError(
            f"{given} has scopes of 'super_kernels' for the graph engine; with codegen='aclgraph' give npu_options="
            "{'static_kernel_compile': True, 'super_kernel_optimize': True}, which fuse what is captured"
        )
    if codegen == "ge" and not static_decode:
        raise ValueError(
            f"{given} needs static_decode=True with codegen='ge': dynamic graphs ignore schedules; give it, or use "
            "codegen='aclgraph'"
        )
    single = {"streams", "prefetch"}.intersection(asked)
    if codegen == "ge" and single and options.get(_SINGLE_STREAM):
        raise ValueError(f"{given} contradicts npu_options[{_SINGLE_STREAM!r}]; leave one of them out")
    if "super_kernels" in asked and options.get(_DUMP):
        raise ValueError(
            f"{given} contradicts npu_options[{_DUMP!r}]: of what is fused nothing is dumped; leave one of them out"
        )


def leave_out(name: str, reason: str, dropped: dict[str, str]) -> None:
    """Note in ``dropped`` that a schedule is left out, and log it. The first reason of each is kept."""
    if name not in dropped:
        log.warning("%s: %s", LEFT_OUT[name], reason)
        dropped[name] = reason
