"""Lets all ranks of a group replay a capture, or none.

npugraph_ex captures a size and replays it in one call. A capture exchanges nothing, a replay does: where a rank runs
out of streams or events while it captures, the others would wait in their replays for a rank that has none.
"""

from __future__ import annotations

import functools
from typing import Any

from .....runtime.parallel.group import RankGroup

_agreeing: list[RankGroup] = []


def agree_on_captures(group: RankGroup | None) -> None:
    """Have each capture of this process end as it does on all ranks of ``group``, from now on; None: as it does here.

    Where it raises on one, it raises on all of them.
    """
    from npugraph_ex._acl_concrete_graph.acl_graph import AclGraph

    _agreeing[:] = [] if group is None else [group]
    capture = AclGraph.capture
    if getattr(capture, "is_agreed_on", False):
        return

    @functools.wraps(capture)
    def agreed(self: Any, *args: Any, **kwargs: Any) -> Any:
        error: Exception | None = None
        result = None
        try:
            result = capture(self, *args, **kwargs)
        except Exception as raised:
            error = raised
        failed = any(group.agree(int(error is not None), "max") for group in _agreeing)
        if error is not None:
            raise error
        if failed:
            raise RuntimeError("another rank could not capture it")
        return result

    agreed.is_agreed_on = True  # type: ignore[attr-defined]
    AclGraph.capture = agreed
