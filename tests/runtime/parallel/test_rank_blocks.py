"""Host blocks of several ranks: a block's parts are those of one process, and each rank has its own in its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from torch_pagoda.runtime.cache.cache_specs import of_all_ranks
from torch_pagoda.runtime.cache.host_blocks import HostBlocks
from torch_pagoda.runtime.parallel.rank_blocks import RankBlocks
from torch_pagoda.runtime.parallel.shared_bytes import SharedBytes
from torch_pagoda.runtime.program import CacheSpec, StateSpec

RANKS, TOKENS = 3, 4
COUNTS = [5, 3]
WHOLE = [
    CacheSpec(6, 8, 4, torch.float32),
    CacheSpec(3, 8, 8, torch.int8, sliding_window=8, group=1),
    CacheSpec(6, 16, 0, torch.bfloat16),
]
LOCAL = [replace(spec, num_kv_heads=spec.num_kv_heads // RANKS, head_ranks=RANKS) for spec in WHOLE]


def test_parts_are_those_of_one_process() -> None:
    assert of_all_ranks(LOCAL) == WHOLE
    one = HostBlocks(WHOLE, COUNTS, TOKENS)
    blocks = RankBlocks(LOCAL, COUNTS, TOKENS, RANKS)
    others = [HostBlocks(LOCAL, COUNTS, TOKENS, SharedBytes.join(m.path).allocate).cache for m in blocks.shared]
    for memory in (*one._bytes, *blocks._each[0]._bytes):
        memory.zero_()  # there is room between the parts of a head
    for layer, spec in enumerate(WHOLE):
        for part, whole in enumerate(one.cache[layer]):
            whole.copy_(torch.arange(whole.numel()).view(whole.shape) % 251)
            for rank, cache in enumerate((blocks.cache, *others)):
                share = spec.num_kv_heads // RANKS
                cache[layer][part].copy_(whole[:, :, rank * share : (rank + 1) * share])
    assert blocks.num_heads == one.num_heads == [6, 3]
    for group, count in enumerate(COUNTS):
        for block in range(count):
            assert blocks.parts(group, block) == one.parts(group, block)
    for part in blocks.parts(1, 2):
        part[:] = bytes(part.nbytes)
    assert not any(tensor[2].any() for cache in (blocks.cache, *others) for tensor in cache[1])
    assert all(tensor[1].any() for cache in (blocks.cache, *others) for tensor in cache[1])


def test_the_count_of_copies_is_shared_and_nothing_is_left_open() -> None:
    memory = SharedBytes.create()
    path, other = memory.path, SharedBytes.join(memory.path)
    other.num_copied += 7
    assert memory.num_copied == 7
    del memory
    with pytest.raises(OSError):
        SharedBytes.join(path)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (StateSpec("state", (4,), torch.float32), "for models with states"),
        (replace(LOCAL[0], head_ranks=1), "KV heads are not divided among the ranks"),
        (replace(LOCAL[0], head_ranks=0), "KV heads are not divided among the ranks"),
        (replace(LOCAL[0], num_kv_heads=1), "different numbers of KV heads"),
    ],
)
def test_what_no_rank_has_a_share_of_is_refused(spec: CacheSpec | StateSpec, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RankBlocks([*LOCAL, spec], COUNTS, TOKENS, RANKS)
