"""Order and cost of the launches of a lowered graph: what each takes, and which of them have to follow which.

A call that writes a cache returns nothing, and attention that reads the cache has no edge to it. So order follows
memory as well as data: a write precedes later reads of the same memory, and follows earlier ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ..graph.fx_nodes import written_arguments
from ..graph.provenance import launches_work


@dataclass(frozen=True)
class Cost:
    """The time of one launch by published figures, seconds; nothing is measured.

    Attributes:
        memory: to move its bytes at the memory's bandwidth.
        compute: to do its operations at the chip's peak.
        floor: that no launch takes less than.
        resource: the cores that it keeps busy: "cube", "vector", or "mixed" for both.
    """

    memory: float
    compute: float
    floor: float
    resource: str

    @property
    def seconds(self) -> float:
        """The longest of the three."""
        return max(self.memory, self.compute, self.floor)

    @property
    def memory_bound(self) -> bool:
        """True if the launch waits for memory all the time."""
        return self.memory >= max(self.compute, self.floor)


class Launches:
    """The launches of a graph and the order between them.

    Args:
        graph: a lowered graph.
        costs: of its launches.

    Attributes:
        nodes: the launches, in the order of the graph.
        costs: as given.

    Raises:
        KeyError: a launch without a cost.
    """

    def __init__(self, graph: fx.Graph, costs: Mapping[fx.Node, Cost]) -> None:
        self.nodes: list[fx.Node] = [node for node in graph.nodes if launches_work(node)]
        self.costs = {node: costs[node] for node in self.nodes}
        self._place = {node: i for i, node in enumerate(self.nodes)}
        self._inputs, self._before = dependencies(graph, self.nodes)

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """The launches that a launch waits for directly, for their data or for memory, in order."""
        return listed(self.nodes, self._inputs[node])

    def difference(self, node: fx.Node, other: fx.Node) -> list[fx.Node]:
        """What ``node`` needs, itself included, and ``other`` neither needs nor is; in order.

        No launch of ``difference(a, b)`` has to precede or follow one of ``difference(b, a)``: a launch that one of
        the latter needs is needed by ``b``.
        """
        return listed(self.nodes, self._with(node) & ~self._with(other))

    def needs(self, node: fx.Node, other: fx.Node) -> bool:
        """True if ``other`` has to precede ``node``."""
        return bool(self._before[node] >> self._place[other] & 1)

    def seconds(self, nodes: Sequence[fx.Node]) -> float:
        """The time of launches one after another."""
        return sum(self.costs[node].seconds for node in nodes)

    def _with(self, node: fx.Node) -> int:
        return self._before[node] | 1 << self._place[node]


def listed(nodes: Sequence[fx.Node], members: int) -> list[fx.Node]:
    """Return the nodes whose indices are the set bits of ``members``, in order."""
    found = []
    while members:
        lowest = members & -members
        found.append(nodes[lowest.bit_length() - 1])
        members ^= lowest
    return found


def dependencies(graph: fx.Graph, nodes: Sequence[fx.Node]) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """For each launch, as sets of bits, the launches that it waits for directly, and all that precede it.

    Args:
        graph: their graph.
        nodes: the launches, in its order; every other call is taken for a view of its inputs.
    """
    place = {node: i for i, node in enumerate(nodes)}
    inputs: dict[fx.Node, int] = {}
    before: dict[fx.Node, int] = {}
    memory = memory_of(graph, nodes)
    writers: dict[fx.Node, int] = defaultdict(int)
    readers: dict[fx.Node, int] = defaultdict(int)
    for node in graph.nodes:
        if node not in place:
            continue
        read = frozenset().union(*(memory[n] for n in node.all_input_nodes))
        written = frozenset().union(*(memory[n] for n in written_arguments(node)))
        direct = 0
        for source in read:
            direct |= writers[source] | (1 << place[source] if source in place else 0)
        for source in written:
            direct |= readers[source]
        inputs[node], before[node] = direct, direct
        for earlier in listed(nodes, direct):
            before[node] |= before[earlier]
        own = 1 << place[node]
        for source in read:
            readers[source] |= own
        for source in written:
            writers[source] |= own
    return inputs, before


def memory_of(graph: fx.Graph, nodes: Iterable[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each node the inputs and launches whose memory its tensors may be; arguments as for ``dependencies``."""
    launches = frozenset(nodes)
    memory: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        if node in launches:
            memory[node] = frozenset({node}).union(*(memory[n] for n in written_arguments(node)))
        else:
            memory[node] = frozenset().union(*(memory[n] for n in node.all_input_nodes)) or frozenset({node})
    return memory
