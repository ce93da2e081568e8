"""Let each captured graph update its own attention calls.

At a replay npugraph_ex gives the attention calls of the graph their lengths, and records the event that each of them
waits for. The calls are in a list that it keeps per compiled graph: ``AclGraph.capture`` empties it and fills it with
those of the new capture, while what replays an earlier one holds the same list (torch_npu 2.13.0,
``npugraph_ex/_acl_concrete_graph/acl_graph.py``). So once a second size is captured, a replay of the first gives its
lengths to the calls of the second, and its own wait for ever.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)


def keep_updates_apart() -> None:
    """Have whatever replays a capture, from now on in this process, hold a list of its own; repeated calls change
    nothing."""
    from npugraph_ex._acl_concrete_graph import acl_graph

    replays = getattr(acl_graph, "CapturedGraphUpdateAndReplay", None)
    if replays is None:
        log.debug("npugraph_ex has no CapturedGraphUpdateAndReplay; leaving its captures unchanged")
        return
    init = replays.__init__
    if getattr(init, "keeps_updates_apart", False):
        return

    @functools.wraps(init)
    def own_list(self: Any, replay_graph: Any, updated_input_func: Any, updated_node_infos: Sequence[Any]) -> None:
        init(self, replay_graph, updated_input_func, list(updated_node_infos))

    own_list.keeps_updates_apart = True  # type: ignore[attr-defined]
    replays.__init__ = own_list
