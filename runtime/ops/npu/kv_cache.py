"""`npu::` writers of KV caches: npu_scatter_pa_kv_cache, npu_scatter_nd_update_, scatter_update_ and their twins.

Source: op-plugin, docs `torch_npu-npu_scatter_pa_kv_cache.md`, `…-npu_scatter_nd_update_.md` and
`…-scatter_update_.md`.
"""

from __future__ import annotations

import torch

from .numerics import nz_width
from .registration import Operator


def npu_scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_mode: str | None,
) -> None:
    """Write token ``t`` into slot ``slot_mapping[t]`` of two paged caches: block ``slot // bs``, row ``slot % bs``.

    Args:
        key, value: ``[T, KN, Dk]`` and ``[T, KN, Dv]``.
        key_cache, value_cache: written; the dtype of ``key``. Without ``cache_mode`` or with "Norm"
            ``[blocks, bs, KN, D]``; with "PA_NZ" ``[blocks, KN·D/16, bs, 16]`` (32 for int8), where columns
            ``16c … 16c+15`` of a token's ``KN·D`` values lie in ``[block, c, row]``.
        slot_mapping: int32 or int64 ``[T]``, no slot twice. A token with a negative slot is not written (so do the
            vendor's golden tests; the document does not say).

    Raises:
        ValueError: shapes or dtypes that do not fit, a slot behind the cache, a slot twice.
        NotImplementedError: the compressed write.
    """
    for name, tokens, cache in (("key", key, key_cache), ("value", value, value_cache)):
        write_slots(name, tokens, cache, slot_mapping, cache_mode == "PA_NZ")


def write_slots(name: str, tokens: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, nz: bool) -> None:
    """Write ``tokens`` (``[T, KN, D]``) into the paged ``cache``, as :func:`npu_scatter_pa_kv_cache` documents.

    ``name`` is what the errors call ``tokens``.
    """
    if tokens.dim() != 3 or cache.dim() != 4 or tokens.dtype is not cache.dtype or slots.shape != tokens.shape[:1]:
        raise ValueError(
            f"{name} has shape {tuple(tokens.shape)} and dtype {tokens.dtype}, its cache {tuple(cache.shape)} and "
            f"{cache.dtype}, slot_mapping {tuple(slots.shape)}; they must be [T, heads, D], 4 dims of the same "
            "dtype, and [T]"
        )
    if slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slot_mapping has dtype {slots.dtype}; it must be int32 or int64")
    elements = tokens.shape[1] * tokens.shape[2]
    if nz:
        width = nz_width(cache.dtype)
        fits, block_size = cache.shape[1] * width == elements and cache.shape[3] == width, cache.shape[2]
        expected = f"(blocks, {elements}/{width}, block size, {width})"
    else:
        fits, block_size = cache.shape[2:] == tokens.shape[1:], cache.shape[1]
        expected = f"(blocks, block size, {tokens.shape[1]}, {tokens.shape[2]})"
    if not fits:
        raise ValueError(f"the cache of {name} has shape {tuple(cache.shape)}; it must be {expected}")
    if not cache.is_contiguous():
        raise ValueError(f"the cache of {name} is not contiguous; a device would write into a copy of it")
    written = slots >= 0
    kept = slots[written].long()
    if len(kept) and int(kept.max()) >= cache.shape[0] * block_size:
        raise ValueError(f"slot_mapping holds {int(kept.max())}; the cache has {cache.shape[0] * block_size} slots")
    if len(kept.unique()) != len(kept):
        raise ValueError("slot_mapping holds a slot twice; which token the device keeps is undefined")
    rows = tokens[written]
    blocks, offsets = kept // block_size, kept % block_size
    if nz:
        cache[blocks, :, offsets] = rows.reshape(len(rows), cache.shape[1], cache.shape[3])
    else:
        cache[blocks, offsets] = rows


def write_latent(name: str, tokens: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, nz: bool) -> None:
    """:func:`write_slots` for the caches of the MLA operators, whose shape does not tell their format.

    Args:
        tokens: ``[T, heads, D]``.
        cache: ``[blocks, bs, heads, D]``; with ``nz`` its storage holds ``[blocks, heads·D/16, bs, 16]``.
    """
    if nz and cache.dim() == 4 and cache.is_contiguous():
        width = nz_width(cache.dtype)
        cache = cache.view(cache.shape[0], cache.shape[2] * cache.shape[3] // width, cache.shape[1], width)
    write_slots(name, tokens, cache, slots, nz)


def _scatter_pa_fake() -> None:
    return None


def npu_scatter_nd_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """``input[indices[i]] = updates[i]``.

    Args:
        input: written and returned.
        indices: int32 or int64 ``[..., a]``, indices into the first ``a`` dims of ``input``.
        updates: ``indices.shape[:-1] + input.shape[a:]``, the dtype of ``input``.

    Raises:
        ValueError: shapes or dtypes that do not fit, an index out of range (a device does not check).
    """
    depth = indices.shape[-1] if indices.dim() > 1 else 0
    expected = (*indices.shape[:-1], *input.shape[depth:])
    if not 0 < depth <= input.dim() or updates.shape != expected or updates.dtype is not input.dtype:
        raise ValueError(
            f"updates has shape {tuple(updates.shape)} and dtype {updates.dtype} and indices {tuple(indices.shape)}; "
            f"for input {tuple(input.shape)} of {input.dtype} they must be {expected} and (..., dims of input)"
        )
    places = indices.long().unbind(-1)
    for place, size in zip(places, input.shape, strict=False):
        if place.numel() and not 0 <= int(place.min()) <= int(place.max()) < size:
            raise ValueError(f"indices holds places outside a dim of size {size}")
    input.index_put_(places, updates)
    return input


def _return_input(input: torch.Tensor) -> torch.Tensor:
    return input


def scatter_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, axis: int) -> torch.Tensor:
    """Write ``updates[b]`` into ``input[b]`` from position ``indices[b]`` of dim ``axis`` on.

    Args:
        input: written and returned; 2 to 8 dims.
        indices: int32 or int64, ``[B]`` offsets, or ``[B, 2]`` pairs of (row of ``input``, offset).
        updates: the rank and dtype of ``input``, ``B`` rows.
        axis: dim of ``input`` that the offsets count in; not the first.

    Raises:
        ValueError: shapes or dtypes that do not fit, an offset out of range (a device does not check).
    """
    if updates.dim() != input.dim() or updates.dtype is not input.dtype or axis % input.dim() == 0:
        raise ValueError(
            f"updates has shape {tuple(updates.shape)} and dtype {updates.dtype}, axis is {axis}; they must have the "
            f"rank and dtype of input ({tuple(input.shape)}, {input.dtype}), and axis must not be the first dim"
        )
    if indices.dim() not in (1, 2) or len(indices) != len(updates) or (indices.dim() == 2 and indices.shape[1] != 2):
        raise ValueError(
            f"indices has shape {tuple(indices.shape)}; it must be ({len(updates)},) or ({len(updates)}, 2)"
        )
    pairs = list(enumerate(indices.tolist())) if indices.dim() == 1 else indices.tolist()
    length = updates.shape[axis]
    for update, (row, offset) in zip(updates, pairs, strict=True):
        if not 0 <= offset <= input.shape[axis] - length or not 0 <= row < len(input):
            raise ValueError(f"indices holds ({row}, {offset}); that is outside input {tuple(input.shape)}")
        input[row].narrow(axis % input.dim() - 1, offset, length).copy_(update)
    return input


OPERATORS = (
    Operator(
        "npu_scatter_pa_kv_cache", npu_scatter_pa_kv_cache, _scatter_pa_fake, "npu_scatter_pa_kv_cache_functional"
    ),
    Operator("npu_scatter_nd_update_", npu_scatter_nd_update_, _return_input, "npu_scatter_nd_update"),
    Operator("scatter_update_", scatter_update_, _return_input, "scatter_update"),
)
