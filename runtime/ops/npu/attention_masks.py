"""Masks of the `npu::` attention operators, `atten_mask` and `sparse_mode`: the keys that a query sees.

A mask entry of 1 or True hides the pair. Modes 2, 3 and 4 take the same constant for every length: the
``[2048, 2048]`` matrix ``triu(ones, 1)``, from which the device cuts the tiles that it needs.
"""

from __future__ import annotations

from functools import cache

import torch

_COMPRESSED = 2048
_MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)
NO_LIMIT = 2147483647


@cache
def _upper_triangle() -> torch.Tensor:
    return torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.int8).triu_(1).view(torch.int64)


def check_compressed_mask(mask: torch.Tensor | None, sparse_mode: int) -> None:
    """Raise ``ValueError`` unless ``mask`` is the constant that ``sparse_mode`` 2, 3 or 4 takes."""
    if mask is None:
        raise ValueError(
            f"sparse_mode is {sparse_mode} and atten_mask is None; "
            "pass torch.ones(2048, 2048, dtype=torch.int8).triu(1)"
        )
    leading = tuple(mask.shape[:-2])
    if mask.shape[-2:] != (_COMPRESSED, _COMPRESSED) or leading not in ((), (1,), (1, 1)):
        raise ValueError(
            f"atten_mask has shape {tuple(mask.shape)}; sparse_mode {sparse_mode} takes (2048, 2048) whatever the "
            "lengths are"
        )
    _check_dtype(mask)
    # Eight entries at a time: comparing bytes one by one takes longer than the attention itself.
    entries = mask.reshape(_COMPRESSED, _COMPRESSED).contiguous().view(torch.int64)
    if not torch.equal(entries, _upper_triangle()):
        raise ValueError(
            f"atten_mask is not triu(ones, 1); sparse_mode {sparse_mode} needs exactly that, 1 hiding the pair"
        )


def check_full_mask(mask: torch.Tensor, batch: int, query_size: int, kv_size: int) -> torch.Tensor:
    """``mask`` of ``sparse_mode`` 0 or 1 as ``[1 or B, rows, columns]`` of bool, True for hidden pairs.

    Args:
        mask: (1, S, KS), (B, 1, S, KS), (1, 1, S, KS), (S, KS), or (B, KS) when S is 1; S may be filled up to a
            multiple of 32, KS as far as it goes (``atten_mask`` in op-plugin's documents of the operator).
        batch: B.
        query_size: S of the query tensor.
        kv_size: KS of the key tensor, or what the block table can hold.

    Raises:
        ValueError: another shape or dtype.
    """
    _check_dtype(mask)
    if mask.dim() == 2 and query_size == 1:
        rows = mask[:, None] if mask.shape[0] == batch else mask[None][:0]
    elif mask.dim() in (2, 3, 4) and all(size == 1 for size in mask.shape[:-2][1:]):
        rows = mask.reshape(-1, *mask.shape[-2:])
    else:
        rows = mask[None][:0]
    fits = rows.dim() == 3 and len(rows) in (1, batch) and rows.shape[2] >= kv_size
    if not fits or not query_size <= rows.shape[1] <= -(-query_size // 32) * 32:
        raise ValueError(
            f"atten_mask has shape {tuple(mask.shape)}; with sparse_mode 0 or 1 it must cover {query_size} queries "
            f"and {kv_size} keys: ({query_size}, {kv_size}), (1, …), (1, 1, …) or ({batch}, 1, …)"
        )
    return rows.to(torch.bool)


def visible_pairs(
    sparse_mode: int,
    hidden: torch.Tensor | None,
    query_length: int,
    kv_length: int,
    pre_tokens: int,
    next_tokens: int,
) -> torch.Tensor | None:
    """Pairs that take part for one sequence, ``[query_length, kv_length]`` of bool; None for all of them.

    ``i`` is a query's position in its sequence, ``j`` a key's, ``last = kv_length - query_length``:

    - 0: not hidden, and, if a mask is given, ``i - pre_tokens <= j <= i + next_tokens``;
    - 1: not hidden;
    - 2: ``j <= i``;
    - 3: ``j <= i + last``;
    - 4: ``i + last - pre_tokens <= j <= i + last + next_tokens``. A sliding window of W tokens, the query's own
      among them, is ``pre_tokens = W - 1, next_tokens = 0``.

    Args:
        sparse_mode: 0 to 4.
        hidden: this sequence's full mask (modes 0 and 1), at least ``[query_length, kv_length]``.
    """
    if sparse_mode in (0, 1):
        if hidden is None:
            return None
        visible = ~hidden[:query_length, :kv_length]
        if sparse_mode == 1 or (pre_tokens >= NO_LIMIT and next_tokens >= NO_LIMIT):
            return visible
        return visible & _band(query_length, kv_length, 0, pre_tokens, next_tokens)
    if sparse_mode == 2:
        return _band(query_length, kv_length, 0, NO_LIMIT, 0)
    last = kv_length - query_length
    if sparse_mode == 3:
        return None if query_length == 1 else _band(query_length, kv_length, last, NO_LIMIT, 0)
    return _band(query_length, kv_length, last, pre_tokens, next_tokens)


def _band(query_length: int, kv_length: int, shift: int, pre_tokens: int, next_tokens: int) -> torch.Tensor:
    distance = torch.arange(kv_length)[None] - (torch.arange(query_length)[:, None] + shift)
    return (distance >= -pre_tokens) & (distance <= next_tokens)


def _check_dtype(mask: torch.Tensor) -> None:
    if mask.dtype not in _MASK_DTYPES:
        raise ValueError(f"atten_mask has dtype {mask.dtype}; it must be bool, int8 or uint8, 1 hiding the pair")
