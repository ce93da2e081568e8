"""Arguments of the operators that take many, by name: of kernels and references, and of nodes in graphs."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")
"""``torch.Tensor``, or ``torch.fx.Node`` in graphs."""


class AttentionArguments(NamedTuple, Generic[Value]):
    """The arguments of ``pagoda::attention``, in the order of its schema.

    Attributes:
        query: ``[B, H, Tq, D]`` fp32, bf16 or fp16 (fp64 runs the reference). Any strides, in all arguments.
        key: ``[B, Hk, Tk, D]`` with H a multiple of Hk; query head h reads KV head ``h // (H // Hk)``.
        value: ``[B, Hk, Tk, Dv]``.
        attn_mask: broadcastable to ``[B, H, Tq, Tk]``; bool (True: attend) or float (added). The lowest
            finite value of a float mask's dtype counts as -inf.
        sinks: ``[H]``, or None.
        alibi_slopes: ``[H]`` fp32, or None (Press et al. 2021).
        scale: factor of the raw scores.
        is_causal: j <= i, counted from the top left, as torch's ``scaled_dot_product_attention`` does.
        sliding_window: i - j < sliding_window; 0 turns it off.
        chunk: ``i // chunk == j // chunk``; 0 turns it off.
        softcap: in units of the scaled score; 0 turns it off.
        selected: ``[1, Tq, K]`` int32, positions of the keys that each query may attend, -1 for none; None: all. For
            a batch of one.
        relative_bias: ``[1, H, Tq, E]`` floating point; the score of query i and key j gets entry ``i - j`` of query
            i, where ``0 <= i - j < E``. None: nothing is added. For a batch of one.
    """

    query: Value
    key: Value
    value: Value
    attn_mask: Value | None
    sinks: Value | None
    alibi_slopes: Value | None
    scale: float
    is_causal: bool
    sliding_window: int
    chunk: int
    softcap: float
    selected: Value | None = None
    relative_bias: Value | None = None


class PagedAttentionArguments(NamedTuple, Generic[Value]):
    """The arguments of ``pagoda::paged_attention``, in the order of its schema.

    Attributes:
        query: ``[1, H, T, D]`` fp32, bf16 or fp16 (fp64 runs the reference); the tokens of all sequences,
            flat. Any strides, in all arguments.
        key: ``[1, Hk, T, D]``, H a multiple of Hk.
        value: ``[1, Hk, T, Dv]``.
        key_cache: ``[num_blocks, block_size, Hk, D]`` fp32, bf16, fp16, not necessarily query's, or int8; written.
        value_cache: ``[num_blocks, block_size, Hk, Dv]``; written.
        slot_mapping: ``[T]`` int64; token t goes to block ``slot // block_size``, offset
            ``slot % block_size``. -1: the token is padding and is not written.
        block_table: ``[S, W]`` int32; block ids of each sequence, in order.
        query_start_loc: ``[S + 1]`` int32; sequence s owns the tokens from ``query_start_loc[s]`` up to
            ``query_start_loc[s + 1]``.
        seq_lens: ``[S]`` int32; context length of each sequence, this step's tokens included.
        sinks, alibi_slopes, scale, sliding_window, chunk, softcap: as in :class:`AttentionArguments`.
        key_scale, value_scale: of int8 caches, ``[num_blocks, block_size, Hk]`` float32; written. None for others.
        selected: ``[1, T, K]`` int32, positions in its sequence of the keys that each token may attend, -1 for none;
            None: all. Where no more than K tokens are in sight all of them are to be named.
        relative_bias: ``[1, H, T, E]`` floating point, added by distance as in :class:`AttentionArguments`; not
            together with ``selected``.
        batch_invariant: a token's result does not change by a bit with the other tokens of the step, the other
            sequences, the blocks' size or the number of threads: its keys are cut by their positions alone.
    """

    query: Value
    key: Value
    value: Value
    key_cache: Value
    value_cache: Value
    slot_mapping: Value
    block_table: Value
    query_start_loc: Value
    seq_lens: Value
    sinks: Value | None
    alibi_slopes: Value | None
    scale: float
    sliding_window: int
    chunk: int
    softcap: float
    key_scale: Value | None = None
    value_scale: Value | None = None
    selected: Value | None = None
    relative_bias: Value | None = None
    batch_invariant: bool = False


class MoeArguments(NamedTuple, Generic[Value]):
    """The arguments of ``pagoda::moe``, in the order of its schema.

    Attributes:
        input: ``[N, H]``, fp32, bf16 or fp16.
        topk_weights: ``[N, K]`` floating point.
        topk_ids: ``[N, K]`` int64 or int32, each in ``0 .. E - 1``, or -1 for an expert of another rank.
        up: ``[E, J, H]`` in the dtype of ``input``, or ``[E, H, J]`` if ``transposed``. ``J`` is ``2 I`` for gated
            experts, else ``I``.
        down: ``[E, O, I]``, or ``[E, I, O]`` if ``transposed``.
        up_bias: ``[E, J]``.
        down_bias: ``[E, O]``.
        activation: as for ``pagoda::gated_activation``, or ``pagoda::activation`` if ``layout`` is "plain".
        alpha: read by "clipped_swiglu" only.
        limit: if positive, the gate is cut above it and the up part on both sides, before the activation; not read
            if ``layout`` is "plain".
        layout: "halves": the first ``I`` rows of ``up`` make the gate; "interleaved": the even ones; "plain": there
            is not a gate.
        transposed: how ``up`` and ``down`` are stored.
        weight_input: the weight multiplies the expert's input, not its output.
        batch_invariant: a token's result does not change by a bit with the other tokens; on a CPU with kernels only.
    """

    input: Value
    topk_weights: Value
    topk_ids: Value
    up: Value
    down: Value
    up_bias: Value | None
    down_bias: Value | None
    activation: str
    alpha: float
    limit: float
    layout: str
    transposed: bool
    weight_input: bool
    batch_invariant: bool = False
