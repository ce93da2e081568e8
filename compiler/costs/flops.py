"""Floating-point operations of a graph's matrix products and attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...passes import TracedGraph
from ...passes.graph.fx_nodes import shape, value
from ...passes.graph.provenance import launches_work, operator_name
from .traffic import Sizes, Step, is_weight, rows_of_experts

_SPARSE_BAND = 4
_GATED = "npu_grouped_matmul_swiglu_quant_v2"
# They read a matrix and are not products of matrices.
_NO_PRODUCTS = frozenset({"npu_rotary_mul"})
_WINDOW, _CHUNK, _SELECTED = 12, 13, 17  # arguments of pagoda::paged_attention


def flops(traced: TracedGraph, nodes: Iterable[fx.Node], step: Step) -> int:
    """Multiplications and additions, each for itself, of the operators among ``nodes`` in one step.

    Counted are products of matrices, recurrences of matrices, and attention, whose kernels skip what a causal mask or
    a window hides. Norms, rotations, activations and other work that is linear in the activations is not: memory
    bounds it.
    """
    sizes = Sizes(traced, step)
    total = 0
    for node in nodes:
        namespace, _, name = operator_name(node).rpartition(".")
        if not launches_work(node) or name in _NO_PRODUCTS:
            continue
        if name in _FORMULAS:
            total += _FORMULAS[name](node, step, sizes)
        elif namespace == "npu":
            total += _every_row_by_every_matrix(traced, node, step, sizes)
    return total


def is_int8_product(node: fx.Node) -> bool:
    """True for a product for an NPU whose operands are both int8."""
    name = operator_name(node).rpartition(".")[2]
    if name not in ("npu_quant_matmul", "npu_grouped_matmul", _GATED):
        return False
    left = value(pytree.tree_leaves(node.args[0])[0])
    return isinstance(left, torch.Tensor) and left.dtype is torch.int8


def keys_seen(step: Step, window: int = 0, chunk: int = 0) -> int:
    """The number of keys that the queries of a step look at, summed over the queries.

    Args:
        step: the step.
        window: of a sliding window, 0 for none.
        chunk: of chunked attention, 0 for none.
    """
    total = 0
    for position in range(step.context - step.tokens, step.context):
        seen = position + 1
        if chunk:
            seen = position % chunk + 1
        total += min(seen, window) if window else seen
    return total


def _product(place: int) -> Callable[[fx.Node, Step, Sizes], int]:
    """Of an operator whose argument at ``place`` is the left matrix, or a list of them."""

    def formula(node: fx.Node, step: Step, sizes: Sizes) -> int:
        left = pytree.tree_leaves(node.args[place])[0]
        result = next(v for v in pytree.tree_leaves(value(node)) if isinstance(v, torch.Tensor))
        return 2 * math.prod(sizes.shape(result)) * sizes.shape(left)[-1]

    return formula


def _grouped_product(node: fx.Node, step: Step, sizes: Sizes) -> int:
    """Of rows by the matrices of their experts."""
    all_rows = sizes.shape(pytree.tree_leaves(node.args[0])[0])[0]
    return _product(0)(node, step, sizes) // all_rows * rows_of_experts(node, sizes)


def _gated_product(node: fx.Node, step: Step, sizes: Sizes) -> int:
    """npu_grouped_matmul_swiglu_quant_v2, whose results are half as many as its product's."""
    return 2 * _grouped_product(node, step, sizes)


def _experts(node: fx.Node, step: Step, sizes: Sizes) -> int:
    """pagoda::moe(x [N, H], weights [N, K], ids, up [E, ...], down [E, ...], ...)."""
    ids, up, down = node.args[2:5]
    rows = math.prod(sizes.shape(ids))
    return 2 * rows * (math.prod(sizes.shape(up)[1:]) + math.prod(sizes.shape(down)[1:]))


def _every_row_by_every_matrix(traced: TracedGraph, node: fx.Node, step: Step, sizes: Sizes) -> int:
    """Of operators that join several projections, those of latent attention for instance."""
    matrices = [n for n in node.all_input_nodes if len(shape(n)) > 1 and is_weight(traced, n)]
    return 2 * step.tokens * sum(math.prod(sizes.shape(n)) for n in matrices)


def _paged(node: fx.Node, step: Step, sizes: Sizes) -> int:
    """pagoda::paged_attention(q [1, H, T, D], k, v [1, Hk, T, Dv], ...)."""
    _, heads, _, dim = sizes.shape(node.args[0])
    value_dim = sizes.shape(node.args[2])[-1]
    arguments: tuple[Any, ...] = node.args
    window = arguments[_WINDOW]
    if len(arguments) > _SELECTED and arguments[_SELECTED] is not None:  # no more keys than are named
        chosen = sizes.shape(arguments[_SELECTED])[-1]
        window = min(window, chosen) if window else chosen
    return 2 * heads * (dim + value_dim) * keys_seen(step, window, arguments[_CHUNK])


def _indexer(node: fx.Node, step: Step, sizes: Sizes) -> int:
    """lightning_indexer(q [1, T, H, D], ...): every query with every key that it sees."""
    _, _, heads, dim = sizes.shape(node.args[0])
    return 2 * heads * dim * keys_seen(step)


def _dense(node: fx.Node, step: Step, sizes: Sizes) -> int:
    """attention(q [B, H, T, D], k, v [B, Hk, S, Dv], ...) of one sequence."""
    _, heads, _, dim = sizes.shape(node.args[0])
    return 2 * heads * (dim + sizes.shape(node.args[2])[-1]) * keys_seen(step)


def _recurrence(node: fx.Node, step: Step, sizes: Sizes) -> int:
    """linear_recurrence(q [1, T, Hk, N], k, v [1, T, Hv, P], decay, beta, ...): S by the query, the value by the key,
    and in the delta rule S by the key."""
    products = 2 if node.args[4] is None else 3
    return 2 * products * math.prod(sizes.shape(node.args[2])) * sizes.shape(node.args[1])[-1]


def _fused(node: fx.Node, step: Step, sizes: Sizes) -> int:
    """npu_fused_infer_attention_score and its kin, in any layout."""
    given: Any = node.kwargs
    heads = given["num_query_heads"] if "num_query_heads" in given else given["num_heads"]
    kv_heads = given.get("num_key_value_heads") or heads
    layout = given["input_layout"]
    query, values = sizes.shape(node.args[0]), sizes.shape(node.args[2])
    dim = query[-1] // heads if layout.startswith("BSH") else query[-1]
    flat = (given.get("block_table") is not None and len(values) == 3) or layout.startswith("BSH")
    value_dim = values[-1] // kv_heads if flat else values[-1]
    rope = given.get("query_rope")
    if rope is not None:
        dim += sizes.shape(rope)[-1]
    window = given["pre_tokens"] + 1 if given.get("sparse_mode") == _SPARSE_BAND else 0
    if given.get("block_table") is not None:  # of the blocks that a window touches, or of all
        keys = sizes.shape(given["block_table"])[1] * given["block_size"]
        window = min(window or keys, keys)
    return 2 * heads * (dim + value_dim) * keys_seen(step, window)


def _fused_indexer(node: fx.Node, step: Step, sizes: Sizes) -> int:
    """npu_lightning_indexer(q [T, H, D], ...): every query with every key that it sees."""
    _, heads, dim = sizes.shape(node.args[0])
    return 2 * heads * dim * keys_seen(step)


def _fused_sparse(node: fx.Node, step: Step, sizes: Sizes) -> int:
    """npu_sparse_flash_attention(q [T, H, D], key, value, indices [T, 1, K], ..., query_rope=[T, H, R])."""
    _, heads, dim = sizes.shape(node.args[0])
    rope = sizes.shape(node.kwargs["query_rope"])[-1]
    return 2 * heads * (2 * dim + rope) * keys_seen(step, sizes.shape(node.args[3])[-1])


_FORMULAS: dict[str, Callable[[fx.Node, Step, Sizes], int]] = {
    **dict.fromkeys(("mm", "bmm", "linear", "matmul", "npu_linear", "npu_transpose_batchmatmul"), _product(0)),
    **dict.fromkeys(("packed_linear", "quantized_linear", "invariant_linear"), _product(0)),
    **dict.fromkeys(("npu_quant_matmul", "npu_weight_quant_batchmatmul"), _product(0)),
    **dict.fromkeys(("npu_grouped_matmul", "_grouped_mm"), _grouped_product),
    _GATED: _gated_product,
    **dict.fromkeys(("addmm", "baddbmm"), _product(1)),
    **dict.fromkeys(("moe", "quantized_moe"), _experts),
    "paged_attention": _paged,
    **dict.fromkeys(("lightning_indexer", "lightning_indexer_seq"), _indexer),
    "npu_lightning_indexer": _fused_indexer,
    "npu_sparse_flash_attention": _fused_sparse,
    **dict.fromkeys(("linear_recurrence", "linear_recurrence_seq"), _recurrence),
    **dict.fromkeys(("attention", "scaled_dot_product_attention"), _dense),
    **dict.fromkeys(
        (
            "npu_fused_infer_attention_score",
            "npu_fused_infer_attention_score_v2",
            "npu_prompt_flash_attention",
            "npu_incre_flash_attention",
        ),
        _fused,
    ),
}
