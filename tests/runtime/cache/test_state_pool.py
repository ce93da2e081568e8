from __future__ import annotations

import logging

import pytest
import torch

from torch_pagoda.runtime.cache.cache_specs import bytes_per_block, bytes_per_slot
from torch_pagoda.runtime.cache.kv_cache import allocate_kv_cache
from torch_pagoda.runtime.cache.pool_plan import blocks_by_group
from torch_pagoda.runtime.program import CacheSpec, StateSpec

STATES = [
    StateSpec("conv_state", (3, 8), torch.bfloat16, group=1),
    StateSpec("recurrent_state", (2, 4, 4), torch.float32, group=1),
]
SLOT = 3 * 8 * 2 + 2 * 4 * 4 * 4
KV = CacheSpec(2, 8, 8, torch.bfloat16)
BLOCK = 16 * 2 * 16 * 2
HYBRID = [STATES[0], KV, STATES[1]]
ALONE = [StateSpec(spec.name, spec.shape, spec.dtype) for spec in STATES]


def counts(specs, max_num_seqs=4, **sizes):
    given = {"num_blocks": None, "memory": None, "free_memory": None, **sizes}
    return blocks_by_group(
        specs, 16, **given, max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_model_len=128
    )


def test_states_are_no_tokens() -> None:
    assert bytes_per_block(HYBRID, 16) == bytes_per_block([KV], 16) == BLOCK
    assert bytes_per_slot(HYBRID) == bytes_per_slot(ALONE) == SLOT and bytes_per_slot([KV]) == 0


def test_slots_come_off_the_memory_first() -> None:
    assert counts(HYBRID, memory=8 * SLOT + 30 * BLOCK) == [30, 8]
    assert counts(HYBRID, free_memory=8 * SLOT + 5 * BLOCK) == [5, 8]
    assert counts(HYBRID, free_memory=8 * SLOT + 1000 * BLOCK) == [4 * 8, 8], "no more than can be used"
    assert counts(HYBRID, num_blocks=7) == [7, 8]
    assert counts(ALONE, memory=100 * SLOT) == counts(ALONE, num_blocks=7) == [8]
    assert counts([KV], memory=30 * BLOCK + 3) == [30]


def test_states_leave_half_of_a_small_memory_to_keys_and_values(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert counts(HYBRID, max_num_seqs=64, memory=20 * SLOT) == [10 * SLOT // BLOCK, 10]
    assert f"only 10 state slots of {SLOT} bytes" in caplog.text and "max_num_seqs=64" in caplog.text
    assert counts(HYBRID, max_num_seqs=64, memory=2 * SLOT + BLOCK) == [1, 2]


def test_what_does_not_fit_is_refused_with_its_bytes() -> None:
    with pytest.raises(ValueError, match=rf"kv_cache_memory={2 * SLOT + BLOCK - 1} bytes is too small.*{SLOT} bytes"):
        counts(HYBRID, memory=2 * SLOT + BLOCK - 1)
    with pytest.raises(
        ValueError, match=rf"^free memory=5 bytes is too small: one sequence takes 2 state slots of {SLOT}"
    ):
        counts(ALONE, free_memory=5)


def test_a_state_is_one_tensor_of_slots() -> None:
    conv, (key, value), recurrent = allocate_kv_cache(HYBRID, [5, 3], 16)
    assert [t.shape for t in (*conv, *recurrent)] == [(3, 3, 8), (3, 2, 4, 4)]
    assert (conv[0].dtype, recurrent[0].dtype) == (torch.bfloat16, torch.float32)
    assert key.shape == value.shape == (5, 16, 2, 8)
    assert [len(layer) for layer in allocate_kv_cache(ALONE, [4], 16)] == [1, 1]
