"""Limits of npu_incre_flash_attention on the inference chip, over paged caches.

Sources: op-plugin doc npu_incre_flash_attention, and what the vendor's tiling asks beside it (ops-transformer,
``incre_flash_attention_tiling_check.cpp``, ``CheckInputFormatAndLimits``; ``incre_flash_attention_def.cpp``).
"""

from __future__ import annotations

import torch

from .call import Call

MOST_SEQUENCES, MOST_KEYS = 256, 65536
"""Of a call: queries, and tokens in the blocks of a row of the block table."""
_MOST_GROUPED_DIM, _MOST_DIM, _MOST_GROUP, _MOST_BLOCK = 128, 512, 32, 512


def paged_queries(call: Call) -> str:
    """One query for each sequence, its heads side by side, over caches [blocks, block size, Hk * D] of float16."""
    query, table, block_size = call.shape("query"), call.shape("block_table"), call["block_size"]
    if call.target.graph_mode != "ge":
        return "lengths of its sequences would stay those of the capture"
    if call["input_layout"] != "BSH" or not table:
        return f"input_layout is {call['input_layout']!r}; 'BSH' with a block table on this chip"
    if call.dtype("query") is not torch.float16 or call.dtype("key") is not torch.float16:
        return f"query is {call.dtype('query')} and key {call.dtype('key')}; both torch.float16 on this chip"
    heads, kv_heads = call["heads"], call["kv_heads"] or call["heads"]
    dim, group = (query[2] or 0) // heads, heads // kv_heads
    most = _MOST_DIM if group == 1 else _MOST_GROUPED_DIM
    if dim % 16 or dim > most or group > _MOST_GROUP:
        return f"heads of {dim} dims, {group} to one; multiples of 16 up to {most}, and at most {_MOST_GROUP} to one"
    if block_size % 16 or block_size > _MOST_BLOCK:
        return f"block_size is {block_size}; a multiple of 16 up to {_MOST_BLOCK}"
    keys = None if table[1] is None else table[1] * block_size
    if (query[0] or 0) > MOST_SEQUENCES or (keys or 0) > MOST_KEYS:
        return f"{query[0]} sequences of {keys} tokens; at most {MOST_SEQUENCES} of {MOST_KEYS}"
    mask = call.tensor("atten_mask")
    if mask is None:
        return ""
    sizes = call.shape("atten_mask")
    fits = len(sizes) == 4 and sizes[1:3] == (1, 1) and (None in (sizes[0], query[0]) or sizes[0] == query[0])
    if mask.dtype is not torch.bool or not fits or (keys is not None and sizes[3] is not None and sizes[3] < keys):
        return f"atten_mask is {mask.dtype} {sizes}; torch.bool [B, 1, 1, tokens of the blocks]"
    return ""
