"""Streams and events of Ascend chips, and how many captured graphs they are enough for.

Sources, by the letter in the comment of each row:

a. ``aclrtCreateStream`` in the runtime's reference of CANN 9.1 (https://www.hiascend.com/document/detail/zh/
   CANNCommunityEdition/910/API/runtimeapi/aclcppdevg_03_0065.html), the same in 8.1 to 9.2: the most streams of a
   device.
b. ``aclrtCreateEvent`` there (aclcppdevg_03_0078.html): the most events of a device, which ``aclrtRecordEvent``
   takes when it is called, and waits for when there is none.
c. vllm-ascend, ``vllm_ascend/utils.py``, ``update_aclgraph_sizes``, in releases to early 2026: what a captured graph
   occupies until it is thrown away, and what is left to everything else. It has 2048 for the streams of A2.
d. vllm-ascend, ``platform.py`` in August 2026: four sizes on 950 until a driver is released.
e. npugraph_ex of torch_npu 2.13.0, ``_acl_concrete_graph/fx2acl_converter.py`` and ``acl_graph.py``: an event for
   each attention call that gets lengths at a replay, one for the replay; for a side stream two at its begin and end.

That a side stream takes one of its own in each captured graph is an assumption: nobody says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from .....runtime.npu_target import NpuTarget, Product

CAPTURES_PER_GRAPH = 64
"""npugraph_ex's default ``capture_limit``: at the next capture it throws away what it has captured and runs the graph
eagerly from then on (torchair documentation, npugraph_ex, "capture_limit")."""

KEPT_SHARE = 248 / 2048
"""Of the streams, what vllm-ascend leaves to everything that is not a captured graph (c); of events as much."""

STREAMS_PER_GROUP = 40
_CAPTURES_OF_FAMILY = {"Ascend950": 4, "Ascend910_95": 4}  # d


@dataclass(frozen=True)
class GraphResources:
    """What a device has for captured graphs.

    Attributes:
        streams: of the device.
        events: of the device.
    """

    streams: int
    events: int


RESOURCES = {
    Product.A2: GraphResources(1984, 65536),  # a, b
    Product.A3: GraphResources(1984, 65536),  # a, b
    Product.A5: GraphResources(1984, 65536),  # a, b
    Product.INFERENCE: GraphResources(1024, 1023),  # a, b
}
"""By family of chips; INFERENCE is 310P."""


@dataclass(frozen=True)
class GraphNeeds:
    """What one captured graph of a program occupies.

    Attributes:
        attention_calls: that get lengths at each replay.
        side_streams: streams in addition to the one that it is captured on.
        side_events: event records between streams, in addition to those at the begin and the end of each side stream.
        graphs: that are captured for one size: 1 for a whole program.
        groups: of more than one device that the graphs communicate in.
    """

    attention_calls: int = 0
    side_streams: int = 0
    side_events: int = 0
    graphs: int = 1
    groups: int = 0

    @property
    def streams(self) -> int:
        """Of one size (c, without collectives that AIV expands)."""
        return self.graphs * (1 + self.side_streams) * (1 + 2 * self.groups)

    @property
    def events(self) -> int:
        """Of one size (e)."""
        return self.attention_calls + 1 + 2 * self.side_streams + self.side_events


def capture_budget(soc: str, needs: GraphNeeds) -> tuple[int, str]:
    """(how many sizes can be captured, what keeps it from being more) on a chip.

    Args:
        soc: its name.
        needs: of one size.
    """
    resources = RESOURCES[NpuTarget(soc=soc).product]
    left = {
        "streams": resources.streams - round(KEPT_SHARE * resources.streams) - STREAMS_PER_GROUP * needs.groups,
        "events": resources.events - round(KEPT_SHARE * resources.events),
    }
    each = {"streams": needs.streams, "events": needs.events}
    limits = [(CAPTURES_PER_GRAPH, f"npugraph_ex captures a graph at most {CAPTURES_PER_GRAPH} times")]
    for kind, free in left.items():
        most = getattr(resources, kind)
        limits.append((max(0, free // each[kind]), f"{soc} has {most} {kind}, and each capture takes {each[kind]}"))
    for family, most in _CAPTURES_OF_FAMILY.items():
        if soc.startswith(family):
            limits.append((most, f"the driver of {soc} is not known to support more"))
    return min(limits, key=lambda limit: limit[0])
