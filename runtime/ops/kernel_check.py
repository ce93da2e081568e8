"""Compares kernels with their references, once per process, before a program uses them.

Attention: a self-check of whole models runs short sequences. Here sequences are longer than every block of keys that
the kernel takes at a time, and long enough to be split over their keys and merged again where threads are idle.

Mixtures of experts: in half precision a self-check of whole models excuses rows that a router may have sent
elsewhere. Here the experts are given.

Operators that keep state: see ``state_check``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..private_folder import cache_folder
from .arguments import MoeArguments, PagedAttentionArguments
from .attention.paged_attention import paged_attention_cpu
from .moe.moe import moe_cpu, moe_reference
from .native import load_kernels
from .reference import paged_attention_reference
from .state.state_check import wrong_states

aten = torch.ops.aten

_HEADS, _KV_HEADS, _DIM, _BLOCK = 8, 2, 64, 32
_CONTEXTS = (70, 1300, 150)
_NEW = (1, 1, 5)
_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 3e-2}


@functools.cache
def check_kernels() -> None:
    """Compare the kernels that were loaded; nothing where there are none.

    Raises:
        RuntimeError: they give wrong numbers, or read blocks that do not exist.
    """
    why = ""
    if load_kernels() is not None:
        why = wrong_attention(paged_attention_cpu) or wrong_experts(moe_cpu) or wrong_states()
    if why:
        raise RuntimeError(
            f"the C++ kernels in {cache_folder() / 'kernels'} are wrong on this machine: {why}; delete them, so that "
            "they are rebuilt, and report it if that does not help"
        )


def wrong_attention(attend: Callable[..., torch.Tensor]) -> str:
    """The mistake of a function that is to do what ``paged_attention_reference`` does; "" if none is found."""
    for dtype, window in ((torch.float32, 0), (torch.float32, 100), (torch.bfloat16, 0)):
        given = _arguments(dtype, window)
        found = attend(*_fresh(given)).float()
        expected = paged_attention_reference(*_fresh(given)).float()
        error = aten.nan_to_num((found - expected).abs(), nan=float("inf")).max() / expected.std()
        if error > _TOLERANCE[dtype]:
            what = f"attention in {dtype} with sliding_window={window}"
            return f"{what} differs from the reference by {float(error):.2g} standard deviations"
    given = _arguments(torch.float32, 0)
    given.block_table[1, 3] = 1 << 20
    try:
        attend(*_fresh(given))
    except ValueError:
        return ""
    return "a block id outside the cache is not refused"


def wrong_experts(mix: Callable[..., torch.Tensor]) -> str:
    """The mistake of a function that is to do what ``moe_reference`` does; "" if none is found."""
    for dtype in _TOLERANCE:
        for layout, transposed in (("halves", False), ("interleaved", True), ("plain", False)):
            given = _experts(dtype, layout, transposed)
            found, expected = mix(*given).float(), moe_reference(*given).float()
            error = aten.nan_to_num((found - expected).abs(), nan=float("inf")).max() / expected.std()
            if error > _TOLERANCE[dtype]:
                what = f"a mixture of experts in {dtype} with layout={layout!r} and transposed={transposed}"
                return f"{what} differs from the reference by {float(error):.2g} standard deviations"
    return ""


def _experts(dtype: torch.dtype, layout: str, transposed: bool) -> MoeArguments[torch.Tensor]:
    """One expert without tokens, one with a single one, one with many."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    experts, features, inner = 6, 64, 96
    first = inner if layout == "plain" else 2 * inner
    ids = torch.tensor([[i % 2, 3 + (i == 4)] for i in range(20)])  # never the third and the last
    up, down = random(experts, first, features) / features**0.5, random(experts, features, inner) / inner**0.5
    if transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    return MoeArguments(
        input=random(len(ids), features),
        topk_weights=torch.rand(ids.shape, generator=generator).to(dtype),
        topk_ids=ids,
        up=up,
        down=down,
        up_bias=random(experts, first),
        down_bias=random(experts, features),
        activation="silu",
        alpha=1.0,
        limit=2.0,
        layout=layout,
        transposed=transposed,
        weight_input=False,
    )


def _arguments(dtype: torch.dtype, window: int) -> PagedAttentionArguments[torch.Tensor]:
    """A step of three sequences over a full cache."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    width = -(-max(_CONTEXTS) // _BLOCK)
    blocks = width * len(_CONTEXTS)
    table = torch.randperm(blocks, generator=generator).reshape(len(_CONTEXTS), width).to(torch.int32)
    places = [torch.arange(length - new, length) for length, new in zip(_CONTEXTS, _NEW, strict=True)]
    slots = [table[s][at // _BLOCK].long() * _BLOCK + at % _BLOCK for s, at in enumerate(places)]
    tokens = sum(_NEW)
    return PagedAttentionArguments(
        query=random(1, tokens, _HEADS, _DIM).transpose(1, 2) * 2,
        key=random(1, tokens, _KV_HEADS, _DIM).transpose(1, 2),
        value=random(1, tokens, _KV_HEADS, _DIM).transpose(1, 2),
        key_cache=random(blocks, _KV_HEADS, _BLOCK, _DIM).transpose(1, 2),
        value_cache=random(blocks, _KV_HEADS, _BLOCK, _DIM).transpose(1, 2),
        slot_mapping=aten.cat(slots),
        block_table=table,
        query_start_loc=torch.tensor([0, *torch.tensor(_NEW).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor(_CONTEXTS, dtype=torch.int32),
        sinks=random(_HEADS),
        alibi_slopes=None,
        scale=_DIM**-0.5,
        sliding_window=window,
        chunk=0,
        softcap=30.0,
    )


def _fresh(given: PagedAttentionArguments[torch.Tensor]) -> PagedAttentionArguments[torch.Tensor]:
    """The same with caches of their own, which the operator writes."""
    return given._replace(key_cache=given.key_cache.clone(), value_cache=given.value_cache.clone())
