"""Attention of decode steps for Ascend by a kernel that takes one query per sequence, where others run the formula.

Matches:
    the formula over gathered blocks of int8 caches, or on the inference chip of any, that
    ``lower_npu_paged_attention`` noted as readable, in a graph whose steps have one token of each sequence and no
    more
Becomes:
    npu_fused_infer_attention_score(query, key_cache, value_cache, key_antiquant_scale=key_scale, ...)
        query [S, 1, H·D], caches [blocks, block size, Hk·D], scales [blocks, Hk, block size], antiquant modes 5: a
        float32 scale per token and head, in the blocks of the keys and values
On the inference chip, whose operator for prompts takes no caches in blocks, likewise of caches in float16:
    npu_incre_flash_attention(query, key_cache, value_cache, actual_seq_lengths=kv_lens, ...)      # in GE graphs
With a sliding window, for which the kernel knows nothing but a mask where there is one query per sequence:
    the same over the blocks that the window touches, whose tokens in front of it a mask hides (``window_blocks``)
Why it is faster:
    the formula copies every block of every sequence, widened to the model's dtype; the kernel reads the bytes where
    they lie, and of a sequence that is longer than a window no more blocks than the window touches.

The kernels take such caches for one query per sequence alone, so prompts keep the formula: a program has the graph
with it and, for decode steps, a copy with the kernel (``..decode_graph``). Both read and write the same caches.
"""

from __future__ import annotations

import operator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from .....runtime.npu_target import NpuTarget
from .....runtime.ops.npu.limits import violations
from .....runtime.window_blocks import WINDOW_LENS, window_blocks
from ....graph.attention_node import PagedAttentionCall
from ....graph.custom_notes import custom_note, put_custom_note
from ....graph.fx_nodes import cache_index, shape, step_field, value
from ....graph.traced import TracedGraph
from ..call import Call
from ..site import inline
from .attention_routes import Heads

_npu, _aten = torch.ops.npu, torch.ops.aten
_KERNEL = _npu.npu_fused_infer_attention_score.default
_INCREMENTAL = _npu.npu_incre_flash_attention.default
SCALE_PER_TOKEN_AND_HEAD = 5
"""The kernel's mode for scales ``[blocks, heads, block size]``."""
ANNOTATION = "pagoda_decode_attention"
"""Key, in ``node.meta["custom"]``, of what the kernel computes in place of a node."""


@dataclass(frozen=True)
class DecodeAttention:
    """What the kernel has to know of one attention beside its tensors.

    Attributes:
        heads: of queries.
        kv_heads: of keys and values.
        scale: of the scores.
        window: tokens that a query looks back over, its own included; 0: all.
        int8: the caches are rounded.
    """

    heads: int
    kv_heads: int
    scale: float
    window: int
    int8: bool = True

    @staticmethod
    def of(traced: TracedGraph, call: PagedAttentionCall, heads: Heads) -> DecodeAttention:
        """Without the window that no sequence is longer than."""
        longest = traced.max_positions
        window = call.sliding_window if longest is None or longest > call.sliding_window else 0
        return DecodeAttention(heads.heads, heads.kv_heads, call.scale, window, call.key_scale is not None)


@dataclass(frozen=True)
class _Keys:
    """Which keys each query looks at, as nodes or as what these yield.

    Attributes:
        table: ``[S, B]``, their blocks.
        lens: the list of how many tokens of these blocks there are.
        mask: ``[S, 1, 1, B * block size]``, true for tokens among these that the query does not see; None: it sees
            all.
    """

    table: Any
    lens: Any
    mask: Any = None


def why_not_decoded(traced: TracedGraph, call: PagedAttentionCall, heads: Heads) -> str:
    """The reason why no kernel can compute an attention in decode steps alone; "" where one can.

    Args:
        traced: the graph that the call is in, with an NPU target.
        call: of ``pagoda::paged_attention``.
        heads: of it.
    """
    if call.sinks is not None:
        return "sinks are for packed layouts, which take no int8 caches"
    if call.softcap or call.chunk or call.alibi_slopes is not None:
        return "it knows no soft cap, no ALiBi and no chunks"
    assert traced.npu is not None
    target, table = traced.npu, value(call.block_table)
    sequences, like, blocks = table.shape[0], value(call.query), value(call.key_cache).shape[0]
    with traced.fake_mode:
        keys, plan = _Keys(table, [1]), DecodeAttention.of(traced, call, heads)
        if plan.window:
            part, mask = window_blocks(table, value(call.seq_lens), plan.window, target.block_size)
            keys = _Keys(part, [1], mask)
        query = like.new_empty(sequences, 1, heads.heads * heads.key_dim)
        key, val = (
            like.new_empty(blocks, target.block_size, heads.kv_heads * dim, dtype=torch.int8 if plan.int8 else None)
            for dim in (heads.key_dim, heads.value_dim)
        )
        scales = like.new_empty(blocks, heads.kv_heads, target.block_size, dtype=torch.float32)
    kernel, kwargs = _arguments(plan, target, scales, scales, keys)
    return "; ".join(violations(Call.make(kernel, target, query, key, val, **kwargs)))


def note_decoded(traced: TracedGraph, rows: fx.Node, call: PagedAttentionCall, heads: Heads) -> None:
    """Note that the kernel can compute ``rows``, ``[T, H, Dv]`` of the formula, in decode steps.

    The graph gets the inputs that the kernel reads, and that tell such steps from others.
    """
    plan = DecodeAttention.of(traced, call, heads)
    traced.step_input("query_lens")
    _lens(traced, plan.window)
    put_custom_note(rows, ANNOTATION, asdict(plan))


def decode_attention(traced: TracedGraph) -> int:
    """Put the kernel where that was noted, in a graph for steps of one token per sequence; how often.

    Raises:
        ValueError: a noted formula is not as it was left.
    """
    sites = [(node, plan) for node in traced.graph.nodes if (plan := _noted(node)) is not None]
    if not sites:
        return 0
    with traced.before(sites[0][0], like=traced.placeholder(traced.input_ids)):
        keys = {window: _keys(traced, window) for window in dict.fromkeys(plan.window for _, plan in sites)}
    for rows, plan in sites:
        _decode(traced, rows, plan, keys[plan.window])
    return len(sites)


def _noted(node: fx.Node) -> DecodeAttention | None:
    found = custom_note(node, ANNOTATION)
    return None if found is None else DecodeAttention(**found)


def _keys(traced: TracedGraph, window: int) -> _Keys:
    """What layers with such a window look at."""
    assert traced.npu is not None
    table = _one_row_for_each_token(traced, "block_table")
    if not window:
        return _Keys(table, _lens(traced, window))
    seq_lens = _one_row_for_each_token(traced, "seq_lens")
    part, mask = inline(traced, window_blocks, table, seq_lens, window, traced.npu.block_size)
    return _Keys(part, _lens(traced, window), mask)


def _lens(traced: TracedGraph, window: int) -> fx.Node:
    """The list of how many tokens there are of the blocks that a sequence's last query looks at."""
    assert traced.npu is not None
    return traced.step_input(f"{WINDOW_LENS}_{traced.npu.block_size}" if window else "kv_lens", window)


def _one_row_for_each_token(traced: TracedGraph, field: str) -> fx.Node:
    """A field of the step, as many rows as the step has tokens: in GE graphs no sequence is without one."""
    rows = traced.step_input(field)
    if traced.npu is not None and traced.npu.graph_mode == "ge":
        return rows
    tokens = traced.call(_aten.sym_size.int, traced.placeholder(traced.input_ids), 1)
    return traced.call(_aten.slice.Tensor, rows, 0, 0, tokens)


def _decode(traced: TracedGraph, rows: fx.Node, plan: DecodeAttention, keys: _Keys) -> None:
    """Put the kernel in the place of the formula that ends in ``rows``."""
    assert traced.npu is not None
    query, caches = _inputs_of(rows, plan)
    with traced.before(rows):
        blocks = []
        for name in ("key_cache", "value_cache"):
            _, size, heads, dim = shape(caches[name])
            blocks.append(traced.call(_aten.reshape.default, caches[name], [-1, int(size), int(heads) * int(dim)]))
        width = plan.heads * int(shape(query)[2])
        queries = traced.call(_aten.reshape.default, query, [-1, 1, width])
        kernel, kwargs = _arguments(plan, traced.npu, caches.get("key_scale"), caches.get("value_scale"), keys)
        attended = traced.call(kernel, queries, *blocks, **kwargs)
        if kernel is _KERNEL:
            attended = traced.call(operator.getitem, attended, 0)
        new = traced.call(_aten.reshape.default, attended, [-1, plan.heads, int(shape(rows)[2])])
    traced.substitute(rows, new)


def _arguments(
    plan: DecodeAttention, target: NpuTarget, key_scale: Any, value_scale: Any, keys: _Keys
) -> tuple[torch._ops.OpOverload, dict[str, Any]]:
    """The kernel, and its arguments but query, key and value."""
    common = {
        "atten_mask": keys.mask,
        "block_table": keys.table,
        "block_size": target.block_size,
        "num_heads": plan.heads,
        "num_key_value_heads": plan.kv_heads,
        "input_layout": "BSH",
        "inner_precise": 0,
    }
    if not plan.int8:
        return _INCREMENTAL, {**common, "actual_seq_lengths": keys.lens, "scale_value": plan.scale}
    return _KERNEL, {
        **common,
        "actual_seq_lengths_kv": keys.lens,
        "key_antiquant_scale": key_scale,
        "value_antiquant_scale": value_scale,
        "key_antiquant_mode": SCALE_PER_TOKEN_AND_HEAD,
        "value_antiquant_mode": SCALE_PER_TOKEN_AND_HEAD,
        "scale": plan.scale,
    }


def _inputs_of(rows: fx.Node, plan: DecodeAttention) -> tuple[fx.Node, dict[str, fx.Node]]:
    """What the formula that ends in ``rows`` reads: its queries ``[T, H, D]``, and keys, values and scales by name.

    Passes behind the lowering may have put other nodes in the place of the queries, so they are looked up: the
    formula gathers them, and nothing else, by ``padded_tokens``.

    Raises:
        ValueError: not one of each.
    """
    queries: set[fx.Node] = set()
    caches: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    pending = [rows]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if cache_index(node) is not None:
            caches.add(node)
        elif _gathers_queries(node):
            queries.add(node.args[0])  # type: ignore[arg-type]
        else:
            pending.extend(node.all_input_nodes)
    named = {cache.name.removesuffix(f"_{cache_index(cache)}"): cache for cache in caches}
    wanted = {"key_cache", "value_cache", *(("key_scale", "value_scale") if plan.int8 else ())}
    if len(queries) != 1 or len(caches) != len(wanted) or set(named) != wanted:
        raise ValueError(f"{rows.name} reads {sorted(map(str, queries | caches))}: not one attention over its caches")
    return queries.pop(), named


def _gathers_queries(node: fx.Node) -> bool:
    places = node.args[1] if node.target is _aten.index.Tensor else None
    return isinstance(places, list | tuple) and any(
        isinstance(place, fx.Node) and step_field(place) == "padded_tokens" for place in places
    )
