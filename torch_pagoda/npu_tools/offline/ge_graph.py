"""A GE graph as plain data: what torchair hands to the Ascend graph engine for a graph of PyTorch operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# No kernel on the device: inputs, constants, the graph's end, fetches into the L2 cache.
_NO_WORK = frozenset({"Data", "RefData", "Const", "ConstPlaceHolder", "Constant", "NetOutput", "NoOp", "Cmo"})
# The same elements under another shape or type. GE runs these, on contiguous tensors, without a kernel.
_VIEWS = frozenset(
    {
        "Bitcast",
        "ExpandDims",
        "Flatten",
        "FlattenV2",
        "Identity",
        "Reshape",
        "Squeeze",
        "SqueezeV2",
        "SqueezeV3",
        "Unsqueeze",
        "UnsqueezeV2",
        "UnsqueezeV3",
    }
)
# Attributes that say when and where an operator runs (torchair's ``scope``). All other names that begin with "_" are
# torchair's own notes.
SCHEDULING = (
    "_user_stream_label",
    "_user_stream_priority",
    "_enable_inner_parallel",
    "_op_aicore_num",
    "_op_vectorcore_num",
    "_super_kernel_scope",
    "_super_kernel_options",
)


@dataclass(frozen=True)
class GeNode:
    """A node of a GE graph.

    Attributes:
        name: unique name; an input of the graph has its placeholder's name, ``name[0:n]`` where it is n integers that
            arrive as one list.
        type: operator of the Ascend IR.
        inputs: the operator's name of each input that is there → what feeds it, ``node:index of its output``. In
            the order of the operator; members of a list of tensors are ``name0``, ``name1``, …
        attributes: name → int, float, bool, str, or list of these. A ``Data`` or ``Const`` has ``shape``
            (-1: dynamic) and ``dtype``, a small ``Const`` also ``value``.
        origin: name of the node of the converted graph that it was made for; "" when unknown.
        host: computed on the host, before anything is launched: an integer input, a shape, or made from these alone.
        after: names of nodes that run before this one for another reason than its inputs.
        in_place: index of an output → name of the input that it is written over.
        schedule: when and where it runs, as far as the graph says: the stream that it is given to, the cores that it
            may take, the super kernel that it is part of. Names and values are GE's own (``SCHEDULING``).
    """

    name: str
    type: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    host: bool = False
    after: tuple[str, ...] = ()
    in_place: Mapping[str, str] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_view(self) -> bool:
        """True if it only renames the shape or type of its first input."""
        return self.type in _VIEWS


@dataclass(frozen=True)
class GeGraph:
    """A GE graph, after torchair's own passes.

    Attributes:
        nodes: in the order of the graph.
        inputs: names of the ``Data`` nodes that are read, in the order in which the graph takes them.
        outputs: what each output of the graph is, ``node:index``; inputs that are written in place are not among
            them.
    """

    nodes: tuple[GeNode, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[GeNode]:
        return iter(self.nodes)

    def __getitem__(self, name: str) -> GeNode:
        """The node called ``name``."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def of_type(self, type: str) -> list[GeNode]:
        """The nodes of one operator."""
        return [node for node in self.nodes if node.type == type]

    def count(self, type: str) -> int:
        """The number of nodes of one operator."""
        return len(self.of_type(type))

    def types(self) -> Counter[str]:
        """The number of nodes of each operator."""
        return Counter(node.type for node in self.nodes)

    def source(self, node: GeNode, slot: str) -> GeNode:
        """The node that feeds input ``slot`` of ``node``, behind any views."""
        source = self[node.inputs[slot].rpartition(":")[0]]
        while source.is_view:
            source = self[next(iter(source.inputs.values())).rpartition(":")[0]]
        return source

    def schedules(self) -> list[tuple[Mapping[str, Any], Counter[str]]]:
        """Each schedule that nodes have, in the order of the graph, with the number of nodes of each operator; nodes
        that launch nothing do not count."""
        found: list[tuple[Mapping[str, Any], Counter[str]]] = []
        for node in self.computing():
            if not node.schedule:
                continue
            types = next((types for schedule, types in found if schedule == node.schedule), None)
            if types is None:
                found.append((node.schedule, types := Counter()))
            types[node.type] += 1
        return found

    def computing(self) -> list[GeNode]:
        """The nodes that launch a kernel.

        Not counted: inputs, constants, pure views, fetches, what the host computes from shapes and integers, and what
        has only constants as inputs, which GE's constant folding computes once. Counted: everything that moves
        elements, ``Transpose``, ``GatherV2``, ``Cast``, ``TensorMove``, ``SplitV`` … .
        """
        folded: set[str] = set()
        found = []
        for node in _in_order(self.nodes):
            sources = {source.rpartition(":")[0] for source in node.inputs.values()}
            if node.type == "Const" or (sources and sources <= folded and node.type != "NetOutput"):
                folded.add(node.name)
            elif node.type not in _NO_WORK and not node.is_view and not node.host:
                found.append(node)
        kept = {node.name for node in found}
        return [node for node in self.nodes if node.name in kept]

    def cache_copies(self, *inputs: str) -> list[GeNode]:
        """The nodes that copy one of ``inputs``, whole or a selected part, as it came or after it was written to.

        Torchair makes operators that write in place functional with such ``TensorMove`` nodes, and removes only those
        that it can prove useless. Left over on a KV cache, they copy all of it in every step.

        Args:
            inputs: names of graph inputs that are read; all but those on the host by default.
        """
        unknown = set(inputs) - set(self.inputs)
        if unknown:
            known = ", ".join(self.inputs)
            raise ValueError(f"inputs: the graph reads no {sorted(unknown)[0]!r}; it reads {known}")
        watched = set(inputs) or {name for name in self.inputs if not self[name].host}
        return [node for node in self.nodes if node.type == "TensorMove" and self._stored_in(node) in watched]

    def _stored_in(self, node: GeNode) -> str:
        """The node whose memory ``node`` shows or copies: itself where it computes something new."""
        feed = next(iter(node.inputs.values()), "")
        while feed:
            name, _, output = feed.rpartition(":")
            node = self[name]
            if node.is_view or node.type in _SELECTIONS or node.type == "TensorMove":
                feed = next(iter(node.inputs.values()))
            else:
                feed = node.inputs[node.in_place[output]] if output in node.in_place else ""
        return node.name

    def to_dict(self) -> dict[str, Any]:
        """The graph as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> GeGraph:
        """The graph that ``to_dict`` gave, perhaps through JSON."""
        nodes = tuple(GeNode(**{**node, "after": tuple(node["after"])}) for node in content["nodes"])
        return cls(nodes, tuple(content["inputs"]), tuple(content["outputs"]))


# Operators that take a part of their first input.
_SELECTIONS = frozenset({"Gather", "GatherV2", "Slice", "SliceD", "StridedSlice", "StridedSliceD", "StridedSliceV2"})


def _in_order(nodes: tuple[GeNode, ...]) -> list[GeNode]:
    """``nodes`` so that each comes after what it reads: torchair appends some inputs at the end."""
    by_name = {node.name: node for node in nodes}
    ordered: dict[str, GeNode] = {}
    stack = list(reversed(nodes))
    while stack:
        node = stack[-1]
        waiting = [
            by_name[name]
            for name in dict.fromkeys(source.rpartition(":")[0] for source in node.inputs.values())
            if name not in ordered
        ]
        if waiting:
            stack.extend(waiting)
        else:
            ordered[stack.pop().name] = node
    return list(ordered.values())
