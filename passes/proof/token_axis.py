"""Proves that only paged attention lets one token of a flat step see another.

The step holds tokens of many sequences side by side. An operator that sums, scans, shifts or normalizes over
that axis would mix strangers, silently. Every node with a token axis is checked: operators known to work token by
token pass, known mixers are named, and what is unknown is refused rather than trusted.

Routing is the one permitted exception: a mixture of experts sorts and counts the experts' *indices* over all
tokens and permutes rows by them, which changes the order of the work but no token's result. What is made of the
choices of all tokens is followed (``router_choices``), and refused where it becomes more than an order or a size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...runtime.ops import OPERATORS
from ..graph.data_movement import CAST_CALLS, REARRANGING_CALLS
from ..graph.evaluate import is_size
from ..graph.fx_nodes import (
    METADATA_CALLS,
    argument,
    callee,
    is_tensor,
    module_path,
    mutated_arguments,
    shape,
    storage_key,
    value,
)
from ..graph.record import Rejection
from ..graph.token_dims import reads_tokens
from ..graph.traced import TracedGraph
from .dependence import Depends, dependences
from .router_choices import GROUPED_PRODUCTS, Joint, RouterChoices, is_where_true
from .step_place import is_every_row, place_dependent

_REDUCTIONS = frozenset(
    "sum mean max min amax amin argmax argmin prod var std norm logsumexp any all softmax log_softmax cumsum cumprod "
    "sort argsort topk flip roll median cummax cummin logcumsumexp unique unique_consecutive diff vector_norm "
    "count_nonzero aminmax kthvalue mode quantile std_mean var_mean nansum nanmean "
    "normalize cosine_similarity glu linalg_vector_norm".split()
)
_FLAT_REDUCTIONS = frozenset("histc bincount nonzero masked_select multinomial".split())
_CONTRACTIONS = frozenset("matmul bmm mm baddbmm addmm __matmul__ mv dot".split())
_SEQUENCE_OPERATORS = frozenset(
    "conv1d conv2d conv3d conv_transpose1d unfold scan associative_scan fft rfft irfft ifft stft "
    "interpolate avg_pool1d max_pool1d adaptive_avg_pool1d lstm gru rnn_tanh cumulative_trapezoid triu tril vmap "
    "tril_ triu_ outer_scan trapz scaled_dot_product_attention".split()
)
_POINTWISE = CAST_CALLS | frozenset(
    "add sub mul div multiply divide subtract negative absolute greater less greater_equal less_equal "
    "not_equal truediv floordiv true_divide floor_divide mod remainder fmod pow neg abs exp exp2 log log2 "
    "log1p expm1 sqrt rsqrt reciprocal sin cos tan tanh sigmoid relu relu6 silu gelu mish softplus elu celu "
    "selu leaky_relu hardtanh hardswish hardsigmoid logsigmoid logit erf erfc sign round floor ceil trunc "
    "frac square clamp clamp_min clamp_max clip maximum minimum where masked_fill eq ne lt le gt ge and_ or_ "
    "xor logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not bitwise_xor invert isnan isinf "
    "isfinite nan_to_num lerp addcmul addcdiv atan2 atan sinh cosh softsign threshold prelu glu_pointwise "
    "rsub dropout dropout_ feature_dropout alpha_dropout double long int "
    "bool clone contiguous detach copy_ fill_ zero_ add_ sub_ mul_ div_ pow_ clamp_ masked_fill_ relu_ silu_ "
    "tanh_ sigmoid_ exp_ neg_ sqrt_ iadd isub imul itruediv ifloordiv ior iand pos complex view_as_complex "
    "view_as_real polar real imag conj log_ abs_ hypot deg2rad nan_to_num_ requires_grad_ alias "
    "lift_fresh_copy heaviside xlogy logaddexp gelu_ cpu conj_physical __and__ __or__ __invert__ __rsub__ "
    "__radd__ __rmul__ __rtruediv__ __rpow__ log_sigmoid".split()
)
_SHAPES = REARRANGING_CALLS | frozenset(
    "expand_as view_as reshape_as stack tile numpy_T getattr T H mH broadcast_tensors atleast_2d ravel meshgrid "
    "swapaxes_ unsqueeze_ squeeze_ transpose_ as_tensor".split()
)
_FACTORIES = frozenset(
    "zeros ones empty full arange tensor new_zeros new_ones new_empty new_full zeros_like ones_like "
    "empty_like full_like eye linspace scalar_tensor new_tensor".split()
)
_ROW_OPERATORS = frozenset("linear embedding layer_norm rms_norm one_hot".split())
_INDEXING = frozenset(
    "index_select gather scatter scatter_ scatter_add scatter_add_ index_add index_add_ index_copy "
    "index_copy_ index_put index_put_ take_along_dim masked_scatter scatter_reduce scatter_reduce_ "
    "masked_scatter_ index".split()
)
# Cuts along one dim: where the dim stands among the arguments, and its default.
_CUTS = {
    "chunk": (2, 0),
    "unsafe_chunk": (2, 0),
    "split": (2, 0),
    "split_with_sizes": (2, 0),
    "tensor_split": (2, 0),
    "unbind": (1, 0),
    "narrow": (1, 0),
    "select": (1, 0),
}
# Run along one or more dims: where these stand among the arguments, and their default (None: all).
_ALONG = {
    "normalize": (2, 1),
    "cosine_similarity": (2, 1),
    "glu": (1, -1),
    "linalg_vector_norm": (2, None),
    "norm": (2, None),
    "vector_norm": (2, None),
    "roll": (2, None),
    "quantile": (2, None),
    "topk": (2, -1),
    "kthvalue": (2, -1),
    "diff": (2, -1),
    "sort": (1, -1),
    "argsort": (1, -1),
}
_ADDS_OR_WRITES_ROWS = frozenset(
    "scatter scatter_ scatter_add scatter_add_ index_add index_add_ index_copy index_copy_ index_put index_put_ "
    "masked_scatter masked_scatter_ scatter_reduce scatter_reduce_ setitem".split()
)


def mixers(traced: TracedGraph) -> list[Rejection]:
    """Every node of a flat graph that lets tokens see each other, or that cannot be shown not to."""
    check = _Check(traced)
    found = []
    for node in traced.graph.nodes:
        reason = check.reason(node)
        if reason:
            found.append(Rejection(node.name, reason, module_path(node)))
    return found


class _Check:
    def __init__(self, traced: TracedGraph) -> None:
        self.traced = traced
        self.symbol = traced.token_symbol
        self.depends = dependences(traced)
        self.places = place_dependent(traced, self.depends)
        self.choices = RouterChoices(traced, self.depends)
        self.written: dict[int, Depends] = {}
        for node in traced.graph.nodes:
            for target in mutated_arguments(node):
                if (key := storage_key(target)) is not None:
                    self.written[key] = max(self.written.get(key, Depends.CONSTANT), self.depends[node])

    def token_dims(self, node: Any) -> list[int]:
        """The dims along which the step's tokens stand, or those of one expert."""
        return [i for i, size in enumerate(shape(node)) if self._varies(size)]

    def _varies(self, size: Any) -> bool:
        return reads_tokens(self.traced, size) or _is_counted(size)

    def reason(self, node: fx.Node) -> str:
        """The reason why ``node`` mixes tokens, or ""."""
        if node.op in ("placeholder", "get_attr"):
            return ""
        if node in self.places:
            return self.places[node]
        name = callee(node)
        if (
            node.op == "output"
            or is_size(node)
            or name in METADATA_CALLS
            or name in _FACTORIES
            or name.startswith(("_assert", "_check"))
        ):
            return self.choices.follow(node)
        dims = {n: d for n in node.all_input_nodes if (d := self.token_dims(n))}
        if not dims and not self.token_dims(node):
            return self._scalar_reason(node, name) or self.choices.follow(node)
        reason = self._mixing(node, name, dims)
        if reason and max((self.depends[n] for n in dims), default=Depends.CONSTANT) is not Depends.ROUTING:
            return reason
        return self.choices.follow(node, over_tokens=bool(reason))

    def _mixing(self, node: fx.Node, name: str, dims: dict[fx.Node, list[int]]) -> str:
        """The reason why ``node`` mixes what stands along the tokens, routing or not, or ""."""
        if is_where_true(node):
            return "where finds rows among all tokens"
        # Dynamo's graph holds what a model calls, which may be all overloads.
        if own := OPERATORS.get(getattr(node.target, "default", node.target)):
            return self._own(name, own.facts.over, dims)
        if name in _POINTWISE:
            return self._size_operand(node, name)
        if name in _REDUCTIONS:
            return self._reduction(node, name, dims)
        if name in _FLAT_REDUCTIONS:
            return f"{name} runs over all tokens"
        if name in _CONTRACTIONS:
            return self._contraction(node, name)
        if name == "einsum":
            return self._einsum(node)
        if name in _SEQUENCE_OPERATORS:
            return f"{name} runs along the tokens"
        if name in _ADDS_OR_WRITES_ROWS and not self.token_dims(node.args[0]):
            return f"{name} combines several tokens in one row"
        if name == "getitem":
            return self._getitem(node)
        if name == "setitem":
            return self._setitem(node)
        if name in ("cat", "concat", "concatenate", "hstack"):
            return self._cat(node)
        if name == "pad":
            return self._pad(node)
        if name in _INDEXING:
            return self._indexing(node, name)
        if name in _CUTS:
            return self._cut(node, name)
        if name in ("view", "reshape", "unflatten"):
            return self._regrouped(node, name)
        if name in _SHAPES or name in _ROW_OPERATORS or name in GROUPED_PRODUCTS:
            return self._last_dim_operator(node, name)
        return f"{name} is not known to work token by token"

    def _own(self, name: str, over: str, dims: dict[fx.Node, list[int]]) -> str:
        """The reason why an operator of ours mixes tokens, or ""."""
        if over == "all":
            return f"{name} is not known to work token by token"
        if over == "rows" and any(len(shape(n)) - 1 in places for n, places in dims.items()):
            return f"{name} runs over the tokens"
        return ""

    def _scalar_reason(self, node: fx.Node, name: str) -> str:
        reads = any(self._varies(value(n)) for n in node.all_input_nodes if not is_tensor(n))
        if reads and name in _POINTWISE:
            return f"{name} computes with the number of tokens in the step"
        return ""

    def _size_operand(self, node: fx.Node, name: str) -> str:
        if name in ("to", "type", "expand"):
            return ""
        if any(self._varies(value(n)) for n in node.all_input_nodes if not is_tensor(n)):
            return f"{name} computes with the number of tokens in the step"
        return ""

    def _reduction(self, node: fx.Node, name: str, dims: dict[fx.Node, list[int]]) -> str:
        source = node.args[0] if node.args else node.kwargs.get("input")
        if source not in dims:
            return ""
        if name in ("max", "min") and len(node.args) > 1 and isinstance(node.args[1], fx.Node):
            return ""  # elementwise maximum of two tensors
        position, default = _ALONG.get(name, (1, None))
        over = argument(node, position, "dim", node.kwargs.get("dims", node.kwargs.get("axis", default)))
        rank = len(shape(source))
        if over is None:
            return f"{name} runs over all tokens"
        overs = [over] if isinstance(over, int) else list(over)
        if any(not isinstance(d, int) or d % rank in dims[source] for d in overs):
            return f"{name} runs over the tokens"
        return ""

    def _contraction(self, node: fx.Node, name: str) -> str:
        start = 1 if name in ("baddbmm", "addmm") else 0
        left, right = (argument(node, start + i, n) for i, n in enumerate(("batch1", "batch2")))
        if right is None:
            left, right = node.args[:2]
        left_rank, right_rank = len(shape(left)), len(shape(right))
        if left_rank and left_rank - 1 in self.token_dims(left):
            return f"{name} sums over the tokens"
        if right_rank and max(right_rank - 2, 0) in self.token_dims(right):
            return f"{name} sums over the tokens"
        return ""

    def _einsum(self, node: fx.Node) -> str:
        equation = node.args[0]
        if not isinstance(equation, str) or "->" not in equation or "." in equation:
            return "einsum without an explicit result"
        inputs, result = equation.replace(" ", "").split("->")
        operands = node.args[1:]
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = tuple(operands[0])
        for letters, operand in zip(inputs.split(","), operands, strict=False):
            for i in self.token_dims(operand):
                if letters[i] not in result:
                    return f"einsum {equation} sums over the tokens"
        return ""

    def _getitem(self, node: fx.Node) -> str:
        source, index = node.args
        if not is_tensor(source):
            return ""
        dims = set(self.token_dims(source))
        items = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in [i for i in items if not isinstance(i, fx.Node)]:
            at = next(i for i, x in enumerate(items) if x is Ellipsis)
            consumed = sum(1 for x in items if x is not None and x is not Ellipsis)
            items[at : at + 1] = [slice(None)] * (len(shape(source)) - consumed)
        dim = 0
        for item in items:
            if item is None:
                continue
            if dim in dims and not self._whole(item, shape(source)[dim]):
                if isinstance(item, fx.Node) and is_tensor(item):
                    if self._permutes_rows(item):
                        dim += 1
                        continue
                    return "rows of the step are picked by an index computed from positions or tokens"
                return "a slice of the step's tokens is taken, which shifts them"
            dim += 1
        return ""

    def _permutes_rows(self, index: fx.Node) -> bool:
        """A router's order of the rows, the rows that the step asks for, or a constant that takes all alike."""
        if index.op == "placeholder" and index.name in self.traced.step_inputs:
            return True
        key = storage_key(index)
        written = Depends.CONSTANT if key is None else self.written.get(key, Depends.CONSTANT)
        depends = max(self.depends[index], written)
        if depends is Depends.CONSTANT:
            return is_every_row(self.traced, index)
        made = self.choices.made(index)
        per_token = value(index).dtype is torch.bool and made is None
        return depends is Depends.ROUTING and (made is Joint.ORDER or per_token)

    def _whole(self, item: Any, size: Any) -> bool:
        if not isinstance(item, slice):
            return False
        start = item.start.meta["example_value"] if isinstance(item.start, fx.Node) else item.start
        stop = item.stop.meta["example_value"] if isinstance(item.stop, fx.Node) else item.stop
        if start is not None and str(start) not in ("0", f"-{size}", f"-({size})"):
            return False
        whole_stop = stop is None or str(stop) == str(size) or (isinstance(stop, int) and stop >= 1 << 40)
        return whole_stop and item.step in (None, 1)

    def _setitem(self, node: fx.Node) -> str:
        target, index = node.args[0], node.args[1]
        dims = set(self.token_dims(target))
        items = list(index) if isinstance(index, tuple) else [index]
        leading = Ellipsis in [i for i in items if not isinstance(i, fx.Node)]
        for dim, item in enumerate(items):
            if isinstance(item, fx.Node) and is_tensor(item):
                if self.depends[item] is Depends.POSITION:
                    return "rows of the step are written at an index computed from positions"
            elif dim in dims and not leading and not self._whole(item, shape(target)[dim]):
                return "a part of the step's tokens is overwritten"
        return ""

    def _cat(self, node: fx.Node) -> str:
        parts = argument(node, 0, "tensors")
        dim = argument(node, 1, "dim", node.kwargs.get("axis", 0))
        if callee(node) == "hstack":
            dim = min(1, len(shape(parts[0])) - 1)
        sizes = [shape(part)[dim % max(len(shape(part)), 1)] for part in parts if shape(part)]
        if len(parts) < 2 or all(map(_is_counted, sizes)):  # the experts' rows together again
            return ""
        return "tensors are concatenated along the tokens" if any(map(self._varies, sizes)) else ""

    def _pad(self, node: fx.Node) -> str:
        source, pads = node.args[0], argument(node, 1, "pad")
        rank = len(shape(source))
        for i in range(0, len(pads), 2):
            if rank - 1 - i // 2 in self.token_dims(source) and (pads[i] != 0 or pads[i + 1] != 0):
                return "pad shifts or lengthens the tokens"
        return ""

    def _indexing(self, node: fx.Node, name: str) -> str:
        dim = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], int) else node.kwargs.get("dim")
        source = node.args[0]
        dims = self.token_dims(source)
        if isinstance(dim, int) and dims and dim % len(shape(source)) not in dims:
            return ""
        indices = [n for n in node.all_input_nodes if is_tensor(n) and value(n).dtype in (torch.int64, torch.int32)]
        if not dims or all(self._permutes_rows(i) for i in indices if i is not source):
            return ""
        return f"{name} moves rows by an index computed from positions or tokens"

    def _cut(self, node: fx.Node, name: str) -> str:
        """The reason why cutting along a dim (chunk, split, narrow, select, unbind, repeat) moves tokens, or ""."""
        position, default = _CUTS[name]
        source = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("tensor"))
        dim = argument(node, position, "dim", default)
        if not isinstance(dim, int):
            return f"{name} along a computed dim"
        sizes = argument(node, 1, "split_size_or_sections", argument(node, 1, "split_sizes"))
        if name.startswith("split") and isinstance(sizes, (list, tuple)) and all(map(_is_counted, sizes)):
            return ""  # so many rows per expert
        if dim % max(len(shape(source)), 1) in self.token_dims(source):
            return f"{name} splits the step's tokens"
        return ""

    def _regrouped(self, node: fx.Node, name: str) -> str:
        """The reason why a new shape puts elements of several tokens into one row, or ""."""
        source = node.args[0]
        units = [self.symbol, *(size.node.expr for size in shape(source) if _is_counted(size))]
        for size in shape(node):
            if self._varies(size) and not any((size.node.expr / unit).is_integer for unit in units):
                return f"{name} puts several tokens into one row"
        before, after = (self._elements_before_tokens(n) for n in (source, node))
        if before is not None and after is not None and before != after:
            return f"{name} reads the elements of one token as those of several"
        return ""

    def _elements_before_tokens(self, node: Any) -> Any:
        """Product of the sizes in front of the token dim; None unless there is one of exactly T."""
        dims = self.token_dims(node)
        sizes = shape(node)
        if len(dims) != 1 or sizes[dims[0]].node.expr != self.symbol:
            return None
        return math.prod(sizes[: dims[0]])

    def _last_dim_operator(self, node: fx.Node, name: str) -> str:
        if name not in ("layer_norm", "rms_norm", "linear"):
            return ""
        source = node.args[0] if node.args else node.kwargs.get("input")
        rank = len(shape(source))
        width = len(value(argument(node, 1, "normalized_shape", ()))) if name.endswith("_norm") else 1
        if any(d >= rank - width for d in self.token_dims(source)):
            return f"{name} runs over the tokens"
        return ""


def _is_counted(size: Any) -> bool:
    """Tell whether a size is a count of data, as a router's, rather than of tokens."""
    number = value(size)
    return isinstance(number, torch.SymInt) and bool(free_unbacked_symbols(number))
