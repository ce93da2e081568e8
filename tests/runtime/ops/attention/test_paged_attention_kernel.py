"""The C++ kernel of pagoda::paged_attention against its reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torch_pagoda.runtime.ops import paged_attention_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXED = [(5, 7), (1, 200), (0, 9), (130, 131), (1, 1), (64, 150)]
kernel = torch.ops.pagoda.paged_attention.default


@pytest.fixture
def check(assert_close):
    """Run kernel and reference on copies of a case: equal results, identical caches."""

    def run(case):
        ours, theirs = case.copy(), case.copy()
        result = kernel(*ours)
        assert_close(result, paged_attention_reference(*theirs))
        assert torch.equal(ours[3], theirs[3]) and torch.equal(ours[4], theirs[4])
        assert result.transpose(1, 2).is_contiguous()
        return result

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, kv_heads, dim, value_dim", [(8, 2, 64, 64), (4, 4, 80, 96), (6, 1, 128, 256)])
def test_dtypes(check, paged_case, dtype, cache_dtype, heads, kv_heads, dim, value_dim):
    check(
        paged_case(
            MIXED,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            value_dim=value_dim,
            dtype=dtype,
            cache_dtype=cache_dtype,
        )
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim, value_dim", [(16, 16), (40, 40), (192, 128), (256, 256), (576, 512), (6, 10), (7, 3)])
def test_head_dims(check, paged_case, dtype, dim, value_dim):
    check(paged_case([(3, 70), (1, 40)], heads=4, kv_heads=1, dim=dim, value_dim=value_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 5, 16, 48, 128])
@pytest.mark.parametrize("cache_by_heads", [True, False])
def test_block_sizes(check, paged_case, dtype, block_size, cache_by_heads):
    check(paged_case(MIXED, dtype=dtype, block_size=block_size, cache_by_heads=cache_by_heads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 3), (6, 2), (7, 1), (71, 1), (130, 2)])
def test_head_groups(check, paged_case, dtype, heads, kv_heads):
    check(paged_case([(1, 90), (9, 20)], dtype=dtype, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 9, 12, 16])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("options", [{}, {"window": 75}, {"chunk": 48}, {"sinks": True}], ids=str)
def test_few_rows_that_share_keys(check, paged_case, group, block_size, options):
    """Decoding, whole and partial blocks of keys, columns of values that fill neither tiles nor pieces."""
    sequences = [(1, context) for context in (1, 15, 16, 17, 63, 64, 65, 100, 130, 700)]
    sequences += [(2, 65), (3, 3)]
    for dim, value_dim in ((64, 64), (96, 48), (32, 160), (128, 128)):
        check(
            paged_case(
                sequences,
                heads=2 * group,
                dim=dim,
                value_dim=value_dim,
                dtype=torch.bfloat16,
                block_size=block_size,
                **options,
            )
        )


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("context", [1, 64, 70, 200])
def test_nan_reaches_few_rows_and_no_others(paged_case, group, bad, context):
    case = paged_case([(1, context)] * 2, heads=2 * group, dim=64, dtype=torch.bfloat16)
    case.arguments[0][0, 0, 1] = bad
    result = kernel(*case.arguments)
    assert result[0, 0, 1].isnan().all()
    assert result[0, 1:].isfinite().all() and result[0, 0, 0].isfinite().all()


@pytest.mark.parametrize("cache_by_heads", [True, False])
def test_blocks_between_neighbors_lie_elsewhere(check, paged_case, cache_by_heads):
    """The 16th key is where it would be if all 16 were one after the other, those between are not."""
    case = paged_case(
        [(1, 20)],
        heads=8,
        kv_heads=1,
        dim=64,
        dtype=torch.bfloat16,
        block_size=5,
        cache_by_heads=cache_by_heads,
        padding=0,
    )
    slots, table = case.arguments[5:7]
    table[0, :4] = torch.tensor([2, 6, 0, 5])
    slots[0] = 5 * 5 + 4
    check(case)


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("keys", [75, 99, 100, 330])
def test_tall_tiles(check, paged_case, dim, keys):
    """More rows than the tiles take at once, over keys of which some are left for the vectors."""
    check(paged_case([(75, keys)], heads=8, dim=dim, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 40},
        {"chunk": 32},
        {"softcap": 2.0},
        {"sinks": True},
        {"alibi": True},
        {"window": 50, "chunk": 64, "softcap": 3.0, "sinks": True, "alibi": True},
    ],
    ids=str,
)
def test_options(check, paged_case, dtype, options):
    check(paged_case(MIXED, dtype=dtype, **options))


@pytest.mark.parametrize("options", [{}, {"window": 900}, {"sinks": True, "softcap": 3.0, "alibi": True}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_few_long_sequences_are_split(check, paged_case, dtype, options, threads):
    """Contexts long enough to be cut over their keys, on more threads than there are KV heads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(paged_case([(1, 3000), (2, 700)], heads=4, kv_heads=1, dtype=dtype, **options))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sequences, padding", [([], 0), ([], 5), ([(0, 0)], 3), ([(0, 5), (0, 5)], 0)])
def test_no_tokens(check, paged_case, sequences, padding):
    result = check(paged_case(sequences, padding=padding))
    assert (result == 0).all()


def test_any_strides(check, paged_case):
    for dtype in (torch.float32, torch.bfloat16):
        case = paged_case(MIXED, dtype=dtype)
        arguments = case.arguments
        for i in (0, 3, 4):
            arguments[i] = arguments[i].transpose(1, 3).contiguous().transpose(1, 3)
        arguments[2] = arguments[2].contiguous()
        arguments[5] = torch.stack([arguments[5], arguments[5]], dim=1)[:, 0]
        arguments[6] = arguments[6].long()
        check(case)


def test_only_its_own_slots_change(paged_case):
    case = paged_case(MIXED)
    before = case.copy()
    kernel(*case.arguments)
    slots = case.arguments[5]
    untouched = torch.ones(case.arguments[3].shape[:2], dtype=torch.bool).flatten()
    untouched[slots[slots >= 0]] = False
    for i in (3, 4):
        assert torch.equal(case.arguments[i].flatten(0, 1)[untouched], before[i].flatten(0, 1)[untouched])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"chunk": 32}], ids=str)
def test_what_nobody_sees_is_not_read(paged_case, dtype, options):
    """Slots past the context, other blocks, and blocks behind the window may hold anything, NaN included."""
    case = paged_case([(1, 75), (3, 50), (20, 20)], dtype=dtype, **options)
    clean = kernel(*case.copy())
    arguments = case.copy()
    table = arguments[6]
    seen = torch.zeros(arguments[3].shape[:2], dtype=torch.bool).flatten()
    for s, (tokens, context) in enumerate(case.sequences):
        first = context - tokens
        low = max(0, first - case.window + 1) if case.window else 0
        low = max(low, first // case.chunk * case.chunk) if case.chunk else low
        for position in range(low, context):
            seen[int(table[s, position // 16]) * 16 + position % 16] = True
        table[s, : low // 16] = 10**6
    for i in (3, 4):
        arguments[i].masked_fill_(~seen.view(arguments[i].shape[:2])[:, :, None, None], torch.nan)
    assert torch.equal(kernel(*arguments), clean)


def test_batch_mates_do_not_matter(paged_case):
    """A sequence's result is bit for bit the same alone and in company, whatever runs beside it."""
    case = paged_case([(1, 37), (40, 40), (1, 500)], dtype=torch.bfloat16, padding=0)
    together = kernel(*case.copy())
    for s, (start, end) in enumerate([(0, 1), (1, 41), (41, 42)]):
        alone = case.copy()
        for i in range(3):
            alone[i] = alone[i][:, :, start:end]
        alone[5] = alone[5][start:end]
        alone[6] = alone[6][s : s + 1]
        alone[7] = torch.tensor([0, end - start], dtype=torch.int32)
        alone[8] = alone[8][s : s + 1]
        assert torch.equal(kernel(*alone), together[:, :, start:end])


def test_threads_may_call_at_once(paged_case):
    """The kernel runs without Python's lock; calls from several threads do not share what they scribble on."""
    cases = [paged_case([(n, 200 + n), (1, 90)], dtype=torch.bfloat16) for n in range(1, 9)]
    expected = [kernel(*case.copy()) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda case: kernel(*case.copy()), cases * 5))
    assert all(torch.equal(result, expected[i % 8]) for i, result in enumerate(results))


@pytest.mark.parametrize(
    "change, message",
    [
        ((5, 3, 10**6), r"slot_mapping\[3\] is 1000000; the cache has"),
        ((7, 1, 99), r"query_start_loc\[1\] is 99"),
        ((7, 0, 1), r"query_start_loc\[0\] is 1"),
        ((8, 1, 2), r"seq_lens\[1\] is 2; it must be at least the sequence's 3"),
        ((8, 0, 10**4), r"seq_lens\[0\] is 10000; .* at most the"),
        ((6, (1, 0), 10**4), r"block_table\[1\] is \[10000"),
        ((6, (0, 1), -1), r"block_table\[0\] is"),
    ],
)
def test_bad_metadata_is_refused_before_anything_is_written(paged_case, change, message):
    case = paged_case([(1, 20), (3, 3)])
    arguments = case.copy()
    index, at, value = change
    arguments[index][at] = value
    with pytest.raises(ValueError, match=message):
        kernel(*arguments)
    assert torch.equal(arguments[3], case.arguments[3])


@pytest.mark.parametrize(
    "index, shape, message",
    [
        (0, (1, 7, 6, 32), "do not fit"),
        (1, (1, 2, 5, 32), "do not fit"),
        (2, (1, 2, 5, 32), "key_cache"),
        (3, (5, 16, 2, 31), "key_cache"),
        (4, (5, 16, 2, 31), "value_cache"),
        (5, (5,), "slot_mapping"),
        (8, (3,), "seq_lens"),
        (9, (3,), "sinks"),
    ],
)
def test_bad_shapes_are_named(paged_case, index, shape, message):
    arguments = paged_case([(1, 20), (3, 3)]).arguments
    arguments[index] = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        kernel(*arguments)
