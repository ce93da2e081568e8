"""The origin of a graph's nodes: the modules and functions that they were traced in, and their decoder layer.

Dynamo records the modules (``nn_module_stack``) and the Python frames (``stack_trace``) of each node, AOTAutograd
keeps both, and passes copy them to the nodes that they insert (``TracedGraph.before``).
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .fx_nodes import callee, is_dynamic, value

_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]*)')
_ENTRY = re.compile(r"(?P<list>.*)\.(?P<index>\d+)")
_ATTENTION = re.compile("attention|softmax")
# Views by meaning that the schema does not declare as such.
_VIEWS = frozenset({"_unsafe_view", "lift_fresh", "getitem", "wait_tensor"})
# Filled once with numbers that do not depend on any input.
_CONSTANTS = frozenset(
    {"scalar_tensor", "lift_fresh_copy", "full", "zeros", "ones", "empty", "arange", "_tensor_constant"}
)


@dataclass(frozen=True)
class Scope:
    """A call of a module.

    Attributes:
        path: qualified name in the model, "" for the model itself.
        kind: class name.
    """

    path: str
    kind: str


@dataclass(frozen=True)
class Frame:
    """A line of Python on the stack of a traced call."""

    file: str
    line: int
    function: str
    code: str


def scopes(node: fx.Node) -> list[Scope]:
    """The modules that ``node`` was traced in, the model first; [] when unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    return [Scope(_path(str(name)), getattr(kind, "__name__", str(kind))) for name, kind in stack.values()]


def _path(name: str) -> str:
    """``L['model'].model.layers.0`` → ``model.layers.0``."""
    if "]." in name:
        return name.split("].", 1)[-1]
    return "" if name.startswith("L[") else name


def frames(node: fx.Node) -> tuple[Frame, ...]:
    """The Python frames that ``node`` was traced in, the innermost last; () when unknown."""
    return _frames(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=4096)
def _frames(trace: str) -> tuple[Frame, ...]:
    return tuple(Frame(m["file"], int(m["line"]), m["function"], m["code"].strip()) for m in _FRAME.finditer(trace))


def operator_name(node: fx.Node) -> str:
    """Namespace and name of the operator without its overload: ``aten.mm``, ``pagoda.rms_norm``."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.replace("::", ".")
    return callee(node)


def launches_work(node: fx.Node) -> bool:
    """Tell whether ``node`` computes or moves elements of tensors.

    Views, sizes, inputs and constants do not.
    """
    if node.op == "call_method":
        return isinstance(value(node), torch.Tensor)
    if node.op != "call_function" or callee(node).partition(".")[0] in _VIEWS:
        return False
    target = node.target
    results = [v for v in pytree.tree_leaves(value(node)) if isinstance(v, torch.Tensor)]
    if isinstance(target, torch._ops.OpOverload):
        if target.is_view:
            return False
        if not results:
            return target._schema.is_mutable
    if not results:
        return False
    if callee(node).partition(".")[0] in _CONSTANTS and not any(is_dynamic(s) for v in results for s in v.shape):
        return any(isinstance(value(n), torch.Tensor) for n in node.all_input_nodes)
    return True


@dataclass(frozen=True)
class DecoderLayers:
    """The decoder layers of a graph.

    Attributes:
        lists: path of each module list that holds them, in order of use; almost always one. The layers of a second
            list are counted on from the first.
        paths: qualified name of each layer.
        of: layer of each node that belongs to one.
    """

    lists: tuple[str, ...]
    paths: tuple[str, ...]
    of: dict[fx.Node, int]

    def nodes(self, index: int) -> list[fx.Node]:
        """The nodes of one layer, in graph order."""
        return [n for n, layer in self.of.items() if layer == index]


def decoder_layers(
    graph: fx.Graph, like: DecoderLayers | None = None, tokens: fx.Node | None = None
) -> DecoderLayers:
    """Find the decoder layers by provenance.

    The layers are the entries of the outermost module lists in which attention is traced; embedding, final norm and
    head are outside. A node without provenance belongs where its users belong, or else its inputs. What several
    layers share, rotary tables for instance, belongs to none.

    Args:
        graph: its nodes carry provenance.
        like: layers of another graph of the same model; their numbers are taken.
        tokens: the placeholder of the token ids. Only what does not depend on them is taken for shared.
    """
    entries = {node: entry for node in graph.nodes if (entry := _outermost_entry(node)) is not None}
    if like is None:
        lists = _lists_with_attention(entries)
        paths = sorted({e for e in entries.values() if e[0] in lists}, key=lambda e: (lists.index(e[0]), e[1]))
        layers = tuple(f"{name}.{index}" for name, index in paths)
    else:
        lists, layers = list(like.lists), like.paths
    number = {path: i for i, path in enumerate(layers)}
    of: dict[fx.Node, int] = {}
    unknown: list[fx.Node] = []
    for node in graph.nodes:
        path = "{}.{}".format(*entries[node]) if node in entries else ""
        if path in number:
            of[node] = number[path]
        elif node.op.startswith("call") and not node.meta.get("nn_module_stack"):
            unknown.append(node)
    for node in reversed(unknown):
        found = {of.get(user, -1) for user in node.users}
        if len(found) == 1 and (layer := found.pop()) >= 0:
            of[node] = layer
    for node in unknown:
        if node not in of and (layer := max((of.get(n, -1) for n in node.all_input_nodes), default=-1)) >= 0:
            of[node] = layer
    if tokens is not None:
        for node in _shared(graph, tokens, of):
            del of[node]
    return DecoderLayers(tuple(lists), layers, {n: of[n] for n in graph.nodes if n in of})


def _shared(graph: fx.Graph, tokens: fx.Node, of: dict[fx.Node, int]) -> list[fx.Node]:
    """Nodes of a layer that follow from the positions alone and are read by other layers too."""
    depends = {tokens}
    for node in graph.nodes:
        if any(n in depends for n in node.all_input_nodes):
            depends.add(node)
    readers: dict[fx.Node, set[int]] = {}
    for node in reversed(graph.nodes):
        if node not in depends:
            seen = ({of.get(user, -1)} if user in depends else readers[user] for user in node.users)
            readers[node] = set().union(*seen)
    return [n for n in of if n not in depends and len(readers[n]) > 1]


def _outermost_entry(node: fx.Node) -> tuple[str, int] | None:
    """The first module on the node's stack that is an entry of a module list: the list's path and the index."""
    for scope in scopes(node):
        if match := _ENTRY.fullmatch(scope.path):
            return match["list"], int(match["index"])
    return None


def _lists_with_attention(entries: dict[fx.Node, tuple[str, int]]) -> list[str]:
    """The module lists whose entries attend, in order of use; where none does, the one with most nodes."""
    attending = [name for node, (name, _) in entries.items() if _attends(node)]
    if attending:
        return list(dict.fromkeys(attending))
    return [name for name, _ in Counter(name for name, _ in entries.values()).most_common(1)]


def _attends(node: fx.Node) -> bool:
    return bool(_ATTENTION.search(callee(node))) and any("ttention" in scope.kind for scope in scopes(node))


def source_line(node: fx.Node) -> str:
    """``file.py:12 in function: code`` of the innermost frame, "" when unknown."""
    stack = frames(node)
    if not stack:
        return ""
    last = stack[-1]
    return f"{last.file.rpartition('/')[2]}:{last.line} in {last.function}: {last.code}"
