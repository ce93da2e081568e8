"""Steps that are filled up: what the dummy tokens and sequences are, and that the real rows do not notice them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lowered_models import PROMPTS, assert_same, lowered, served

from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.targets.npu.route import Route
from torch_pagoda.compiler.targets.npu.sizes.step_padding import StepSize, pad_step, size_of, spare_blocks
from torch_pagoda.runtime.batching import ScheduledRequest
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.engine.model_runner import ModelRunner
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.step_metadata import StepMetadata

from toy_program import ToyProgram

SIZE = 4
FIRST_SPARE = 50


def step_of(counts: list[int], contexts: list[int]) -> tuple[torch.Tensor, torch.Tensor, StepMetadata]:
    """A step of ``counts`` tokens per sequence, with ``contexts`` tokens in the cache before; all rows are asked."""
    lens = [n + c for n, c in zip(counts, contexts, strict=True)]
    width = max(-(-n // SIZE) for n in lens)
    table = torch.arange(len(counts) * width, dtype=torch.int32).view(len(counts), width)
    positions = torch.cat([torch.arange(c, n) for c, n in zip(contexts, lens, strict=True)])
    row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    step = StepMetadata(
        slot_mapping=table[row, positions // SIZE].long() * SIZE + positions % SIZE,
        block_table=table,
        query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        logits_rows=torch.arange(sum(counts)),
        token_lengths=positions + 1,
    )
    return torch.arange(7, 7 + sum(counts))[None], positions[None], step


def padded(ids, positions, step, size):
    return pad_step(ids, positions, step, size, block_size=SIZE, first_spare_block=FIRST_SPARE)


COUNTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5)


@given(COUNTS, st.integers(0, 20), st.integers(1, 6), st.integers(0, 3), st.integers(5, 8))
def test_what_is_added(sequences, tokens, more, rows, width):
    counts, contexts = map(list, zip(*sequences, strict=True))
    ids, positions, step = step_of(counts, contexts)
    own = size_of(step)
    size = StepSize(own.tokens + tokens, own.sequences + more, own.rows + rows, max(width, own.blocks))
    new_ids, new_positions, new = padded(ids, positions, step, size)
    assert size_of(new) == size and new_ids.shape == new_positions.shape == (1, size.tokens)
    # The step's own part is untouched.
    assert torch.equal(new_ids[:, : own.tokens], ids) and torch.equal(new_positions[:, : own.tokens], positions)
    for field in ("slot_mapping", "query_start_loc", "seq_lens", "logits_rows", "token_lengths"):
        before, after = getattr(step, field), getattr(new, field)
        assert torch.equal(after[: len(before)], before) and after.dtype == before.dtype
    assert torch.equal(new.block_table[: own.sequences, : own.blocks], step.block_table)
    # As the attention kernel wants lengths.
    assert new.query_ends[-1] == size.tokens and new.query_ends == sorted(new.query_ends)
    assert new.query_ends[: own.sequences] == step.query_ends and new.kv_lens[: own.sequences] == step.kv_lens
    dummies = new.query_lens[own.sequences :]
    assert all(kv >= max(1, n) for kv, n in zip(new.kv_lens[own.sequences :], dummies, strict=True))
    assert max(dummies) - min(dummies) <= 1
    # As the cache writer wants slots: each once, outside of what sequences own.
    slots = new.slot_mapping[own.tokens :].tolist()
    assert len(set(slots)) == tokens and set(slots).isdisjoint(step.slot_mapping.tolist())
    spare = range(FIRST_SPARE, FIRST_SPARE + max(1, spare_blocks(tokens, SIZE)))
    assert {slot // SIZE for slot in slots} <= set(spare)
    # Dummies read what dummies have written in this step.
    for table, kv, n in zip(new.block_table[own.sequences :], new.kv_lens[own.sequences :], dummies, strict=True):
        read = [int(table[i // SIZE]) * SIZE + i % SIZE for i in range(kv)]
        assert set(read) <= set(slots) or n == 0
        assert {slot // SIZE for slot in read} <= set(spare)
    assert set(new.logits_rows[own.rows :].tolist()) <= {int(step.logits_rows[0])}


def test_nothing_to_add_copies_nothing():
    given_step = step_of([3, 1], [0, 4])
    assert all(a is b for a, b in zip(padded(*given_step, size_of(given_step[2])), given_step, strict=True))


@pytest.mark.parametrize(
    "size",
    [StepSize(3, 3, 4), StepSize(9, 1, 4), StepSize(9, 3, 3), StepSize(9, 2, 4), StepSize(9, 3, 4, 1)],
    ids=["fewer tokens", "fewer sequences", "fewer rows", "tokens of nobody", "narrower table"],
)
def test_sizes_that_do_not_fit(size):
    with pytest.raises(ValueError, match="cannot be filled up to"):
        padded(*step_of([3, 1], [2, 4]), size)


def test_a_dummy_sequence_needs_its_blocks():
    with pytest.raises(ValueError, match="9 tokens needs 3 blocks, not 2"):
        padded(*step_of([3, 1], [2, 4]), StepSize(13, 3, 4, 2))


class Everything(Route):
    """Runs each step by the reference kernels with as much padding as there is room for."""

    name = "test"

    def plan(self, max_num_seqs, max_num_batched_tokens, max_model_len):
        self.seen, self.blocks, self.room = [], set(), (max_num_seqs + 3, max_num_batched_tokens + 20)
        return self.room[1]

    def size_for(self, size):
        self.seen.append(size)
        sequences, tokens = self.room
        return StepSize(tokens, sequences, max(size.rows, sequences), size.blocks + 1)

    def __call__(self, *args):
        names = [node.name for node in self.traced.placeholders]
        self.blocks.add(args[names.index("key_cache_0")].shape[0])
        return self.traced.module(*args)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_padded_steps_serve_the_same(model_type):
    _, traced = lowered(model_type)
    route = Everything(traced)
    assert_same(served(traced, route), served(traced, traced.module))
    assert len({(size.tokens, size.sequences) for size in route.seen}) > 4


def test_padded_sequences_serve_the_same():
    """Heads of 512 dims go through a layout in which each sequence is padded to the longest."""
    _, traced = lowered("llama", block_size=128, head_dim=512)
    assert "padded_tokens_2" in traced.step_inputs
    assert_same(served(traced, Everything(traced)), served(traced, traced.module))


def test_sequences_never_get_the_spare_blocks():
    _, traced = lowered()
    route = Everything(traced)
    engine = Engine(link(traced, route), block_size=16, num_blocks=9, max_num_seqs=2, max_num_batched_tokens=8)
    (output,) = engine.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=2))
    assert len(output.outputs[0].token_ids) == 2
    assert route.blocks == {9 + spare_blocks(28, 16)} == {11}
    assert engine.block_manager.num_blocks == 9 and engine.max_model_len == 9 * 16


def test_steps_are_packed_on_the_host_whatever_the_device():
    program = ToyProgram()
    program.device = torch.device("meta")
    runner = ModelRunner(program, [], block_size=4, max_num_seqs=2, max_model_len=32)
    request = Request("a", [5, 6, 7], SamplingParams())
    runner.add(request)
    runner.append_blocks(request, [[2]])
    ids, positions, step = runner.pack([ScheduledRequest(request, 3, 0, True)])
    tensors = [ids, positions, *(value for value in vars(step).values() if isinstance(value, torch.Tensor))]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert (step.query_ends, step.query_lens, step.kv_lens) == ([3], [3], [3])
    assert step.query_ends is step.query_ends and step.kv_lens is step.kv_lens  # made once
