"""A small call of each chosen form of attention on the device, compared with the formula before a graph has it.

What a form yields depends on the release of CANN; documents, sources and reports of users contradict each other. A
form that the device refuses or computes wrongly is left out by name, and lowering takes the next one: that of older
releases, sequences padded to one length, or the formula.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch

from .....runtime.npu_errors.device_lost import raise_if_lost
from .....runtime.ops.arguments import PagedAttentionArguments
from .....runtime.ops.attention.gathered_attention import gathered_attention
from .....runtime.ops.npu.limits.attention import MASK_SIZE
from .....runtime.step_metadata import StepMetadata
from .attention_form import LEAST_QUERIES, AttentionForm

log = logging.getLogger(__name__)
_LIMIT = 2**-4
"""Of a number, relative to itself plus the root mean square of its row. Half precision is off by 2**-7; a mask or a
window without effect by the order of 1."""
_MOST_CONTEXT = 4096


@functools.cache
def why_wrong(form: AttentionForm, device: str) -> str:
    """The reason why a device must not be given a form: what it raises, or how far it is off; "" where it is right.

    Raises:
        DeviceLost: the device computes nothing any more.
    """
    context = min(form.window or 2 * form.block_size, _MOST_CONTEXT) + 60
    steps: Sequence[Sequence[tuple[int, int]]] = ([(0, 33), (context, 7), (9, 1)], [(context, 1), (4, 1)])
    try:
        with torch.inference_mode():
            error = max(_error(form, torch.device(device), shares) for shares in steps)
    except Exception as raised:  # the toolkit's own, of any kind
        raise_if_lost(raised)
        reason = f"it refuses it: {(str(raised).strip() or repr(raised)).splitlines()[0]}"
    else:
        reason = (
            "" if error <= _LIMIT else f"its numbers are off by {error:.2g}, relative to a row's root mean square"
        )
    if reason:
        reason = f"the device was tried with one call: {reason}"
        log.warning("attention in layout %s is not used: %s", form, reason)
    return reason


def _error(form: AttentionForm, device: torch.device, shares: Sequence[tuple[int, int]]) -> float:
    """The largest error of a step whose sequences have these tokens (before it, in it)."""
    step, heads = _step(form.block_size, shares), form.heads
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(form.dtype)

    tokens, blocks = len(step.slot_mapping), int(step.block_table.max()) + 1
    query = drawn(tokens, heads.heads, heads.key_dim)
    key, val = (drawn(*shape) for shape in form.cache_shapes(blocks))
    sinks = drawn(heads.heads) if form.has_sinks else None
    mask = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8).triu_(1)
    padded, row_of_token = (step.field(f"{name}_{LEAST_QUERIES}") for name in ("padded_tokens", "row_of_token"))
    given, lens = query, step.query_ends
    if form.layout != "TND":
        given, lens = query.flatten(1)[padded], step.query_lens
    overload, kwargs = form.call(lens, step.kv_lens, step.block_table, mask, sinks)
    kwargs = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in kwargs.items()}
    found = overload(*(tensor.to(device) for tensor in (given, key, val)), **kwargs)[0].cpu().float()
    if form.layout != "TND":
        found = found.flatten(0, 1)[row_of_token].unflatten(1, (heads.heads, -1))
    key_cache, value_cache = (cache.float().unflatten(2, (heads.kv_heads, -1)) for cache in (key, val))
    arguments = PagedAttentionArguments(
        query,
        key,
        val,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=step.slot_mapping,
        block_table=step.block_table,
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        sinks=sinks,
        alibi_slopes=None,
        scale=form.scale,
        sliding_window=form.window,
        chunk=0,
        softcap=0.0,
    )
    expected = gathered_attention(arguments, query.float(), step.padded_tokens, step.row_of_token)
    size = expected.square().mean(-1, keepdim=True).sqrt() + expected.abs()
    return float(((found - expected).abs() / size).nan_to_num(nan=torch.inf).max())


def _step(block_size: int, shares: Sequence[tuple[int, int]]) -> StepMetadata:
    lens = torch.tensor([before + tokens for before, tokens in shares], dtype=torch.int32)
    ends = torch.tensor([tokens for _, tokens in shares]).cumsum(0).int()
    width = -(-int(lens.max()) // block_size)
    table = (
        torch.randperm(width * len(shares), generator=torch.Generator().manual_seed(0)).int().view(len(shares), -1)
    )
    tokens = torch.zeros(int(ends[-1]), dtype=torch.int64)  # nothing is written
    return StepMetadata(tokens, table, torch.cat((torch.zeros(1, dtype=torch.int32), ends)), lens, tokens[:1], tokens)
