"""Counts norms, rotary embeddings, attention, MLPs and MoE blocks of an unmodified graph by provenance.

The passes recognize these by their computation. Here they are found by class names of modules and names of traced
functions, so that the two counts are independent and their difference shows what the passes missed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from ..passes.graph.fx_nodes import callee, is_tensor, shape
from ..passes.graph.provenance import DecoderLayers, Scope, decoder_layers, frames, launches_work, scopes

KINDS = ("attention", "norm", "rope", "gated_mlp", "activation", "moe")

GEMMS = frozenset(
    "mm addmm bmm baddbmm linear _grouped_mm grouped_mm_fallback packed_linear quantized_linear invariant_linear "
    "matmul".split()
)
ACTIVATIONS = frozenset("silu gelu relu leaky_relu hardswish mish elu relu6 activation".split())
_BATCHED = frozenset({"bmm", "baddbmm", "matmul"})
_BENDING = ACTIVATIONS | {"sigmoid", "tanh", "softplus"}
NORM_MODULE = re.compile(r"norm", re.IGNORECASE)
ATTENTION_MODULE = re.compile(r"attention|attn", re.IGNORECASE)
ROTARY_FUNCTION = re.compile(r"apply_.*(rotary|rope)|rotate_(half|every)", re.IGNORECASE)
_EXPERTS = re.compile(r"Experts$")
_MIXER = re.compile(r"attention|attn|mixer|mamba|delta|norm(gated)?$|router|conv|experts$", re.IGNORECASE)
ACTIVATION_MODULE = re.compile(r"activation|gelu|silu|swish|relu|xielu|mish|tanh|sigmoid", re.IGNORECASE)
# Each norm has to divide by a size that it computes.
_NORMALIZES = re.compile(r"rsqrt|sqrt|layer_norm|rms_norm|linalg_vector_norm|pow|batch_norm|group_norm|var")
# Classes that hold everything; their names say what the model is, not what they compute.
_CONTAINERS = re.compile(r"(Model|LM|Block|(?<!Mamba)Layer)$")
# A norm that takes the mean away is a layer norm.
_CENTERS = re.compile(r"layer_norm|sub|var")
_SLICES = frozenset("slice split split_with_sizes chunk select unbind getitem narrow".split())


@dataclass(frozen=True)
class Expected:
    """One structure that a pass should recognize.

    Attributes:
        kind: one of ``KINDS``.
        spelling: "rms" or "layer" for norms, "sdpa" or "eager" for attention, else "".
        module: qualified name of the module that computes it.
        layer: index of the decoder layer; -1 outside of all.
        nodes: names of the graph nodes that compute it.
    """

    kind: str
    spelling: str
    module: str
    layer: int
    nodes: tuple[str, ...]


def expected_matches(graph: fx.Graph, layers: DecoderLayers | None = None) -> list[Expected]:
    """All structures of ``KINDS`` in an unmodified ATen graph, in graph order.

    ``rope`` counts rotated tensors: the queries and keys of one attention are two. ``gated_mlp`` excludes the experts
    of MoE blocks, and ``activation`` those of gated MLPs.

    Args:
        graph: an ATen graph of the whole model, with provenance.
        layers: its decoder layers, if known.
    """
    found_layers = layers if layers is not None else decoder_layers(graph)
    calls = [n for n in graph.nodes if n.op == "call_function" and is_tensor_call(n)]
    gated = _gated_products(calls)
    blocks = _moe_blocks(calls)
    expected = [
        *_expected("norm", _norms(calls), found_layers),
        *_expected("rope", _rotations(calls), found_layers),
        *_expected("attention", _attention(calls), found_layers),
        *_expected("moe", list(blocks.values()), found_layers),
        *_expected(
            "gated_mlp", [[n] for n in gated if not _within(n, _MIXER) and _module([n]) not in blocks], found_layers
        ),
        *_expected("activation", _plain_activations(calls, gated), found_layers),
    ]
    order = {n.name: i for i, n in enumerate(graph.nodes)}
    return sorted(expected, key=lambda e: order[e.nodes[0]])


def per_layer(expected: Iterable[Expected], layers: DecoderLayers) -> list[dict[str, int]]:
    """The number of structures of each kind per decoder layer."""
    counts = [Counter(e.kind for e in expected if e.layer == i) for i in range(len(layers.paths))]
    return [{kind: c[kind] for kind in KINDS} for c in counts]


def is_tensor_call(node: fx.Node) -> bool:
    """True if ``node`` returns a tensor, or a tuple with tensors."""
    return is_tensor(node) or isinstance(node.meta.get("example_value"), tuple | list)


def _expected(kind: str, groups: Iterable[Sequence[fx.Node]], layers: DecoderLayers) -> list[Expected]:
    return [
        Expected(
            kind, _spelling(kind, group), _module(group), layers.of.get(group[0], -1), tuple(n.name for n in group)
        )
        for group in groups
    ]


def _spelling(kind: str, group: Sequence[fx.Node]) -> str:
    if kind == "norm":
        return "layer" if any(_CENTERS.search(callee(n)) for n in group) else "rms"
    if kind == "attention":
        origin = group[0].meta.get("source_fn_stack") or [("", "")]
        return "sdpa" if "scaled_dot_product" in f"{origin[-1][0]} {callee(group[0])}" else "eager"
    return ""


def _module(group: Sequence[fx.Node]) -> str:
    stack = scopes(group[0])
    return stack[-1].path if stack else ""


def _norms(calls: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Calls of norm modules: the nodes of each call of their forward."""

    def norm(node: fx.Node) -> Scope | None:
        stack = scopes(node)
        return stack[-1] if stack and NORM_MODULE.search(stack[-1].kind) else None

    return [g for g in _regions(calls, norm) if any(_NORMALIZES.search(callee(n)) for n in g)]


def _rotations(calls: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """One group per rotated tensor: its last node first, then the nodes that compute it.

    A rotation consists of the nodes traced in functions called ``apply_rotary...`` or ``rotate_...``. If only the
    helper that swaps the halves has such a name, the multiply-add of its result is included.
    """
    region = {n for n in calls if any(ROTARY_FUNCTION.search(f.function) for f in frames(n))}
    computed: set[fx.Node] = set()
    for node in calls:
        if node in region and (launches_work(node) or any(n in computed for n in node.all_input_nodes)):
            computed.add(node)
    return [[n] for n in calls if n in computed and any(user not in region for user in n.users)]


def _attention(calls: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Attention calls: fused ones, and a softmax whose result is multiplied."""
    found = []
    for node in calls:
        name = callee(node)
        fused = "dot_product" in name or name in ("attention", "paged_attention", "flex_attention")
        if fused or ("softmax" in name and _reaches(node, lambda n: callee(n) in _BATCHED)):
            found.append([node])
    return found


def _moe_blocks(calls: Sequence[fx.Node]) -> dict[str, list[fx.Node]]:
    """Nodes traced in experts (``...Experts``), by the module that contains them; without attention over experts."""
    blocks: dict[str, list[fx.Node]] = {}
    for node in calls:
        stack = scopes(node)
        at = next((i for i, scope in enumerate(stack) if _EXPERTS.search(scope.kind)), 0)
        if at and not any(ATTENTION_MODULE.search(scope.kind) for scope in stack[at - 1 :]):
            blocks.setdefault(stack[at - 1].path, []).append(node)
    return blocks


def _within(node: fx.Node, kinds: re.Pattern[str]) -> bool:
    """True if one of the modules below the decoder layer is of such a class."""
    return any(kinds.search(scope.kind) for scope in scopes(node) if not _CONTAINERS.search(scope.kind))


def _gated_products(calls: Sequence[fx.Node]) -> list[fx.Node]:
    """Products of two projections, one of them through a nonlinearity: the core of every gated MLP.

    The two have the same shape, so a gate with one number per token does not count.
    """
    sources: dict[fx.Node, frozenset[fx.Node]] = {}
    bent: set[fx.Node] = set()
    found = []
    for node in calls:
        name = callee(node).partition(".")[0]
        inputs = [n for n in node.all_input_nodes if n in sources]
        if name in GEMMS:
            sources[node] = frozenset([node])
            continue
        joined = frozenset().union(*(sources[n] for n in inputs))
        if not inputs or _stops(name):
            continue
        sources[node] = frozenset([node]) if name in _SLICES else joined
        if name in _BENDING or any(n in bent for n in inputs):
            bent.add(node)
        if name == "mul" and len(inputs) == 2 and _is_gated(inputs, sources, bent):
            found.append(node)
            sources.pop(node)
    return found


def _is_gated(inputs: Sequence[fx.Node], sources: dict[fx.Node, frozenset[fx.Node]], bent: set[fx.Node]) -> bool:
    left, right = inputs
    same_shape = str(shape(left)) == str(shape(right))
    return same_shape and not sources[left] & sources[right] and (left in bent) != (right in bent)


def _stops(name: str) -> bool:
    """True if an operator's result no longer derives elementwise from a projection."""
    return (
        "softmax" in name
        or "attention" in name
        or "norm" in name
        or name in ("topk", "index", "rsqrt", "mean", "sum", "convolution", "conv1d")
    )


def _plain_activations(calls: Sequence[fx.Node], gated: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Activations outside gated products: calls of activation modules, and functions between two products."""

    def activation(node: fx.Node) -> str | None:
        stack = scopes(node)
        if not stack or _within(node, _MIXER):
            return None
        if ACTIVATION_MODULE.search(stack[-1].kind):
            return stack[-1].path
        return node.name if callee(node).partition(".")[0] in ACTIVATIONS else None

    products = set(gated)
    return [
        group
        for group in _regions(calls, activation)
        if not any(_reaches(node, products.__contains__, steps=4) for node in group)
    ]


def _regions(calls: Sequence[fx.Node], key: Callable[[fx.Node], object]) -> list[list[fx.Node]]:
    """Groups of connected nodes with the same key, in graph order; nodes with key None are left out."""
    keys = {n: k for n in calls if (k := key(n)) is not None}
    root: dict[fx.Node, fx.Node] = {n: n for n in keys}

    def find(n: fx.Node) -> fx.Node:
        while root[n] is not n:
            root[n] = root[root[n]]
            n = root[n]
        return n

    for node, k in keys.items():
        for other in node.all_input_nodes:
            if keys.get(other) == k:
                root[find(node)] = find(other)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in keys:
        groups.setdefault(find(node), []).append(node)
    return list(groups.values())


def _reaches(node: fx.Node, wanted: Callable[[fx.Node], bool], steps: int = 8) -> bool:
    """True if a product follows within a few nodes that only view, cast, mask or scale."""
    level = {node}
    for _ in range(steps):
        level = {user for n in level for user in n.users}
        if any(wanted(n) for n in level):
            return True
        level = {n for n in level if callee(n) not in GEMMS and callee(n) != "topk"}
    return False
