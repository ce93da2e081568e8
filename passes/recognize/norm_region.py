"""The surroundings of a norm's reciprocal root in an ATen graph: the input above it, scale and casts below it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from ..graph.evaluate import at_sizes
from ..graph.fx_nodes import callee, is_dynamic, is_tensor, shape, value
from ..graph.record import NoMatch
from ..graph.region import Region

HALF = (torch.bfloat16, torch.float16)
_SAMPLED_TOKENS = 64
_DIFFERING = 0.05


@dataclass(frozen=True)
class Root:
    """The root of a mean square, or what one is divided by it.

    Attributes:
        node: yields it.
        squares: the ``x`` of ``mean(x ** 2, -1) + eps``.
        eps: added to the mean.
        reciprocal: it is ``1 / sqrt``, not ``sqrt``.
    """

    node: fx.Node
    squares: fx.Node
    eps: float
    reciprocal: bool


@dataclass(frozen=True)
class Scaled:
    """A normalized value, scaled and cast.

    Attributes:
        output: the node that the norm ends with.
        weight: the scale ``[D]`` as the canonical operator takes it, or None.
        weight_offset: what is added to it.
        round_before_scale: half precision: the normalized value is rounded before it is scaled.
    """

    output: fx.Node
    weight: fx.Node | None
    weight_offset: float
    round_before_scale: bool


def cast_source(node: fx.Node) -> fx.Node:
    """The half precision tensor that ``node`` is a float32 copy of, or ``node`` itself."""
    if callee(node) == "_to_copy" and value(node).dtype == torch.float32:
        source = node.args[0]
        if isinstance(source, fx.Node) and value(source).dtype in HALF:
            return source
    return node


def root_of_mean_square(node: fx.Node) -> Root | None:
    """The root that ``node`` yields: ``sqrt(mean(x ** 2, -1) + eps)``, or one divided by that."""
    mean, reciprocal = _reciprocal_root(node), True
    if mean is None and callee(node) == "sqrt":
        mean, reciprocal = node.args[0], False
    with_eps = _plus_eps(mean)
    if with_eps is None:
        return None
    squares = _squared(mean_over_last(with_eps[0]))
    return None if squares is None else Root(node, squares, with_eps[1], reciprocal)


def mean_over_last(node: object) -> fx.Node | None:
    """The ``x`` of ``mean(x, -1, keepdim=True)``."""
    if not isinstance(node, fx.Node) or callee(node) != "mean.dim":
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dims = node.args[1]
    rank = len(shape(source))
    keep = len(node.args) > 2 and node.args[2] is True
    if keep and isinstance(dims, list | tuple) and len(dims) == 1 and dims[0] in (-1, rank - 1):
        return source
    return None


def product_with(node: fx.Node, root: Root) -> fx.Node | None:
    """The ``x`` of ``x * root`` (or ``x / root`` when the root is not reciprocal)."""
    if root.reciprocal and callee(node) == "mul.Tensor":
        other = node.args[1] if node.args[0] is root.node else node.args[0]
    elif not root.reciprocal and callee(node) == "div.Tensor" and node.args[1] is root.node:
        other = node.args[0]
    else:
        return None
    return other if isinstance(other, fx.Node) else None


def follow_scale(normalized: fx.Node, dtype: torch.dtype) -> Scaled:
    """Walk down from the normalized value: casts to ``dtype`` and one product with a ``[D]`` scale, in any order.

    Args:
        normalized: ``x / rms(x)``.
        dtype: of the norm's input, which its output shall have.

    Raises:
        NoMatch: the walk ends in another dtype.
    """
    size = shape(normalized)[-1]
    node, weight, rounded_first = normalized, None, False
    scaled = False
    while True:
        follower = _only_user(node)
        if follower is None:
            break
        if callee(follower) == "_to_copy" and value(follower).dtype == dtype and value(node).dtype != dtype:
            rounded_first = rounded_first or not scaled
            node = follower
        elif callee(follower) == "mul.Tensor" and not scaled:
            other = follower.args[1] if follower.args[0] is node else follower.args[0]
            if not is_scale(other, size) or value(follower).dtype != value(node).dtype:
                break
            assert isinstance(other, fx.Node)
            weight, scaled, node = other, True, follower
        else:
            break
    if value(node).dtype != dtype:
        raise NoMatch(f"it takes {dtype} and returns {value(node).dtype}")
    half = dtype in HALF
    source, offset = (None, 0.0) if weight is None else _stored_scale(weight, half and not rounded_first)
    return Scaled(node, source, offset, half and rounded_first and scaled)


def check_rounding(entry: fx.Node, found: Scaled, norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Compare a norm in half precision with its replacement on random rows.

    Where one value is rounded elsewhere, a quarter of the results differ by their last bit; a root that is computed
    otherwise moves one of some hundred.

    Args:
        entry: the norm's input.
        found: what follows it.
        norm: the replacement, as a function of the input and the scale.

    Raises:
        NoMatch: they round differently.
    """
    if found.weight is None or value(entry).dtype not in HALF:
        return
    why = difference(Region([entry, found.weight], [found.output]), norm)
    if why:
        raise NoMatch(f"it rounds elsewhere than pagoda::rms_norm: {why}")


def difference(region: Region, norm: Callable[..., torch.Tensor]) -> str:
    """Difference between a region of one output and what is to replace it, on random numbers.

    In half precision a value that is rounded elsewhere counts as one, in float32 only what rounding does not explain.

    Args:
        region: yields float32 or half precision.
        norm: the replacement, as a function of the region's inputs.

    Returns:
        One clause for a person, "" where the two agree.
    """
    sizes = {symbol: _SAMPLED_TOKENS for symbol in region.symbols}
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(at_sizes(shape(node), sizes), generator=generator).to(value(node).dtype) for node in region.inputs
    ]
    (expected,) = region.run(sizes, given)
    found = norm(*given).reshape(expected.shape)
    if expected.dtype not in HALF:
        return "" if torch.allclose(found, expected, rtol=1e-4, atol=1e-5) else "its results differ"
    differing = float((found != expected).float().mean())
    return f"{differing:.0%} of its results differ" if differing > _DIFFERING else ""


def _reciprocal_root(node: fx.Node) -> fx.Node | None:
    """The ``v`` of a node that computes ``1 / sqrt(v)``."""
    name = callee(node)
    if name == "rsqrt" or (name == "pow.Tensor_Scalar" and node.args[1] == -0.5):
        found = node.args[0]
    elif name == "reciprocal" and callee(node.args[0]) == "sqrt":
        found = node.args[0].args[0]  # type: ignore[union-attr]
    else:
        return None
    return found if isinstance(found, fx.Node) else None


def _squared(node: object) -> fx.Node | None:
    """The ``x`` of ``x * x`` or ``x ** 2``."""
    if not isinstance(node, fx.Node):
        return None
    name = callee(node)
    square = name == "square" or (name == "pow.Tensor_Scalar" and node.args[1] == 2)
    if square or (name == "mul.Tensor" and node.args[0] is node.args[1]):
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    return None


def _plus_eps(node: object) -> tuple[fx.Node, float] | None:
    """``v`` and ``eps`` of ``v + eps``."""
    if not isinstance(node, fx.Node) or callee(node) not in ("add.Tensor", "add.Scalar") or node.kwargs:
        return None
    v, eps = node.args[:2]
    if not isinstance(v, fx.Node):
        v, eps = eps, v
    if isinstance(v, fx.Node) and isinstance(eps, int | float) and not isinstance(eps, bool):
        return v, float(eps)
    return None


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def is_scale(node: object, size: object) -> bool:
    """Tell whether ``node`` is a ``[D]`` tensor that does not vary with the tokens."""
    if not isinstance(node, fx.Node) or not is_tensor(node):
        return False
    sizes = shape(node)
    if any(is_dynamic(s) for s in sizes) or not sizes or str(sizes[-1]) != str(size):
        return False
    return len(sizes) == 1 and not _reads_inputs(node)


def _reads_inputs(node: fx.Node) -> bool:
    """Tell whether something of a dynamic size went into ``node``: a value per token that was summed up, say."""
    pending, seen = [node], set()
    while pending:
        n = pending.pop()
        if n in seen:
            continue
        seen.add(n)
        if any(is_dynamic(s) for s in shape(n)):
            return True
        pending += n.all_input_nodes
    return False


def _stored_scale(weight: fx.Node, in_float32: bool) -> tuple[fx.Node, float]:
    """The parameter behind a scale such as ``1 + weight.float()``, and the offset."""
    offset = 0.0
    node = weight
    added = _plus_eps(node)
    if added is not None:
        node, offset = added
    if in_float32 and callee(node) == "_to_copy":
        source = cast_source(node)
        if source is not node:
            return source, offset
    # An offset that was added in half precision and then cast is rounded: the sum itself is the scale.
    return (node, offset) if node.op == "placeholder" else (weight, 0.0)
