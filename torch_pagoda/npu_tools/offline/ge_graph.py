"""A GE graph as plain data: torchair's input to the Ascend graph engine."""

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
        name: unique name; an input of the graph has its placeholder's name, ``name[0:n]`` for a list of n integers.
        type: operator of the Ascend IR.
        inputs: the operator's name of each present input → its source, ``node:index of its output``. In the order of
            the operator; members of a list of tensors are ``name0``, ``name1``, …
        attributes: name → int, float, bool, str, or list of these. A ``Data`` or ``Const`` has ``shape``
            (-1: dynamic) and ``dtype``, a small ``Const`` also ``value``.
        origin: name of the converted node; "" if unknown.
        host: computed on the host before any launch: an integer input, a shape, or derived from these alone.
        after: names of nodes that must run before this one, apart from its inputs.
        in_place: index of an output → name of the input whose memory it overwrites.
        schedule: its stream, core limits and super kernel, as far as the graph states them. Names and values are GE's
            own (``SCHEDULING``).
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
        """True if it only changes the shape or type of its first input."""
        return self.type in _VIEWS


@dataclass(frozen=True)
class GeGraph:
    """A GE graph, after torchair's own passes.

    Attributes:
        nodes: in the order of the graph.
        inputs: names of the ``Data`` nodes that are read, in the graph's argument order.
        outputs: the source of each output, ``node:index``; without inputs written in place.
    """

    nodes: tuple[GeNode, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[GeNode]:
        return iter(self.nodes)

    def __getitem__(self, name: str) -> GeNode:
        """The node named ``name``."""
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
        """The node that feeds input ``slot`` of ``node``, through any views."""
        source = self[node.inputs[slot].rpartition(":")[0]]
        while source.is_view:
            source = self[next(iter(source.inputs.values())).rpartition(":")[0]]
        return source

    def schedules(self) -> list[tuple[Mapping[str, Any], Counter[str]]]:
        """Each distinct schedule, in graph order, with the number of nodes of each operator; nodes that launch
        nothing do not count."""
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

        Not counted: inputs, constants, pure views, fetches, host computations on shapes and integers, and nodes with
        constant inputs only, which GE folds. Counted: everything that moves elements, ``Transpose``, ``GatherV2``,
        ``Cast``, ``TensorMove``, ``SplitV`` … .
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
        """The nodes that copy one of ``inputs``, entirely or in part, before or after a write to it.

        Torchair makes in-place operators functional with such ``TensorMove`` nodes, and removes only those it can
        prove useless. Each one left on a KV cache copies the whole cache in every step.

        Args:
            inputs: names of graph inputs that are read; by default all except those on the host.
        """
        unknown = set(inputs) - set(self.inputs)
        if unknown:
            known = ", ".join(self.inputs)
            raise ValueError(f"inputs: the graph reads no {sorted(unknown)[0]!r}; it reads {known}")
        watched = set(inputs) or {name for name in self.inputs if not self[name].host}
        return [node for node in self.nodes if node.type == "TensorMove" and self._stored_in(node) in watched]

    def _stored_in(self, node: GeNode) -> str:
        """The node whose memory ``node`` views or copies: itself if it computes something new."""
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
        """The graph as JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> GeGraph:
        """The graph from the result of ``to_dict``, also through JSON."""
        nodes = tuple(GeNode(**{**node, "after": tuple(node["after"])}) for node in content["nodes"])
        return cls(nodes, tuple(content["inputs"]), tuple(content["outputs"]))


# Operators that take a part of their first input.
_SELECTIONS = frozenset({"Gather", "GatherV2", "Slice", "SliceD", "StridedSlice", "StridedSliceD", "StridedSliceV2"})


def _in_order(nodes: tuple[GeNode, ...]) -> list[GeNode]:
    """``nodes`` in dependency order: torchair appends some inputs at the end."""
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
