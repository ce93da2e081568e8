from __future__ import annotations

import numpy as np
import pytest
import torch

from torch_pagoda.runtime.batching import ScheduledRequest
from torch_pagoda.runtime.blocks import BlockGroup, BlockManager
from torch_pagoda.runtime.cache.kv_cache import allocate_kv_cache
from torch_pagoda.runtime.engine.model_runner import ModelRunner
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram

BLOCK_SIZE = 4


def make(
    rows: int = 4, max_model_len: int = 64, num_blocks: int = 32
) -> tuple[ToyProgram, ModelRunner, BlockManager]:
    program = ToyProgram()
    cache = allocate_kv_cache(program.caches, num_blocks, BLOCK_SIZE)
    return (
        program,
        ModelRunner(program, cache, BLOCK_SIZE, rows, max_model_len),
        BlockManager([BlockGroup(num_blocks)], BLOCK_SIZE),
    )


def request(name: str, *prompt: int) -> Request:
    return Request(name, list(prompt), SamplingParams(max_tokens=8))


def planned(runner: ModelRunner, blocks: BlockManager, req: Request, start: int, count: int) -> ScheduledRequest:
    added = blocks.allocate(req.request_id, start + count, start)
    if any(added):
        runner.append_blocks(req, added)
    return ScheduledRequest(req, count, start, start + count == req.num_tokens)


def test_a_mixed_step_is_packed_as_the_contract_says() -> None:
    _, runner, blocks = make()
    decode, chunk, whole = request("d", 1, 2, 3, 4, 5), request("c", *range(10, 20)), request("w", 7)
    for req in (chunk, decode, whole):  # rows need not follow the order of the step
        runner.add(req)
    planned(runner, blocks, chunk, 0, 3)
    planned(runner, blocks, decode, 0, 4)
    step = [
        planned(runner, blocks, decode, 4, 1),
        planned(runner, blocks, chunk, 3, 6),
        planned(runner, blocks, whole, 0, 1),
    ]
    ids, positions, meta = runner.pack(step)
    assert ids.tolist() == [[5, *range(13, 19), 7]] and ids.dtype == torch.int64
    assert positions.tolist() == [[4, 3, 4, 5, 6, 7, 8, 0]] and positions.dtype == torch.int64
    assert meta.query_start_loc.tolist() == [0, 1, 7, 8] and meta.query_start_loc.dtype == torch.int32
    assert meta.seq_lens.tolist() == [5, 9, 1] and meta.seq_lens.dtype == torch.int32
    assert meta.logits_rows.tolist() == [0, 7] and meta.logits_rows.dtype == torch.int64
    assert meta.token_lengths.tolist() == [5, *[10] * 6, 1] and meta.token_lengths.dtype == torch.int64
    assert meta.block_table.dtype == torch.int32 and meta.block_table.shape == (3, 3)
    for row, item in enumerate(step):
        table = blocks.table(item.request.request_id)
        assert meta.block_table[row, : len(table)].tolist() == table
    owners = [("d", 4), *(("c", p) for p in range(3, 9)), ("w", 0)]
    expected = [blocks.table(name)[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for name, p in owners]
    assert meta.slot_mapping.tolist() == expected and meta.slot_mapping.dtype == torch.int64
    assert all(t.is_contiguous() for t in (ids, positions, meta.block_table, meta.seq_lens, meta.logits_rows))


def test_length_of_a_token_does_not_depend_on_chunks() -> None:
    _, runner, blocks = make()
    req = request("a", *range(6))
    req.output_token_ids = [8, 9]
    runner.add(req)
    _, _, meta = runner.pack([planned(runner, blocks, req, 0, 8)])
    assert meta.token_lengths.tolist() == [6] * 6 + [7, 8]


def test_lengths_of_a_sequence_that_was_computed_anew() -> None:
    program, runner, blocks = make()
    program.restart_length = 7
    crossed, below, long_prompt = request("c", *range(6)), request("b", *range(6)), request("p", *range(10))
    crossed.output_token_ids, below.output_token_ids = [8, 9], [8]
    for req in (crossed, below, long_prompt):
        runner.add(req)
    _, _, meta = runner.pack([planned(runner, blocks, crossed, 0, 8)])
    assert meta.token_lengths.tolist() == [8] * 8
    _, _, meta = runner.pack([planned(runner, blocks, below, 0, 7), planned(runner, blocks, long_prompt, 0, 10)])
    assert meta.token_lengths.tolist() == [6] * 6 + [7] + [10] * 10
    runner.append_tokens([below], [9])  # grows beyond the length: from now on as if it had started there
    _, _, meta = runner.pack([planned(runner, blocks, below, 0, 8)])
    assert meta.token_lengths.tolist() == [8] * 8


def test_chunks_and_decodes_give_the_dense_logits() -> None:
    program, runner, blocks = make()
    a, b = request("a", 3, 1, 4, 1, 5, 9, 2), request("b", 6, 5)
    runner.add(a)
    runner.add(b)
    assert runner.run([planned(runner, blocks, a, 0, 5)]).sampled.shape == (0, program.vocab_size)
    assert program.steps[-1] == (5, 1, 1), "a step asks for at least one row"
    got = runner.run([planned(runner, blocks, a, 5, 2), planned(runner, blocks, b, 0, 2)]).sampled
    torch.testing.assert_close(got[0], program.dense_logits([3, 1, 4, 1, 5, 9, 2])[-1])
    torch.testing.assert_close(got[1], program.dense_logits([6, 5])[-1])
    for req, token in ((a, 11), (b, 12)):
        req.output_token_ids.append(token)
    runner.append_tokens([b, a], [12, 11])
    got = runner.run([planned(runner, blocks, b, 2, 1), planned(runner, blocks, a, 7, 1)]).sampled
    torch.testing.assert_close(got[0], program.dense_logits([6, 5, 12])[-1])
    torch.testing.assert_close(got[1], program.dense_logits([3, 1, 4, 1, 5, 9, 2, 11])[-1])


def test_rows_are_taken_and_given_back() -> None:
    _, runner, _ = make(rows=2)
    a, b, c = (request(name, 1) for name in "abc")
    runner.add(a)
    runner.add(b)
    with pytest.raises(RuntimeError, match=r"'c' finds no free row: all max_num_seqs=2"):
        runner.add(c)
    runner.remove(a)
    runner.remove(a)
    runner.add(c)
    assert (a.row, b.row, c.row) == (None, 1, 0)
    with pytest.raises(RuntimeError, match="'a' has no row"):
        runner.append_blocks(a, [[0]])
    runner.reset()
    assert (b.row, c.row) == (None, None)
    runner.add(a)
    assert a.row == 0


def test_a_row_that_is_reused_starts_clean() -> None:
    program, runner, blocks = make(rows=1)
    for name, length in (("long", 20), ("short", 3)):
        req = request(name, *range(1, length + 1))
        runner.add(req)
        got = runner.run([planned(runner, blocks, req, 0, length)]).sampled
        torch.testing.assert_close(got[0], program.dense_logits(range(1, length + 1))[-1])
        runner.remove(req)
        blocks.free(name)


def test_rows_grow_with_the_longest_request() -> None:
    _, runner, _ = make(max_model_len=100_000)
    short = request("short", 5, 6, 7)
    runner.add(short)
    runner.append_blocks(short, [[3]])
    long = Request("long", np.arange(3000) % 90, SamplingParams())
    runner.add(long)
    runner.append_blocks(long, [list(range(750))])
    ids, _, meta = runner.pack([ScheduledRequest(short, 3, 0, True), ScheduledRequest(long, 1000, 2000, True)])
    assert ids[0, :3].tolist() == [5, 6, 7] and ids[0, -1] == 2999 % 90
    assert meta.slot_mapping[:3].tolist() == [12, 13, 14] and meta.slot_mapping[-1] == 2999
    for token in range(3000):
        runner.append_tokens([short], [token % 90])
        if token == 0:
            short.output_token_ids.append(0)
    assert runner.pack([ScheduledRequest(short, 4, 0, True)])[0].tolist() == [[5, 6, 7, 0]]


def test_a_table_can_be_replaced() -> None:
    program, runner, _ = make()
    req = request("a", 3, 1, 4, 1, 5)
    runner.add(req)
    runner.append_blocks(req, [[7, 8, 9]])
    runner.set_blocks(req, [[5, 2]])
    got = runner.run([ScheduledRequest(req, 5, 0, True)])
    torch.testing.assert_close(got.sampled[0], program.dense_logits([3, 1, 4, 1, 5])[-1])
    assert got.prompts == {}
    req.output_token_ids.append(9)
    runner.append_tokens([req], [9])
    *_, meta = runner.pack([ScheduledRequest(req, 1, 5, True)])
    assert meta.block_table.tolist() == [[5, 2]] and meta.slot_mapping.tolist() == [2 * BLOCK_SIZE + 1]


def test_all_rows_of_a_prompt_that_is_scored_are_returned() -> None:
    program, runner, blocks = make()
    prompt = [3, 1, 4, 1, 5, 9]
    scored = Request("s", prompt, SamplingParams(max_tokens=8, prompt_logprobs=0))
    plain, chunk = request("p", 6, 5), request("c", *range(10, 20))
    for req in (scored, plain, chunk):
        runner.add(req)
    dense = program.dense_logits(prompt)
    got = runner.run(
        [
            planned(runner, blocks, plain, 0, 2),
            planned(runner, blocks, scored, 0, 4),
            planned(runner, blocks, chunk, 0, 3),
        ]
    )
    assert got.prompts.keys() == {1} and got.sampled.shape[0] == 1
    torch.testing.assert_close(got.prompts[1], dense[:4])
    torch.testing.assert_close(got.sampled[0], program.dense_logits([6, 5])[-1])
    got = runner.run([planned(runner, blocks, scored, 4, 2), planned(runner, blocks, chunk, 3, 7)])
    torch.testing.assert_close(got.prompts[0], dense[4:])
    torch.testing.assert_close(got.sampled[0], dense[-1])
    torch.testing.assert_close(got.sampled[1], program.dense_logits(range(10, 20))[-1])


def test_a_program_that_breaks_the_contract_is_named() -> None:
    program, runner, blocks = make()
    program.change_logits = lambda logits, _: torch.cat([logits, logits])
    req = request("a", 1, 2)
    runner.add(req)
    with pytest.raises(RuntimeError, match="for 1 requested rows"):
        runner.run([planned(runner, blocks, req, 0, 2)])


def test_a_chunk_that_asks_for_nothing_shifts_nobodys_rows() -> None:
    program, runner, blocks = make()
    scored = Request("s", [3, 1, 4, 1, 5, 9], SamplingParams(max_tokens=8, prompt_logprobs=0))
    chunk, plain = request("c", *range(10, 20)), request("p", 6, 5)
    for req in (scored, chunk, plain):
        runner.add(req)
    got = runner.run(
        [
            planned(runner, blocks, chunk, 0, 3),
            planned(runner, blocks, scored, 0, 4),
            planned(runner, blocks, plain, 0, 2),
        ]
    )
    torch.testing.assert_close(got.prompts[1], program.dense_logits([3, 1, 4, 1, 5, 9])[:4])
    torch.testing.assert_close(got.sampled[0], program.dense_logits([6, 5])[-1])
    assert program.steps[-1] == (9, 3, 5), "tokens, sequences, asked rows"
